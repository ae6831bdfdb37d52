"""Disturbances from outside: coordinator, zygote, agent, strangers, preemption, random kills."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.agent import Agent
from holdfast.cluster.events import read_events
from tests.faults.judge import covered, kill_at_once, scenarios
from tests.faults.test_sweep import assert_nothing_lost
from tests.harness import count_events, doomed_zygote, hurry, launch, until
from tests.injected import note

SLOW = {"STEPS": "60", "WANTED": "99"}  # 20 ms a step: time to be disturbed
SLOWER = {**SLOW, "PATIENT": "4", "PAUSE": "0.5"}  # half a minute, unless there is a hurry: for a process to start


async def training(agent: Agent, step: int = 3) -> None:
    path = agent.settings.log_dir / "events.jsonl"
    await until(lambda: path.exists() and count_events(agent, "commit", step=step))


async def joined(agent: Agent, worker: str) -> None:
    await until(lambda: count_events(agent, "entered", worker=worker))


def committed(agent: Agent) -> list[dict[str, Any]]:
    return [e for e in read_events(agent.settings.log_dir / "events.jsonl") if e["event"] == "commit"]


def kill_coordinator(agent: Agent) -> None:
    assert agent.coordinator is not None
    os.kill(agent.coordinator.pid, signal.SIGKILL)


def test_training_goes_on_without_a_coordinator(tmp_path: Path, undisturbed) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent)
        kill_coordinator(agent)

    result = launch(tmp_path, environment=SLOW, meddle=meddle)
    assert_nothing_lost(result, undisturbed(60))
    assert result.of("coordinator-restart")
    assert len(result.of("generation")) == 1, "workers re-registered: nobody had to regroup"


@pytest.mark.parametrize("order", ["coordinator first", covered("the other way round", "worker first")])
def test_coordinator_and_worker_killed_together(tmp_path: Path, undisturbed, order: str) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent)
        if order == "coordinator first":
            kill_coordinator(agent)
        os.kill(agent.workers["0.1"].pid, signal.SIGKILL)
        if order == "worker first":
            kill_coordinator(agent)

    result = launch(tmp_path, environment=SLOW, meddle=meddle, heartbeat_timeout=1.5)
    assert_nothing_lost(result, undisturbed(60))
    assert {"0.0", "0.2"} <= {r["worker"] for r in result.results}


def test_a_hung_coordinator_stops_nobody(tmp_path: Path, undisturbed) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent)
        assert agent.coordinator is not None
        os.kill(agent.coordinator.pid, signal.SIGSTOP)
        await training(agent, 50)
        os.kill(agent.coordinator.pid, signal.SIGCONT)

    result = launch(tmp_path, environment=SLOW, meddle=meddle)
    assert_nothing_lost(result, undisturbed(60))
    assert len(result.of("generation")) == 1


def test_workers_outlive_the_zygote(tmp_path: Path, undisturbed) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent)
        os.kill(zygote_of(agent), signal.SIGKILL)
        await until(lambda: count_events(agent, "zygote-restart"))
        os.kill(agent.workers["0.1"].pid, signal.SIGKILL)
        await joined(agent, "0.3")
        hurry(agent)

    with doomed_zygote():
        result = launch(tmp_path, environment=SLOWER, meddle=meddle)
    assert result.code == 0
    assert result.of("zygote-restart")
    assert {"0.0", "0.2", "0.3"} <= {r["worker"] for r in result.results}, "the replacement came from a new one"
    assert result.sha256 == undisturbed(60).sha256


def zygote_of(agent: Agent) -> int:
    return int(Path(f"/proc/{agent.workers['0.0'].pid}/stat").read_text().split()[3])


def test_sigterm_is_a_preemption_notice(tmp_path: Path) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent)
        os.kill(os.getpid(), signal.SIGTERM)

    result = launch(tmp_path, environment=SLOW, meddle=meddle)
    assert result.code == 128 + signal.SIGTERM
    assert not result.of("failure"), "leaving is no failure"
    last = {e["worker"]: e["step"] for e in result.of("commit")}
    assert len(set(last.values())) == 1, f"all left at the same boundary: {last}"


def test_a_worker_that_leaves_is_not_missed(tmp_path: Path, undisturbed) -> None:
    """A notice to a single worker, as an agent of another machine would give it."""

    async def meddle(agent: Agent) -> None:
        await training(agent)
        agent.workers["0.0"].tell({"type": "leave"})

    result = launch(tmp_path, environment=SLOW, meddle=meddle)
    assert result.sha256 == undisturbed(60).sha256
    assert not result.of("failure")
    assert {r["worker"] for r in result.results} == {"0.1", "0.2"}


GARBAGE = [random.Random(0).randbytes(200), b"GET / HTTP/1.0\r\n\r\n", b'{"nonce": 1, "hello": {}}\n']


def test_strangers_disturb_nothing(tmp_path: Path, undisturbed) -> None:
    """A thousand connections, garbage, silence and wrong tokens, to every port that listens.

    (``test_strangers.py`` has more of them, at more moments. This one needs no network namespace.)
    """

    async def meddle(agent: Agent) -> None:
        await training(agent)
        ports = {agent.address[1], *(p for w in agent.workers.values() for p in listening_ports(w.pid))}
        assert len(ports) == 4, f"the coordinator and a port a worker: {ports}"
        rng = random.Random(0)
        held = []
        for number in range(1000):
            port = rng.choice(sorted(ports))
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", port))
            held.append(stranger)
            await asyncio.get_running_loop().sock_sendall(stranger, GARBAGE[number % 3])
            if number % 50 == 0:
                await asyncio.sleep(0)
        await training(agent, 45)
        for stranger in held:
            stranger.close()

    result = launch(tmp_path, environment=SLOW, meddle=meddle, faults="kill worker=0.1 step=30 phase=vote")
    assert_nothing_lost(result, undisturbed(60))
    assert [e["worker"] for e in result.of("failure")] == ["0.1"]


def listening_ports(pid: int | None) -> list[int]:
    """Ports on which a process listens, and an assertion that it does so on loopback alone."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    ports = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            assert fields[1].startswith("0100007F:"), f"listens on {fields[1]}"
            ports.append(int(fields[1].split(":")[1], 16))
    return ports


def test_too_few_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = kill_at_once(["0.0", "0.1"], phase="update")
    result = launch(tmp_path, workers=2, faults=faults, environment={"STEPS": "10"})
    assert result.code == 3
    assert capsys.readouterr().err.startswith("holdfast: "), "a sentence, and no traceback"


def test_no_restarts_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before there is a state to lose: the workers die as they start."""
    result = launch(tmp_path, workers=1, faults="kill worker=0.0 phase=regroup", max_restarts=0)
    assert result.code == 3
    assert capsys.readouterr().err.startswith("holdfast: ")


def test_missing_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = launch(tmp_path, workers=1, minimum_hosts=2, maximum_hosts=2, patience=0.5)
    assert result.code == 3
    assert "1 of at least 2 hosts" in capsys.readouterr().err


def test_random_kills(tmp_path: Path, undisturbed, request: pytest.FixtureRequest) -> None:
    """A seeded soak: `--soak N` scenarios of 3 to 6 kills at any moment, hangs among them."""
    for seed in scenarios(request.config):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()

        async def meddle(agent: Agent, rng: random.Random = rng) -> None:
            path = agent.settings.log_dir / "events.jsonl"
            await training(agent, 2)
            struck: set[str] = set()  # a stopped worker still looks alive for a while
            for _ in range(rng.randint(3, 6)):
                await asyncio.sleep(rng.uniform(0.0, 0.4))
                members = [e for e in read_events(path) if e["event"] == "generation"][-1]["workers"]
                alive = [w for w in agent.workers.values() if w.name in members]
                entered = {e["worker"] for e in read_events(path) if e["event"] == "entered"}
                holders = [w for w in alive if w.name in entered and w.name not in struck]
                if len(holders) > 1 and not agent.finishing:
                    victim = rng.choice(holders)
                    struck.add(victim.name)
                    how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                    note("hang" if how == signal.SIGSTOP else "kill")
                    os.kill(victim.pid, how)
            hurry(agent)

        result = launch(folder, workers=4, environment={**SLOW, "STEPS": "120"}, meddle=meddle, heartbeat_timeout=1.5)
        assert_nothing_lost(result, undisturbed(120))


def test_a_coordinator_killed_at_the_very_end(tmp_path: Path) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent, 19)
        kill_coordinator(agent)

    result = launch(tmp_path, environment={"STEPS": "20", "WANTED": "99"}, meddle=meddle)
    assert result.code == 0


def test_a_spare_does_not_pass_for_all_that_is_left(
    tmp_path: Path, undisturbed, request: pytest.FixtureRequest
) -> None:
    """The restarted coordinator meets the waiting spare before the worker that trains."""

    async def meddle(agent: Agent) -> None:
        await until(lambda: len(agent.workers) == 2)
        await training(agent, 13)  # about when the spare has come: which of the two is first is tried by repetition
        kill_coordinator(agent)

    for number in scenarios(request.config):
        folder = tmp_path / str(number)
        folder.mkdir()
        result = launch(folder, workers=1, spares=1, environment=SLOW, meddle=meddle)
        assert result.code == 0
        assert result.sha256 == undisturbed(60).sha256


@pytest.mark.thorough("test_sweep.py lets a spare in")
def test_a_spare_comes_in_without_a_replacement(tmp_path: Path, undisturbed) -> None:
    environment = {"STEPS": "60", "WANTED": "3", "PATIENT": "4"}
    faults = "kill worker=0.1 step=12 phase=forward"
    result = launch(tmp_path, spares=1, max_restarts=0, faults=faults, environment={**environment, "PATIENT": "0"})
    assert result.sha256 == undisturbed(60).sha256
    assert result.of("generation")[-1]["workers"] == ["0.0", "0.2", "0.3"]


def test_all_lost_after_a_coordinator_restart_is_not_a_new_begin(tmp_path: Path) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent)
        kill_coordinator(agent)
        await until(lambda: count_events(agent, "host") >= 2)
        await training(agent, 2 + max(e["step"] for e in committed(agent)))
        for worker in list(agent.workers.values()):
            os.kill(worker.pid, signal.SIGKILL)

    result = launch(tmp_path, workers=2, environment=SLOW, meddle=meddle)
    assert result.code == 3
    steps = [e["step"] for e in result.of("commit")]
    assert steps.count(0) == 2, "nobody began again from step 0"


@pytest.mark.parametrize("blow", [signal.SIGSTOP, covered("another test kills a zygote", signal.SIGKILL)])
def test_zygote_and_worker_lost_together(tmp_path: Path, undisturbed, blow: signal.Signals) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent)
        zygote = zygote_of(agent)
        os.kill(zygote, signal.SIGSTOP)
        os.kill(agent.workers["0.1"].pid, signal.SIGKILL)
        os.kill(zygote, blow)
        await joined(agent, "0.3")
        hurry(agent)

    with doomed_zygote():
        result = launch(tmp_path, environment=SLOWER, meddle=meddle)
    assert result.code == 0
    assert result.sha256 == undisturbed(60).sha256
    assert "0.3" in {r["worker"] for r in result.results}, "the lost one was replaced"


MANY = 14  # their orders are more than a socket's 208 kB


def test_many_workers_with_a_large_environment_all_start(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here', flush=True)\n")
    with doomed_zygote(importing=True):
        result = launch(tmp_path, script=script, workers=MANY, environment={"LARGE": "x" * 20_000})
    assert result.code == 0
    assert len(result.said) == MANY
