"""The fence of a run's folder with real processes: two runs, an old half that wakes up, a start right after a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

from holdfast.checkpoint import series
from holdfast.checkpoint.lease import Chain, Claim, Note, Process
from holdfast.cluster.agent import Agent
from tests.faults.test_checkpoints import environment, run, steps_of
from tests.harness import TRAIN, count_events, hurry, until, wait_until
from tests.warm import Command, Script

STEPS = 14


def start(folder: Path, name: str, **more: str) -> Command:
    (folder / name).mkdir()
    settings = environment(folder, RESULTS=str(folder / name / "results.jsonl"), **more)
    words = ("run", "-n", "2", "--log-dir", "logs", str(TRAIN))
    return Command(*words, folder=folder / name, **settings)


def holder(folder: Path) -> Note | None:
    return Chain(folder / "saved").newest()


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_one_goes_on(tmp_path: Path, undisturbed) -> None:
    slow = {"STEPS": "40", "WANTED": "99", "PAUSE": "0.1", "HURRY": str(tmp_path / "hurry"), "LEASE": "9"}
    first = start(tmp_path, "a", **slow)
    wait_until("it saves", lambda: series.steps_in(tmp_path / "saved") or first.poll() is not None)
    held = holder(tmp_path)
    assert held is not None
    second = start(tmp_path, "b", **slow)
    assert second.wait(60.0) == 4
    said = second.stderr
    assert f"worker 0.0 of run {held.claim.run} on " in said, "who has it"
    assert f"(process {held.process.pid}, since 20" in said, "since when"
    assert "wait for its end, end it, or give this run another folder" in said, "how to go on"
    assert not (tmp_path / "b" / "results.jsonl").exists()
    (tmp_path / "hurry").touch()
    assert first.wait(60.0) == 0, first.stderr
    results = (tmp_path / "a" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["sha256"] for line in results} == {undisturbed(40).sha256}
    assert series.steps_in(tmp_path / "saved") == [36, 39, 40]
    last = holder(tmp_path)
    assert last is not None
    assert last.released, "and gives it back at its end"


def test_everything_is_killed_and_started_again_at_once(tmp_path: Path, undisturbed) -> None:
    """The lease lasts 90 s, and nobody has given it back; but on this machine it is known who is dead."""
    first = start(tmp_path, "a", STEPS="40", WANTED="99")
    wait_until("it saves", lambda: len(series.steps_in(tmp_path / "saved")) > 1 or first.poll() is not None)
    held = holder(tmp_path)
    assert held is not None
    first.kill()
    wait_until("its worker has ended with it", held.process.is_dead)
    before = holder(tmp_path)
    assert before is not None
    assert not before.released
    result = run(tmp_path, "b", workers=2, more={"STEPS": "40"}, seconds=60.0)
    assert min(steps_of(result)) >= 6
    assert result.sha256 == undisturbed(40).sha256


def test_the_first_worker_sleeps_while_another_one_commits_in_its_place(tmp_path: Path, undisturbed) -> None:
    """SIGSTOP just before it commits. It wakes up when the others have trained on and saved, and commits nothing."""
    more = {"STEPS": "30", "WANTED": "99", "HURRY": str(tmp_path / "hurry")}

    async def wake(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "commit", step=4))
        # Its agent would kill it as soon as the coordinator gives it up: until then its agent does not know its number.
        worker = agent.workers["0.0"]
        pid, worker.pid = worker.pid, None
        assert pid is not None
        await until(lambda: count_events(agent, "checkpoint", step=12))
        worker.pid = pid
        os.kill(pid, signal.SIGCONT)
        await until(lambda: "0.0" not in agent.workers)
        (tmp_path / "hurry").touch()

    result = run(tmp_path, "a", workers=2, faults="stop worker=0.0 step=6 phase=commit", more=more, meddle=wake)
    assert result.code == 0, result.said
    assert result.sha256 == undisturbed(30).sha256
    committed = [e["step"] for e in result.of("checkpoint")]
    assert 6 not in committed, "the one that slept in its commit has not committed"
    assert 6 not in series.steps_in(tmp_path / "saved")
    assert 30 in committed


def take(folder: Path, agent: Agent, **claim: Any) -> None:
    """Make the next file of the lease, as somebody who has taken the folder over does."""
    chain = Chain(folder / "saved")
    for _ in range(20):
        found = chain.newest()
        assert found is not None
        theirs = dataclasses.replace(found.claim, worker="9.9", life="another", **claim)
        if chain.make(dataclasses.replace(found, number=found.number + 1, term=found.number + 1, claim=theirs)):
            return
    raise AssertionError("it was never the next")


def test_a_run_ends_when_another_one_has_taken_its_folder(tmp_path: Path, capfd) -> None:
    """It was asleep for longer than its lease, and finds that out by itself, between two checkpoints."""

    async def steal(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "checkpoint", step=3))
        take(tmp_path, agent, run="another")

    more = {"STEPS": "10000", "WANTED": "99", "LEASE": "0.9"}
    result = run(tmp_path, "a", workers=2, more=more, meddle=steal)
    assert result.code == 4
    said = capfd.readouterr().err
    assert "the folder of checkpoints belongs to another run: worker 9.9 of run another on " in said
    assert "has taken it over" in said


def test_an_old_half_ends_when_a_newer_generation_has_the_folder(tmp_path: Path, undisturbed) -> None:
    """It is cut off and trains on alone: it finds the newer one's lease, ends, and its agent starts a new worker."""

    async def supersede(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "checkpoint", step=3))
        take(tmp_path, agent, epoch=2)
        await until(lambda: "0.1" in agent.workers)
        hurry(agent)

    more = {"STEPS": "60", "WANTED": "99", "PAUSE": "0.1", "LEASE": "0.9"}
    result = run(tmp_path, "a", workers=1, more=more, meddle=supersede)
    assert result.code == 0, result.said
    assert [(e["worker"], e["code"]) for e in result.of("exit")] == [("0.0", 75), ("0.1", 0)]
    assert "0.0 is of generation 1, and worker 9.9 of run" in next(e["error"]["text"] for e in result.of("exit"))
    assert result.sha256 == undisturbed(60).sha256


def foreign(folder: Path, **more: float) -> None:
    """A lease that a machine has left whose power has failed."""
    process = Process(machine="node7", boot="another", space="pid:[1]", pid=1, start="1")
    note = Note(number=1, term=1, claim=Claim(run="elsewhere", epoch=3), process=process, since=1.0, **more)
    chain = Chain(folder / "saved")
    chain.prepare()
    assert chain.make(note)


def test_the_folder_of_another_machines_run_is_waited_for(tmp_path: Path, undisturbed, capfd) -> None:
    foreign(tmp_path, seconds=1.0)
    result = run(tmp_path, "a", workers=2)
    assert result.code == 0
    assert result.sha256 == undisturbed(STEPS).sha256
    said = "\n".join(result.said)
    assert "waiting for the folder" in said
    assert "worker 0.0 of run elsewhere on node7" in said


def test_one_process_without_an_agent_is_fenced_too(tmp_path: Path) -> None:
    settings = environment(tmp_path, STEPS="10000", EVERY="2", LEASE="2")
    settings |= {"RESULTS": str(tmp_path / "results"), "WANTED": "99", "PAUSE": "0.05"}
    first = Script(str(TRAIN), folder=tmp_path, name="first", **settings)
    try:
        wait_until("it saves", lambda: len(series.steps_in(tmp_path / "saved")) > 1 or first.poll() is not None)
        second = Script(str(TRAIN), folder=tmp_path, name="second", **settings)
        assert second.wait(80) == 4
        assert "belongs to another run: worker 0.0 of run" in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    reached = series.steps_in(tmp_path / "saved")[-1]
    settings |= {"STEPS": str(reached + 1), "LEASE": "90", "PAUSE": "0"}
    assert Script(str(TRAIN), folder=tmp_path, name="third", **settings).wait(80) == 0, "at once"
    assert series.steps_in(tmp_path / "saved")[-1] == reached + 1
