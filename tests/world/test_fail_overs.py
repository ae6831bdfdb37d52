"""The machine of an elected coordinator is lost, in every phase, with others, and again: the others go on."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.cluster.roster import Roster
from tests.world.aimed import History
from tests.world.history import Fate
from tests.world.world import Process, World

PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update", "regroup", "copy"]
LEASE = 2.4  # seconds until etcd forgets who does not answer


def lose_holder(phase: str, seconds: float, *, times: int = 1, beside: bool = False) -> Fate:
    """Lose the coordinator's machine when a worker that is not on it comes into a phase, so many times in all.

    ``beside``: that worker is lost, too.
    """
    seen: Counter[str] = Counter()

    def fate(world: World, process: Process, at: str) -> None:
        here = process.name.startswith(f"{world.holder.host}.")
        if here or at != phase or len(world.of("fail-over")) >= times or world.coordinator.roster is None:
            return
        seen[process.name] += 1
        if seen[process.name] >= 2 or phase in ("regroup", "copy"):
            world.log("fault", kind="fail over", phase=phase, worker=process.name)
            world.fail_over(seconds)
            if beside:
                process.kill()

    return fate


@pytest.mark.parametrize("seconds", [0.2, LEASE])
@pytest.mark.parametrize("phase", PHASES)
def test_the_others_go_on_under_another_coordinator(phase: str, seconds: float) -> None:
    history = History(workers=[2, 2, 1], fate=lose_holder(phase, seconds), minimum_hosts=1, elected=True)
    assert history.judge()
    assert history.struck == 1
    numbers = [event["number"] for event in history.of("generation")]
    assert numbers == sorted(set(numbers)), "no number is used twice"


@pytest.mark.parametrize("phase", PHASES)
def test_another_worker_is_lost_with_it(phase: str) -> None:
    history = History(workers=[1, 2, 1], fate=lose_holder(phase, LEASE, beside=True), minimum_hosts=1, elected=True)
    assert history.judge()


@pytest.mark.parametrize("phase", PHASES)
def test_twice_in_a_row(phase: str) -> None:
    history = History(workers=[1, 1, 2], fate=lose_holder(phase, LEASE, times=2), minimum_hosts=1, elected=True)
    assert history.judge()
    assert len(history.of("fail-over")) == 2


@pytest.mark.parametrize("phase", ["vote", "voted"])
def test_survivors_do_not_wait_for_those_who_were_lost_with_the_coordinator(phase: str) -> None:
    """They would wait for a heartbeat. The control below does."""
    assert waited(phase) < 1.0


def waited(phase: str) -> float:
    """Simulated seconds from the begin of the new coordinator to the next commit."""
    history = History(workers=[1, 2], fate=lose_holder(phase, LEASE), minimum_hosts=1, elected=True)
    assert history.judge()
    (lost,) = history.of("fail-over")
    begin = lost["t"] + LEASE
    return min(event["t"] for event in history.of("commit") if event["t"] > begin) - begin


def test_control_without_the_leases_of_hosts_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    recall = Roster.recall
    monkeypatch.setattr(Roster, "recall", lambda self, known, alive: recall(self, known, range(9999)))
    assert waited("vote") > 2.0
