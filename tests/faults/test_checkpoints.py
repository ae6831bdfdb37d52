"""Runs that lose everything and go on from their last checkpoint, bit for bit."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.checkpoint import load, open_checkpoint, save, series
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.cluster.agent import Agent
from tests.faults.judge import covered, kill_at_once, scenarios
from tests.harness import TRAIN, Result, count_events, launch, until

STEPS = 14


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"CHECKPOINT": str(folder / "saved"), "EVERY": "3", "STEPS": str(STEPS), **more}


def run(folder: Path, name: str, **settings) -> Result:
    (folder / name).mkdir()
    extra = settings.pop("more", {})
    return launch(folder / name, environment=environment(folder, **extra), **settings)


def steps_of(result: Result) -> list[int]:
    return sorted({event["step"] for event in result.of("commit")})


def test_every_so_many_steps_and_at_the_end_and_only_the_newest_are_kept(tmp_path: Path, undisturbed) -> None:
    result = run(tmp_path, "a")
    assert result.sha256 == undisturbed(STEPS).sha256, "saving must not change the weights"
    assert series.steps_in(tmp_path / "saved") == [9, 12, 14]
    assert sorted(e["step"] for e in result.of("checkpoint")) == [3, 6, 9, 12, 14]


@pytest.mark.thorough("pipelines write their shares once")
def test_each_worker_writes_its_share_once(tmp_path: Path) -> None:
    run(tmp_path, "a", workers=3)
    catalogue = open_checkpoint(tmp_path / "saved")
    sizes = [file.bytes for file in catalogue.files.values()]
    assert len(sizes) == 3
    assert max(sizes) < 2 * min(sizes)
    written = sum(piece.box.numel for entry in catalogue.tensors.values() for piece in entry.pieces)
    assert written == sum(read_tensor(catalogue, name).numel() for name in catalogue.tensors)


@pytest.mark.parametrize(
    ("before", "after"),
    [(3, 1), *(covered("three and one are other numbers, too", *pair) for pair in ((1, 3), (2, 4), (4, 2)))],
)
def test_a_finished_run_goes_on_with_other_workers(tmp_path: Path, undisturbed, before: int, after: int) -> None:
    run(tmp_path, "a", workers=before, more={"STEPS": "7"})
    result = run(tmp_path, "b", workers=after)
    assert steps_of(result) == list(range(7, STEPS)), "what is done is not done again"
    assert result.sha256 == undisturbed(STEPS).sha256


def test_a_finished_run_started_again_does_nothing(tmp_path: Path, undisturbed) -> None:
    run(tmp_path, "a")
    again = run(tmp_path, "b")
    assert steps_of(again) == []
    assert again.sha256 == undisturbed(STEPS).sha256


PHASES = ["data", "backward", "vote", "voted", "update"]


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        ("vote", 8),
        ("write", 6),
        *(covered("all are killed in a vote", phase, 8) for phase in PHASES if phase != "vote"),
        *(covered("all are killed while they save", phase, 6) for phase in ("snapshot", "vote")),
    ],
)
def test_all_workers_killed_at_once(tmp_path: Path, undisturbed, phase: str, step: int) -> None:
    faults = kill_at_once(["0.0", "0.1"], step=step, phase=phase)
    result = run(tmp_path, "a", workers=2, faults=faults)
    assert result.code == 0
    assert result.sha256 == undisturbed(STEPS).sha256
    assert len(result.of("resumed")) == 1


@pytest.mark.parametrize(
    ("worker", "phase"),
    [
        ("0.1", "snapshot"),
        ("0.0", "write"),
        ("0.0", "commit"),
        covered("the other one is killed there", "0.0", "snapshot"),
        covered("the other one is killed there", "0.1", "write"),
    ],
)
def test_one_worker_killed_while_saving_costs_at_most_that_checkpoint(
    tmp_path: Path, undisturbed, worker: str, phase: str
) -> None:
    result = run(tmp_path, "a", faults=f"kill worker={worker} step=6 phase={phase}", more={"DURABLE": "3"})
    assert result.code == 0
    assert result.sha256 == undisturbed(STEPS).sha256
    assert not result.of("resumed"), "the survivors have the state"
    saved = [e["step"] for e in result.of("checkpoint")]
    assert set(saved) >= {3, 9, 12, 14}
    assert series.steps_in(tmp_path / "saved") == sorted(set(saved))[-3:]


def test_everything_killed_from_outside_and_started_again(tmp_path: Path, undisturbed) -> None:
    """Agent, coordinator, zygote's children: all of it, as a power cut would."""
    slow = {"STEPS": "40", "WANTED": "99"}

    async def cut(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "checkpoint", step=12))
        for worker in agent.workers.values():
            os.kill(worker.pid, signal.SIGKILL)
        assert agent.coordinator is not None
        os.kill(agent.coordinator.pid, signal.SIGKILL)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(tmp_path, "a", more=slow, meddle=cut)
    result = run(tmp_path, "b", workers=2, more={"STEPS": "40"})
    assert min(steps_of(result)) >= 12
    assert result.sha256 == undisturbed(40).sha256


def test_all_asked_to_leave_save_first(tmp_path: Path, undisturbed) -> None:
    async def preempt(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "commit", step=4))
        os.kill(os.getpid(), signal.SIGTERM)

    first = run(tmp_path, "a", more={"STEPS": "60", "WANTED": "99", "EVERY": "1000"}, meddle=preempt)
    last = max(steps_of(first)) + 1
    assert series.steps_in(tmp_path / "saved") == [last], "the last committed step is saved"
    result = run(tmp_path, "b", more={"STEPS": "60"})
    assert steps_of(result) == list(range(last, 60))
    assert result.sha256 == undisturbed(60).sha256


def test_control_one_number_of_an_optimizer_slot_changes_the_outcome(tmp_path: Path, undisturbed) -> None:
    run(tmp_path, "a", more={"STEPS": "7"})
    folder = tmp_path / "saved" / "step-00000007"
    everything = load(folder, dict.fromkeys(open_checkpoint(folder).tree))
    everything["optimizer"]["state"]["0.weight"]["exp_avg"].view(torch.int32)[0, 0] ^= 1 << 22
    save(folder, everything)
    assert run(tmp_path, "b").sha256 != undisturbed(STEPS).sha256


def damage(folder: Path) -> None:
    data = next(folder.glob("data-*"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path: Path, undisturbed) -> None:
    run(tmp_path, "a", more={"STEPS": "7"})
    damage(tmp_path / "saved" / "step-00000007")
    result = run(tmp_path, "b")
    assert min(steps_of(result)) == 6
    assert result.sha256 == undisturbed(STEPS).sha256
    assert "step-00000007" in logs(tmp_path / "b"), "which one is damaged"


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").rglob("*.log"))


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_afresh(tmp_path: Path) -> None:
    run(tmp_path, "a", more={"STEPS": "7"})
    for folder in (tmp_path / "saved").glob("step-*"):
        (folder / "index.json").write_text("{}")
    result = run(tmp_path, "b")
    assert result.code == 4
    assert not result.of("commit")


def test_another_model_is_refused_by_the_name_of_what_does_not_fit(tmp_path: Path, capfd) -> None:
    run(tmp_path, "a", more={"STEPS": "4"})
    result = run(tmp_path, "b", more={"WIDTH": "24"})
    assert result.code == 4
    assert "model/0.weight" in capfd.readouterr().err, "what does not fit"


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(tmp_path: Path, undisturbed) -> None:
    async def block(agent: Agent) -> None:
        path = agent.settings.log_dir / "events.jsonl"
        await until(lambda: path.exists() and count_events(agent, "commit", step=4))
        (tmp_path / "saved").rename(tmp_path / "gone")  # not removed file by file, while others are made in it
        (tmp_path / "saved").write_text("a file where a folder was")

    result = run(tmp_path, "a", more={"STEPS": "30", "WANTED": "99"}, meddle=block)
    assert result.code == 4, "the last one neither"
    assert result.sha256 == undisturbed(30).sha256
    assert result.of("checkpoint-failed")


@pytest.mark.thorough("joins and two loops are in other tests")
def test_a_joiner_does_not_save_for_a_loop_that_is_over(tmp_path: Path) -> None:
    more = {"FIRST_LOOP": "5", "STEPS": "20", "EVERY": "1000", "WANTED": "2", "PATIENT": "6"}
    result = run(tmp_path, "a", workers=2, faults="kill worker=0.1 step=6 phase=backward", more=more)
    assert result.code == 0, result.said
    assert [e["step"] for e in result.of("checkpoint")] == [5, 20]


def test_a_loop_that_is_left_is_saved_at_the_end(tmp_path: Path) -> None:
    result = run(tmp_path, "a", more={"BREAK": "4", "EVERY": "1000"})
    assert result.code == 0
    assert series.steps_in(tmp_path / "saved") == [5]


@pytest.mark.thorough("all are killed, and no restarts are left, in other tests")
def test_with_no_restarts_left_the_others_go_on_from_the_checkpoint(tmp_path: Path, undisturbed) -> None:
    faults = kill_at_once(["0.0", "0.1"], step=8)
    result = run(tmp_path, "a", workers=2, faults=faults, max_restarts=1)
    assert result.sha256 == undisturbed(STEPS).sha256
    assert len(result.results) == 1


@pytest.mark.thorough("a commit in the middle loses its worker, too")
def test_whoever_should_commit_the_last_one_is_killed_and_it_is_taken_again(tmp_path: Path, undisturbed) -> None:
    result = run(tmp_path, "a", faults=f"kill worker=0.0 step={STEPS} phase=commit")
    assert result.sha256 == undisturbed(STEPS).sha256
    assert series.steps_in(tmp_path / "saved")[-1] == STEPS


@pytest.mark.thorough("tests/checkpoint has what is kept")
def test_what_could_not_be_resumed_from_is_not_what_is_kept(tmp_path: Path) -> None:
    run(tmp_path, "a", more={"STEPS": "7", "KEEP": "2"})
    damage(tmp_path / "saved" / "step-00000007")
    run(tmp_path, "b", more={"STEPS": "8", "KEEP": "1", "EVERY": "1"})
    third = run(tmp_path, "c", more={"STEPS": "9", "KEEP": "1", "EVERY": "1"})
    assert steps_of(third) == [8]


@pytest.mark.thorough("a foreign checkpoint in the folder is refused")
def test_the_model_may_lie_in_the_same_folder(tmp_path: Path, undisturbed) -> None:
    run(tmp_path, "a", more={"STEPS": "7"})
    save_file({"w": torch.zeros(1)}, tmp_path / "saved" / "model.safetensors")
    assert run(tmp_path, "b").sha256 == undisturbed(STEPS).sha256


def test_a_folder_that_is_a_foreign_checkpoint_is_refused(tmp_path: Path, capfd) -> None:
    (tmp_path / "saved").mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "saved" / "model.safetensors")
    assert run(tmp_path, "a").code == 4
    assert str(tmp_path / "saved") in capfd.readouterr().err


@pytest.mark.thorough("another model is refused")
def test_another_optimizer_is_refused(tmp_path: Path, capfd) -> None:
    run(tmp_path, "a", more={"STEPS": "4"})
    assert run(tmp_path, "b", more={"OPTIMIZER": "SGD"}).code == 4
    said = capfd.readouterr().err
    assert "AdamW" in said
    assert "SGD" in said


def test_without_an_agent_the_last_checkpoint_is_completed_before_the_script_ends(tmp_path: Path) -> None:
    """With files of several blocks, whose writing needs threads that an interpreter at its end does not start."""
    settings = {**os.environ, **environment(tmp_path, STEPS="2", WIDTH="1500", EVERY="1000")}
    settings |= {
        "RESULTS": str(tmp_path / "results"),
        "LOGGING": "INFO",
    }
    for steps in ("2", "3"):
        done = subprocess.run(
            [sys.executable, str(TRAIN)], env={**settings, "STEPS": steps}, cwd=TRAIN.parents[2], check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        assert series.steps_in(tmp_path / "saved")[-1] == int(steps), done.stderr
    assert "resumed from" in done.stderr


def test_auto_saves_at_the_end_and_says_why_it_chose(tmp_path: Path, undisturbed) -> None:
    result = run(tmp_path, "a", more={"EVERY": "auto", "STEPS": "30"})
    saved = [e["step"] for e in result.of("checkpoint")]
    assert (saved[0], saved[-1]) == (10, 30)
    assert result.of("interval")[0]["reason"]
    assert result.sha256 == undisturbed(30).sha256


def test_random_kills_of_some_or_all_with_checkpoints(tmp_path: Path, undisturbed, request) -> None:
    """A seeded soak: `--soak N` scenarios in which groups of workers, often all, are killed in any phase."""
    phases = ["data", "backward", "reduce", "vote", "voted", "update", "snapshot", "write", "commit", "copy"]
    for seed in scenarios(request.config):
        rng = random.Random(seed)
        workers = rng.choice([1, 2, 3])
        doomed = [f"0.{n}" for n in range(rng.randint(1, 3 * workers))]  # replacements are numbered on
        faults = "; ".join(f"kill worker={w} step={rng.randint(1, 17)} phase={rng.choice(phases)}" for w in doomed)
        (tmp_path / str(seed)).mkdir()
        result = run(tmp_path / str(seed), "a", workers=workers, faults=faults, more={"EVERY": "2", "STEPS": "18"})
        assert result.code == 0, f"seed {seed}: {faults}: {result.said}"
        assert result.sha256 == undisturbed(18).sha256, f"seed {seed}: {faults}"
