"""A crash at any moment, where checkpoints share the files of frozen weights: none ever refers to what is not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import async_save, frozen_saving, index, save, series
from holdfast.checkpoint.safetensors_writer import bytes_of
from holdfast.checkpoint.shared_files import FOLDER, is_shared
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.errors import CheckpointError
from tests.checkpoint.adapters import shared, tree_at
from tests.checkpoint.cases import blocks, settle
from tests.checkpoint.crash import Call, Disk, calls_of, states, sweep

SEEDS = {1: 0, 2: 0, 3: 0, 4: 7}  # of the base at each step: the fourth has another one
Work = Callable[[Path], None]
TREES = {step: tree_at(step, seed, width=32) for step, seed in SEEDS.items()}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(frozen_saving, "LEAST", 1)
    with blocks():
        yield


def save_step(root: Path, step: int) -> None:
    save(series.folder_of(root, step), TREES[step])
    settle()


def save_beside(root: Path, step: int) -> None:
    async_save(series.folder_of(root, step), TREES[step]).wait()
    settle()


def bytes_in(tree: dict[str, Any]) -> dict[str, bytes]:
    """The model's and the optimizer's tensors by their names in a checkpoint."""
    model, slots = tree["model"], tree["optimizer"].state
    found = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, p in model.named_parameters():
        found |= {f"optimizer/state/{name}/{slot}": value for slot, value in slots.get(p, {}).items()}
    return {name: bytes_of(tensor).tobytes() for name, tensor in found.items()}


RIGHT = {step: bytes_in(tree) for step, tree in TREES.items()}


def right(folder: Path, step: int) -> bool:
    """Whether a checkpoint holds exactly what was saved."""
    catalogue = index.open(folder)
    return {name: bytes_of(read_tensor(catalogue, name)).tobytes() for name in catalogue.tensors} == RIGHT[step]


def verdict(root: Path) -> str:
    """Which checkpoints are there; each must be whole."""
    for step in series.steps_in(root):
        try:
            good = right(series.folder_of(root, step), step)
        except CheckpointError as e:
            return f"broken: {e}"
        if not good:
            return f"step {step} is another one"
    return " ".join(map(str, series.steps_in(root)))


def and_then(root: Path) -> str:
    """The verdict; and that the next save succeeds, and that all which nobody needs is gone then."""
    found = verdict(root)
    save_step(root, 4)
    series.clean(root, before=4)
    series.clean_shared(root)
    expected = " ".join(dict.fromkeys([*found.split(), "4"]))
    assert verdict(root) == expected
    needed = {
        name.rpartition("/")[2] for s in series.steps_in(root) for name in index.files_of(series.folder_of(root, s))
    }
    assert {path.name for path in shared(root)} <= needed
    return found


# --- killed at every call ---------------------------------------------------------------------------------


def nothing(root: Path) -> None:
    """Before a first save."""


def two(root: Path) -> None:
    for step in (1, 2):
        save_step(root, step)


def first(root: Path) -> None:
    save_step(root, 1)


def advance(root: Path) -> None:
    """What a run does that keeps two: the next checkpoint, which refers; then the oldest goes, whose file stays."""
    save_step(root, 3)
    series.delete(root, 1)
    series.clean_shared(root)


def advance_to_another_base(root: Path) -> None:
    """It writes another base, and keeps this one alone: the old base goes too."""
    save_beside(root, 4)
    for step in (1, 2):
        series.delete(root, step)
    series.clean_shared(root)


CASES: dict[str, tuple[Work, Work, list[str]]] = {
    "the first": (nothing, first, ["", "1"]),
    "one that refers": (two, advance, ["1 2", "1 2 3", "2 3"]),
    "one with another base": (two, advance_to_another_base, ["1 2", "1 2 4", "2 4", "4"]),
}


FIRST = pytest.param("the first", marks=pytest.mark.thorough("another base is written in the same way"))


@pytest.mark.parametrize("case", [FIRST, *(case for case in CASES if case != "the first")])
def test_killed_at_every_call(tmp_path: Path, case: str) -> None:
    before, work, course = CASES[case]
    found = [*sweep(tmp_path, before, work, and_then)]
    assert len(found) > 20  # or the sweep has not seen the calls of a save
    assert [*dict.fromkeys(found)] == course, "each appears or goes at one moment, in this order"


def removing_first(root: Path) -> None:
    """How not to do it: away with the old base before its checkpoints."""
    save_step(root, 4)
    for path in shared(root):
        if path.name in {Path(name).name for name in index.files_of(series.folder_of(root, 1))}:
            os.unlink(path)
    for step in (1, 2):
        series.delete(root, step)


def in_the_older_folder(root: Path) -> None:
    """How not to do it: deleted with the checkpoint that wrote it, though later ones refer to it."""
    save_step(root, 3)
    for name in index.files_of(series.folder_of(root, 1)):
        if is_shared(name):
            os.unlink(root / FOLDER / Path(name).name)
    series.delete(root, 1)


@pytest.mark.parametrize(
    "work",
    [in_the_older_folder, pytest.param(removing_first, marks=pytest.mark.thorough("the same, for an older folder"))],
)
def test_the_sweep_finds_what_would_go_wrong(tmp_path: Path, work: Work) -> None:
    assert any(one.startswith("broken") for one in sweep(tmp_path, two, work, verdict))


# --- without power ------------------------------------------------------------------------------------------


def power_failures(
    tmp_path: Path, before: Work, work: Work, lose: Callable[[Call], bool] = lambda call: False
) -> tuple[set[str], set[str]]:
    """The verdicts of all that may be found; the calls that ``lose`` chooses do nothing."""
    root = tmp_path / "root"
    root.mkdir()
    before(root)
    disk = Disk(root)
    calls = [call for call in calls_of(root, lambda: work(root)) if not lose(call)]
    return states(root, tmp_path / "place", disk, calls, verdict)


def test_a_power_failure_while_the_base_is_written(tmp_path: Path) -> None:
    assert power_failures(tmp_path, nothing, first) == ({"", "1"}, {"1"})


def test_a_power_failure_while_an_old_base_goes(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        save_step(root, 4)
        series.delete(root, 1)
        series.clean_shared(root)

    assert power_failures(tmp_path, first, work) == ({"1", "1 4", "4"}, {"4"})


SYNCS: dict[str, Callable[[Call], bool]] = {
    "of the names in the shared folder": lambda call: call.text == f"fsync {FOLDER}",
    "of the shared file": lambda call: call.name == "fsync" and call.path.parent.name == FOLDER,
}


@pytest.mark.parametrize("what", SYNCS)
def test_every_sync_is_needed(tmp_path: Path, what: str) -> None:
    ever, _ = power_failures(tmp_path, nothing, first, SYNCS[what])
    assert any(one.startswith("broken") for one in ever)


def test_a_save_that_fails_removes_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two(tmp_path)
    before = shared(tmp_path)

    def refuse(*words: Any) -> None:
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(index, "write_durably", refuse)
        for step in (3, 4):
            with pytest.raises(CheckpointError, match="full"):
                save_step(tmp_path, step)
    assert shared(tmp_path) == before
    assert verdict(tmp_path) == "1 2"
