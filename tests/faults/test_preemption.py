"""Preemption notices: to the first machine, to all machines, to every process; and what the grace covers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint import series
from holdfast.cluster.agent import Agent
from holdfast.cluster.events import read_events
from holdfast.cluster.grace import NOT_SAVED
from tests.harness import TRAIN, Hosts, count_events, launch, launch_hosts, until, wait_until
from tests.warm import Command

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


MANY = {"minimum_hosts": 1, "maximum_hosts": 4, "heartbeat_timeout": HEARTBEAT}


@pytest.mark.parametrize("moment", ["another joins", "another is lost"])
def test_the_first_agent_leaves_in_the_middle_of_a_change(tmp_path: Path, undisturbed, moment: str) -> None:
    codes: list[int] = []

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: seen(hosts, "commit", step=1) == 2)
        if moment == "another joins":
            hosts.start(1)
            await until(lambda: seen(hosts, "started", worker="2.0"))
        else:
            os.kill(hosts.workers["1.0"].pid, signal.SIGKILL)
            await until(lambda: seen(hosts, "failure", worker="1.0"))
        hosts.leave(0)
        stay = {"1.0", "2.0"} if moment == "another joins" else {"1.1"}
        await until(lambda: members(hosts) == stay)
        hurry(hosts)
        codes.extend([await job for job in hosts.jobs])

    result = launch_hosts(tmp_path, script=TRAIN, workers=[1, 1], meddle=meddle, environment=SLOW, **MANY)
    assert codes == [TERMINATED] + [0] * (len(codes) - 1)
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses


def test_a_coordinator_that_is_killed_after_its_agent_has_left_comes_back(tmp_path: Path, undisturbed) -> None:
    """The agent that lingers connects first, and its bye must not end the run. Then it is told to end at once."""
    codes: list[int] = []

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: seen(hosts, "commit", step=1) == 3)
        hosts.leave(0)
        await until(lambda: members(hosts) == {"1.0", "2.0"})
        await until(lambda: any("stays here" in line for line in hosts.said))
        coordinator = hosts.agents[0].coordinator
        assert coordinator is not None
        coordinator.kill()
        await until(lambda: seen(hosts, "coordinator-restart"))
        os.kill(hosts.workers["1.0"].pid, signal.SIGKILL)
        await until(lambda: seen(hosts, "commit", worker="1.1"))
        hosts.leave(0)  # once more: the others train on without a coordinator, until the next change
        codes.append(await hosts.jobs[0])
        hurry(hosts)
        codes.extend([await job for job in hosts.jobs[1:]])

    result = launch_hosts(tmp_path, script=TRAIN, workers=[1, 1, 1], meddle=meddle, environment=SLOW, **MANY)
    assert codes == [TERMINATED, 0, 0]
    assert result.sha256 == undisturbed(STEPS).sha256


def test_the_first_agent_that_may_replace_nobody_keeps_the_coordinator(tmp_path: Path, undisturbed) -> None:
    """No notice, but the same: its machine has no worker left, and the others go on."""
    codes: list[int] = []

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: seen(hosts, "commit", step=1) == 2)
        os.kill(hosts.workers["0.0"].pid, signal.SIGKILL)
        await until(lambda: any("stays here" in line for line in hosts.said))
        await asyncio.sleep(3.0)  # once the coordinator was killed after two seconds
        hosts.start(1)
        await until(lambda: members(hosts) == {"1.0", "2.0"})
        hurry(hosts)
        codes.extend([await job for job in hosts.jobs])

    settings = {**MANY, "max_restarts": 0}
    result = launch_hosts(tmp_path, script=TRAIN, workers=[1, 1], meddle=meddle, environment=SLOW, **settings)
    assert codes == [3, 0, 0]
    assert result.sha256 == undisturbed(STEPS).sha256


def saved_at(folder: Path) -> dict[str, str]:
    return {**SLOW, "PAUSE": "0.3", "CHECKPOINT": str(folder / "saved"), "EVERY": "1000"}


def test_all_agents_are_preempted_at_once_and_all_is_saved(tmp_path: Path, undisturbed) -> None:
    codes: list[int] = []

    async def preempt(hosts: Hosts) -> None:
        await until(lambda: seen(hosts, "commit", step=2) == 3)
        for number in range(3):
            hosts.leave(number)
        codes.extend([await job for job in hosts.jobs])

    (tmp_path / "a").mkdir()
    environment = saved_at(tmp_path)
    first = launch_hosts(tmp_path / "a", script=TRAIN, workers=[1, 1, 1], meddle=preempt, environment=environment)
    last = max(e["step"] for e in first.of("commit")) + 1
    assert codes == [TERMINATED] * 3
    assert series.steps_in(tmp_path / "saved") == [last], "the last committed step is saved"
    assert last in {e["saved"] for e in first.of("left")}
    assert any(f"step {last} is saved" in line for line in first.said)
    assert not first.of("failure")
    second = launch(tmp_path / "b", environment={**environment, "WANTED": "0"}, workers=2)
    assert min(e["step"] for e in second.of("commit")) == last
    assert second.sha256 == undisturbed(STEPS).sha256


def test_the_first_agent_leaves_before_training_begins(tmp_path: Path, undisturbed) -> None:
    """The second begins without it. The first keeps the coordinator."""
    codes: list[int] = []

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: seen(hosts, "started", worker="0.0"))
        hosts.leave(0)
        await until(lambda: seen(hosts, "host-gone", host=0))
        hosts.start(2)
        codes.extend([await job for job in hosts.jobs])

    environment = {"STEPS": str(STEPS)}
    settings = {**MANY, "minimum_hosts": 2}
    result = launch_hosts(tmp_path, script=TRAIN, workers=[1, 2], meddle=meddle, environment=environment, **settings)
    assert codes == [TERMINATED, 0, 0]
    assert result.sha256 == undisturbed(STEPS).sha256
    assert {w for e in result.of("generation") for w in e["workers"]} == {"1.0", "1.1", "2.0", "2.1"}
    assert not result.of("failure")


def test_a_notice_before_anything_has_started_ends_a_run_of_one_machine(tmp_path: Path) -> None:
    async def meddle(agent: Agent) -> None:
        await until(lambda: agent.settings.events.exists())
        os.kill(os.getpid(), signal.SIGTERM)

    result = launch(tmp_path, meddle=meddle)
    assert result.code == TERMINATED
    assert not result.of("generation")


# --- the grace -----------------------------------------------------------------------------------------


def preempted(folder: Path, *options: str, number: int = signal.SIGTERM, **environment: str) -> Command:
    """``holdfast run`` with two workers, that got a signal in the middle of its training and has ended."""
    settings = {**SLOW, "PAUSE": "0.05", "RESULTS": str(folder / "results.jsonl"), **environment}
    agent = Command("run", "-n", "2", *options, str(TRAIN), folder=folder, **settings)
    trains(folder)
    agent.send_signal(number)
    agent.wait(60)
    return agent


def trains(folder: Path, step: int = 2) -> None:
    path = folder / "holdfast-logs" / "events.jsonl"
    wait_until("training", lambda: path.exists() and any(e.get("step") == step for e in read_events(path)))


def test_a_notice_that_comes_twice_is_one(tmp_path: Path) -> None:
    """A wrapper passes on the signal that the whole process group has got already."""
    settings = {**saved_at(tmp_path), "RESULTS": str(tmp_path / "results.jsonl")}
    agent = Command("run", "-n", "2", str(TRAIN), folder=tmp_path, **settings)
    trains(tmp_path)
    agent.send_signal(signal.SIGTERM)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 128 + signal.SIGTERM
    assert "is saved" in agent.stdout
    assert len(series.steps_in(tmp_path / "saved")) == 1


def test_a_grace_that_is_too_short_for_the_disk(tmp_path: Path) -> None:
    """Both workers' disks need ten minutes. What is not saved is said, in time, and the exit code tells."""
    slow = {"MEDDLE": "slow 0.0 600; slow 0.1 600", "PYTHONPATH": str(Path(__file__).parents[2])}
    agent = preempted(tmp_path, "--grace", "5", **{**saved_at(tmp_path), **slow})
    assert agent.returncode == NOT_SAVED
    assert "5 s of grace" in agent.stdout
    assert "s of grace left; saving step" in agent.stdout, "progress"
    assert "the grace of 5 s is over, and step" in agent.stderr
    assert "is not saved: 0 % of it is written" in agent.stderr
    assert not series.steps_in(tmp_path / "saved")


def test_a_last_checkpoint_that_fails_is_a_loss(tmp_path: Path) -> None:
    """Negative control of the exit code: all have left in order, but nothing is saved."""
    environment = {**SLOW, **saved_at(tmp_path), "RESULTS": str(tmp_path / "results.jsonl")}
    agent = Command("run", "-n", "2", str(TRAIN), folder=tmp_path, **environment)
    trains(tmp_path)
    shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    (tmp_path / "saved").write_text("a file where a folder was")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == NOT_SAVED
    assert "nothing is saved of the" in agent.stderr
    assert "steps that were trained: the last checkpoint failed" in agent.stderr


def test_a_notice_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    """The script does something else, and ends. The run is done, so the exit code is 0."""
    script = tmp_path / "script.py"
    wait = "import time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    script.write_text(f"import os\nfrom tests.faults.train import main\nmain()\nprint('trained')\n{wait}\n")
    environment = {**saved_at(tmp_path), "STEPS": "5", "RESULTS": str(tmp_path / "results.jsonl")}
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    agent = Command("run", "-n", "2", str(script), folder=tmp_path, **{**environment, **path})
    wait_until("training is over", lambda: agent.stdout.count("trained") == 2)
    agent.send_signal(signal.SIGTERM)
    wait_until("the notice is understood", lambda: "of grace" in agent.stdout)
    (tmp_path / "go").touch()
    assert agent.wait(60) == 0
    assert series.steps_in(tmp_path / "saved") == [5]


def test_a_grace_that_ends_within_a_step(tmp_path: Path) -> None:
    agent = preempted(tmp_path, **{**saved_at(tmp_path), "PAUSE": "60", "PATIENT": "2", "HOLDFAST_GRACE": "2"})
    assert agent.returncode == NOT_SAVED
    assert "workers 0.0, 0.1 had not come to a step boundary" in agent.stderr


def test_without_a_checkpoint_folder_it_is_said_that_nothing_is_saved(tmp_path: Path) -> None:
    agent = preempted(tmp_path, number=signal.SIGUSR1)
    assert agent.returncode == 128 + signal.SIGUSR1
    assert "nothing is saved" in agent.stdout
    assert "the run has no checkpoint folder" in agent.stdout


def test_workers_whose_work_goes_on_elsewhere_say_so(tmp_path: Path) -> None:
    async def meddle(hosts: Hosts) -> None:
        await until(lambda: seen(hosts, "commit", step=1) == 2)
        hosts.leave(1)
        await hosts.jobs[1]
        hurry(hosts)

    result = launch_hosts(tmp_path, script=TRAIN, workers=[1, 1], meddle=meddle, environment=saved_at(tmp_path), **MANY)
    assert any("the other workers train on, so nothing had to be saved" in line for line in result.said)


# --- notices that reach every process ------------------------------------------------------------------


def tree_of(agent: int) -> list[int]:
    """The agent's process group, and all processes below those: zygote, coordinator, workers."""
    table = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        table[int(path.parent.name)] = (int(words[1]), int(words[2]))  # parent, group
    found = {pid for pid, (_, group) in table.items() if group == agent}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return sorted(found)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_notice_to_every_process_kills_nobody(tmp_path: Path, undisturbed, number: int) -> None:
    """As slurmstepd and systemd send it, with SIGCONT first. Everybody saves, and the next run goes on from there."""
    environment = {**saved_at(tmp_path), "RESULTS": str(tmp_path / "results.jsonl")}
    agent = Command("run", "-n", "2", str(TRAIN), folder=tmp_path, **environment)
    trains(tmp_path)
    everybody = tree_of(agent.pid)
    assert len(everybody) == 5, "agent, zygote, coordinator and two workers"
    for kind in (signal.SIGCONT, number):
        for pid in everybody:
            os.kill(pid, kind)
    assert agent.wait(60) == 128 + number
    events = list(read_events(tmp_path / "holdfast-logs" / "events.jsonl"))
    assert not {"failure", "coordinator-restart", "zygote-restart"} & {e["event"] for e in events}
    assert "goes on" not in agent.stdout, "the agent got it too"
    last = max(e["step"] for e in events if e["event"] == "commit") + 1
    assert series.steps_in(tmp_path / "saved") == [last]
    second = launch(tmp_path / "b", environment={**saved_at(tmp_path), "WANTED": "0"}, workers=2)
    assert second.sha256 == undisturbed(STEPS).sha256


def test_a_notice_to_a_single_worker_is_explained(tmp_path: Path, undisturbed) -> None:
    async def meddle(agent: Agent) -> None:
        await until(lambda: agent.settings.events.exists() and count_events(agent, "commit", step=2))
        os.kill(agent.workers["0.1"].pid, signal.SIGTERM)
        await until(lambda: any("worker 0.1 was sent SIGTERM and goes on" in line for line in said))
        (tmp_path / "hurry").touch()

    said: list[str] = []
    result = launch(tmp_path, environment=SLOW, meddle=meddle, said=said)
    assert result.code == 0
    assert not result.of("failure")
    assert result.sha256 == undisturbed(STEPS).sha256


def test_a_terminal_that_is_closed_is_a_notice(tmp_path: Path) -> None:
    """And nobody reads what is printed any more."""
    reader, writer = os.pipe()
    process = fresh_agent(tmp_path, writer, **saved_at(tmp_path))
    os.close(writer)
    trains(tmp_path)
    os.close(reader)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)  # the kernel and the shell both send it
    assert process.wait(60) == 128 + signal.SIGHUP
    assert len(series.steps_in(tmp_path / "saved")) == 1


def fresh_agent(folder: Path, output: int, **environment: str) -> subprocess.Popen[bytes]:
    """In an interpreter of its own, as a shell starts it."""
    settings = {"OMP_NUM_THREADS": "1", "RESULTS": str(folder / "results.jsonl"), **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "run", "-n", "1", str(TRAIN)],
        cwd=folder,
        env={**os.environ, **settings},
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )


def test_a_notice_to_every_process_while_they_start(tmp_path: Path) -> None:
    """Zygote and coordinator are still importing: a fresh interpreter would die of it."""
    with (tmp_path / "out").open("w") as out:
        process = fresh_agent(tmp_path, out.fileno())
    events = tmp_path / "holdfast-logs" / "events.jsonl"
    wait_until("it runs", events.exists)
    wait_until("its children start", lambda: len(tree_of(process.pid)) == 3)
    for pid in tree_of(process.pid):
        os.kill(pid, signal.SIGTERM)
    assert process.wait(60) == TERMINATED
    assert {e["event"] for e in read_events(events)} <= {
        "run",
        "coordinator",
        "zygote",
        "host",
        "host-gone",
        "started",
        "exit",
        "preempted",
        "left",
    }
