"""Pipelines that lose more than they can: back to the checkpoint, or an end in words; other layouts go on from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import load, open_checkpoint, save, series
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.cluster.agent import Agent
from tests.faults.judge import STEPS, assert_same, covered, kill, kill_at_once, sweep, train
from tests.faults.test_checkpoints import damage, logs, steps_of
from tests.faults.test_pipeline_changes import training
from tests.harness import Result

SIX = {"workers": 6, "stages": "3,4,3"}  # 0.1 and 0.4 have layers 3 to 6
TIGHT = {"stages": "auto", "MEMORY": "260kB"}  # two workers, at least, can hold the model
LONG = 18
SLOW = {"WANTED": "99", "PAUSE": "0.1"}  # time to be asked to leave


def saved(folder: Path, every: int = 3) -> dict[str, str]:
    return {"CHECKPOINT": str(folder / "saved"), "EVERY": str(every)}


def go(folder: Path, name: str, every: int = 3, **settings: Any) -> Result:
    return train(folder / name, **{**saved(folder, every), **settings})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    phases = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]
    complete = [(phase, restarts) for phase in phases for restarts in (0, 100)]
    sweep(metafunc, "back", complete, [("forward", 100)])
    saving = [(f"0.{number}", phase) for number in range(6) for phase in ("snapshot", "write", "vote")]
    sweep(metafunc, "saver", [*saving, ("0.0", "commit")], [("0.4", "write")])


# --- all copies of a layer are lost --------------------------------------------------------------------


def lose(first: str, second: str, *, step: int = 4, phase: str = "backward") -> str:
    """Both at once: the second dies before anybody could get its layers."""
    return f"{kill([first], step=step, phase=phase)}; {kill([second], step=step, phase='regroup')}"


def test_everybody_goes_back_to_the_checkpoint(tmp_path: Path, whole, back: tuple[str, int]) -> None:
    phase, restarts = back
    result = go(tmp_path, "a", faults=lose("0.1", "0.4", phase=phase), max_restarts=restarts, **SIX)
    assert_same(result, whole(STEPS))
    assert len(result.of("resumed")) == 1
    assert result.of("resumed")[0]["step"] == 3
    assert len(result.results) == (6 if restarts else 4)


def test_all_workers_killed_at_once(tmp_path: Path, whole) -> None:
    result = go(tmp_path, "a", faults=kill_at_once([f"0.{n}" for n in range(6)], phase="vote"), **SIX)
    assert_same(result, whole(STEPS))
    assert len(result.of("resumed")) == 1


@pytest.mark.parametrize("restarts", [0, covered("the same without restarts", 100)])
def test_without_a_checkpoint_it_is_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], restarts: int) -> None:
    result = train(tmp_path, faults=lose("0.1", "0.4"), max_restarts=restarts, **SIX)
    assert result.code == 3
    assert capsys.readouterr().err.startswith("holdfast: "), "a sentence, and no traceback"
    assert not result.results


def test_a_fault_while_they_resume(tmp_path: Path, whole) -> None:
    """Replacements are 0.6 and up: one dies with its layers read, before anybody could train with it."""
    result = go(tmp_path, "a", faults=lose("0.1", "0.4"), MEDDLE="filling 0.7", **SIX)
    assert_same(result, whole(STEPS))
    assert "0.7" in {e["worker"] for e in result.of("failure")}


@pytest.mark.thorough("all copies are lost once in another test")
def test_all_copies_lost_again_and_again(tmp_path: Path, whole) -> None:
    pairs = [("0.1", "0.4", 4), ("0.7", "0.10", 5), ("0.13", "0.16", 7)]  # each time six new ones take their places
    faults = "; ".join(lose(first, second, step=step) for first, second, step in pairs)
    result = go(tmp_path, "a", faults=faults, **SIX)
    assert_same(result, whole(STEPS))
    assert len(result.of("resumed")) == 3


# --- the begin -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost",
    [
        ["0.0", "0.4"],
        *(covered("who has all values is lost", lost) for lost in (["0.0"], ["0.4"], ["0.1", "0.2", "0.3"])),
    ],
    ids="-".join,
)
def test_a_fault_while_the_first_values_are_copied(tmp_path: Path, whole, lost: list[str]) -> None:
    result = train(tmp_path, faults=kill(lost, step=0, phase="copy"), **SIX)
    assert_same(result, whole(STEPS))
    assert {e["worker"] for e in result.of("failure")} & set(lost)


# --- too few -------------------------------------------------------------------------------------------


def test_below_the_minimum_by_leaving_they_save_and_say_so(
    tmp_path: Path, whole, capsys: pytest.CaptureFixture[str]
) -> None:
    async def leave(agent: Agent) -> None:
        await training(agent, 4)
        for worker in ("0.0", "0.2"):
            agent.workers[worker].tell({"type": "leave"})

    first = go(tmp_path, "a", every=1000, workers=3, tolerate=0, meddle=leave, steps=LONG, **SLOW, **TIGHT)
    assert first.code == 3
    assert capsys.readouterr().err.startswith("holdfast: "), "a sentence, and no traceback"
    last = max(steps_of(first)) + 1
    assert series.steps_in(tmp_path / "saved") == [last], "the last committed step is saved"
    second = go(tmp_path, "b", every=1000, workers=4, tolerate=1, steps=LONG, **TIGHT)
    assert steps_of(second) == list(range(last, LONG))
    assert second.sha256 == whole(LONG).sha256


@pytest.mark.thorough("below the minimum by leaving")
def test_below_the_minimum_by_losses(tmp_path: Path, whole, capsys: pytest.CaptureFixture[str]) -> None:
    """Who is left cannot hold the model, and nobody comes: what was saved is for a later start with more workers."""
    first = go(tmp_path, "a", workers=3, tolerate=0, faults=lose("0.1", "0.2"), max_restarts=0, **TIGHT)
    assert first.code == 3
    assert "at least 2" in capsys.readouterr().err
    second = go(tmp_path, "b", workers=2, tolerate=0, **TIGHT)
    assert steps_of(second) == list(range(3, STEPS))
    assert second.sha256 == whole(STEPS).sha256


def test_too_few_from_the_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(tmp_path, workers=1, tolerate=0, **TIGHT)
    assert result.code == 3
    assert "at least 2" in capsys.readouterr().err


@pytest.mark.thorough("below the minimum by leaving, they save as well")
def test_all_asked_to_leave_save_first(tmp_path: Path, whole) -> None:
    async def preempt(agent: Agent) -> None:
        await training(agent, 4)
        os.kill(os.getpid(), signal.SIGTERM)

    first = go(tmp_path, "a", every=1000, meddle=preempt, steps=LONG, **SLOW, **SIX)
    assert first.code == 128 + signal.SIGTERM
    last = max(steps_of(first)) + 1
    assert series.steps_in(tmp_path / "saved") == [last]
    second = go(tmp_path, "b", workers=3, stages="2", steps=LONG)
    assert steps_of(second) == list(range(last, LONG))
    assert second.sha256 == whole(LONG).sha256


# --- other layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        covered("three to seven workers", (6, "3,4,3", {}), (1, "1", {})),
        covered("three to seven workers", (1, "1", {}), (4, "1,5,2,2", {})),
        covered("three to seven workers", (5, "auto", {"MEMORY": "260kB"}), (3, "2", {})),
        ((3, "3", {}), (7, "auto", {"MEMORY": "200kB"})),
        covered("three to seven workers", (2, "9,1", {}), (2, "1,9", {})),
    ],
    ids=["six-one", "one-four", "five-three", "three-seven", "other cut"],
)
def test_saved_under_one_layout_and_resumed_under_another(tmp_path: Path, whole, before: Any, after: Any) -> None:
    for name, steps, (workers, stages, more) in (("a", 5, before), ("b", STEPS, after)):
        result = go(tmp_path, name, workers=workers, stages=stages, steps=steps, **more)
    assert steps_of(result) == list(range(5, STEPS)), "what is done is not done again"
    assert result.sha256 == whole(STEPS).sha256
    assert result.losses == whole(STEPS).losses[5:]


def test_each_tensor_is_written_once_and_the_load_is_spread(tmp_path: Path) -> None:
    go(tmp_path, "a", **SIX)
    catalogue = open_checkpoint(tmp_path / "saved")
    sizes = [file.bytes for file in catalogue.files.values()]
    assert len(sizes) == 6
    assert max(sizes) < 0.5 * sum(sizes)
    written = sum(piece.box.numel for entry in catalogue.tensors.values() for piece in entry.pieces)
    assert written == sum(read_tensor(catalogue, name).numel() for name in catalogue.tensors)


def test_one_worker_killed_while_saving(tmp_path: Path, whole, saver: tuple[str, str]) -> None:
    worker, phase = saver
    result = go(tmp_path, "a", faults=kill([worker], step=6, phase=phase), max_restarts=0, **SIX)
    assert_same(result, whole(STEPS))
    assert not result.of("resumed"), "the survivors have the state"
    assert series.steps_in(tmp_path / "saved")[-1] == STEPS


@pytest.mark.thorough("test_checkpoints.py has a damaged one")
def test_damage_that_one_worker_alone_can_see_sends_all_to_the_one_before(tmp_path: Path, whole) -> None:
    go(tmp_path, "a", steps=7, **SIX)
    damage(tmp_path / "saved" / "step-00000007")
    result = go(tmp_path, "b", **SIX)
    assert min(steps_of(result)) == 6
    assert result.sha256 == whole(STEPS).sha256
    assert "step-00000007" in logs(tmp_path / "b")


@pytest.mark.thorough("test_checkpoints.py has this control")
def test_control_one_number_of_one_slot_changes_the_outcome(tmp_path: Path, whole) -> None:
    go(tmp_path, "a", steps=5, **SIX)
    folder = tmp_path / "saved" / "step-00000005"
    everything = load(folder, dict.fromkeys(open_checkpoint(folder).tree))
    everything["optimizer"]["state"]["4.mix.weight"]["exp_avg"].view(torch.int32)[0, 0] ^= 1 << 22
    save(folder, everything)
    assert go(tmp_path, "b", workers=2, stages="2").sha256 != whole(STEPS).sha256
