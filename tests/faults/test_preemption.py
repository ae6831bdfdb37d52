"""Preemption notices: to the first machine, to all machines, to every process; and what the grace covers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.harness import TRAIN, Hosts, launch_hosts, until

TERMINATED = 128 + signal.SIGTERM
HEARTBEAT = 1.5  # seconds: three of them are over soon, and a worker that waits for its turn is not lost
STEPS = 60
SLOW = {"STEPS": str(STEPS), "WANTED": "99", "PAUSE": "0.5"}  # until there is a hurry


def seen(hosts: Hosts, event: str, **fields: object) -> int:
    return sum(e["event"] == event and all(e.get(k) == v for k, v in fields.items()) for e in hosts.events())


def members(hosts: Hosts) -> set[str]:
    """The workers of the newest generation."""
    return {*([e for e in hosts.events() if e["event"] == "generation"] or [{"workers": ()}])[-1]["workers"]}


def hurry(hosts: Hosts) -> None:
    (hosts.log_dir.parent / "hurry").touch()


def test_the_first_agent_leaves_and_its_coordinator_serves_later_losses_and_joins(tmp_path: Path, undisturbed) -> None:
    codes: list[int] = []

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: seen(hosts, "commit", step=1) == 3)
        coordinator = hosts.agents[0].coordinator
        assert coordinator is not None
        hosts.leave(0)
        await until(lambda: members(hosts) == {"1.0", "2.0"})
        await asyncio.sleep(4 * HEARTBEAT)  # once the coordinator was killed after three of them
        os.kill(hosts.workers["1.0"].pid, signal.SIGKILL)
        await until(lambda: members(hosts) == {"1.1", "2.0"})  # it was lost, and replaced
        hosts.start(1)
        await until(lambda: members(hosts) == {"1.1", "2.0", "3.0"})
        assert hosts.agents[0].coordinator is coordinator, "the same process all the time"
        assert not hosts.jobs[0].done()
        hurry(hosts)
        codes.extend([await job for job in hosts.jobs])

    given = {"minimum_hosts": 1, "maximum_hosts": 3, "heartbeat_timeout": HEARTBEAT}
    result = launch_hosts(tmp_path, script=TRAIN, workers=[1, 1, 1], meddle=meddle, environment=SLOW, **given)
    assert codes == [TERMINATED, 0, 0, 0]
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses
    assert [e["worker"] for e in result.of("failure")] == ["1.0"], "leaving is no failure"
    assert not result.of("coordinator-restart")
    assert any("the coordinator stays here until the run is over" in line for line in result.said)
