"""Saving from scripts as they are: their ends, their threads, their optimizers, and what they share."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import async_save, load, save, series
from holdfast.errors import CheckpointError, UsageError
from tests.checkpoint.rules.test_hand_cut import together

SLOW = """
import torch
from holdfast.checkpoint import async_save
async_save({path!r}, {{"x": torch.zeros(20_000_000)}})
"""


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)


def test_a_script_that_ends_after_async_save_has_saved(tmp_path: Path) -> None:
    assert run_script(SLOW.format(path=str(tmp_path / "a"))).returncode == 0
    assert load(tmp_path / "a", {"x": None})["x"].shape == (20_000_000,)


def test_an_error_that_nobody_waits_for_is_shown_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert str(tmp_path / "file") in run_script(SLOW.format(path=str(tmp_path / "file"))).stderr


def test_an_interrupted_wait_does_not_mix_two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.checkpoint.background import Work

    first = async_save(tmp_path / "a", {"x": torch.full((5_000_000,), 1.0)})
    real, calls = Work.join, []

    def interrupted(self: Work, seconds: float | None = None) -> None:
        if not calls.append(1) and len(calls) == 1:
            raise KeyboardInterrupt
        real(self, seconds)

    monkeypatch.setattr(Work, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        async_save(tmp_path / "b", {"x": torch.full((5_000_000,), 2.0)})
    async_save(tmp_path / "b", {"x": torch.full((5_000_000,), 2.0)}).wait()
    first.wait()
    assert load(tmp_path / "a", {"x": None})["x"].unique().tolist() == [1.0]
    assert load(tmp_path / "b", {"x": None})["x"].unique().tolist() == [2.0]


def test_two_threads_do_not_mix_their_checkpoints(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for _ in range(5):
            async_save(tmp_path / str(number), {"x": torch.full((2_000_000,), float(number))}).wait()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert load(tmp_path / str(number), {"x": None})["x"].unique().tolist() == [float(number)]


def test_a_load_sees_the_save_that_is_under_way(tmp_path: Path) -> None:
    for step in range(5):
        async_save(tmp_path, {"step": step, "x": torch.zeros(2_000_000)})
        assert load(tmp_path, {"step": None})["step"] == step


def test_a_relative_path_is_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    pending = async_save("here", {"x": torch.zeros(2_000_000)})
    monkeypatch.chdir(tmp_path / "other")
    pending.wait()
    assert (tmp_path / "here" / "index.json").exists()


def test_a_conjugate_is_another_tensor(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j])
    save(tmp_path, {"z": z, "conj": z.conj(), "imag": z.conj().imag})
    into = load(tmp_path, {"z": None, "conj": None, "imag": None})
    assert (into["conj"].item(), into["imag"].item()) == (1 - 2j, -2.0)


class Scaled(torch.optim.SGD):
    scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict.pop("scale")
        super().load_state_dict(state_dict)


def test_an_optimizer_that_saves_itself_does(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer, other = Scaled(model.parameters(), lr=0.1), Scaled(model.parameters(), lr=9.0)
    optimizer.scale = 64.0
    save(tmp_path, {"model": model, "optimizer": optimizer})
    load(tmp_path, {"model": model, "optimizer": other})
    assert (other.scale, other.param_groups[0]["lr"]) == (64.0, 0.1)


def test_what_an_optimizer_keeps_beside_its_parameters_is_refused_by_name(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 3}
    with pytest.raises(UsageError, match="global"):
        save(tmp_path, {"optimizer": optimizer})


def test_an_optimizer_with_names_is_not_loaded_by_position(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path, {"model": model, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match="has names for its parameters"):
        load(tmp_path, {"optimizer": optimizer})


def test_ranks_that_open_different_checkpoints_are_told(tmp_path: Path) -> None:
    for name in "ab":
        save(tmp_path / name, {"x": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="which is another one"):
        together(lambda r: load(tmp_path / "ab"[r.rank], {"x": torch.ones(3)}, ranks=r))


@pytest.mark.parametrize("name", ["strict", "trainable_only"])
def test_ranks_that_load_with_different_settings_are_told(tmp_path: Path, name: str) -> None:
    """Each talks to the others only with the setting: some would wait for ever."""
    save(tmp_path, {"x": torch.zeros(3)})
    with pytest.raises(UsageError, match=f"{name} is True on rank 0, but False on rank 1"):
        together(lambda r: load(tmp_path, {"x": torch.ones(3)}, ranks=r, **{name: r.rank == 0}))  # type: ignore[arg-type]


def test_one_modules_ties_are_not_anothers(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self, *, tied: bool, head: bool = True) -> None:
            super().__init__()
            self.embed = nn.Linear(2, 2, bias=False)
            if head:
                self.head = nn.Linear(2, 2, bias=False)
            if tied:
                self.head.weight = self.embed.weight

    save(tmp_path, {"student": Pair(tied=False), "teacher": Pair(tied=True)})
    load(tmp_path, {"teacher": Pair(tied=False, head=False)})
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        load(tmp_path, {"student": Pair(tied=False, head=False)})


def test_a_folder_that_is_a_checkpoint_and_has_others_in_it_is_ambiguous(tmp_path: Path) -> None:
    save(tmp_path, {"step": 999})
    save(series.folder_of(tmp_path, 10), {"step": 10})
    with pytest.raises(CheckpointError, match="name one"):
        load(tmp_path, {"step": None})


def test_one_element_in_many_places_cannot_be_filled(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.arange(4.0)})
    with pytest.raises(UsageError, match="one element in many places"):
        load(tmp_path, {"x": torch.zeros(1).expand(4)})


def test_two_targets_in_one_place_must_get_the_same(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.zeros(2), "b": torch.ones(2)})
    shared = torch.empty(2)
    with pytest.raises(CheckpointError, match="differs from the tensor that it is tied to here"):
        load(tmp_path, {"a": shared, "b": shared})


class Colour(str, enum.Enum):  # noqa: UP042 - what scripts from before StrEnum have
    RED = "red"


def test_enums_are_what_they_stand_for(tmp_path: Path) -> None:
    save(tmp_path, {"colour": Colour.RED})
    assert load(tmp_path, {"colour": None})["colour"] == "red"


@pytest.mark.parametrize(
    ("tree", "message"),
    [([1], "a list is no dict"), ({1: 2}, "the key 1 is an int"), ({"a": {"__numpy__": 5}}, "has a key '__numpy__'")],
)
def test_keys_that_cannot_be_kept_are_refused(tmp_path: Path, tree: dict[Any, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        save(tmp_path, tree)


@pytest.mark.parametrize("name", ["trainable_only", "strict", "cast"])
def test_a_text_is_not_taken_for_true(tmp_path: Path, name: str) -> None:
    call: Any = save if name == "trainable_only" else load
    save(tmp_path, {"x": 1})
    with pytest.raises(UsageError, match=f"{name}='no' is neither True nor False"):
        call(tmp_path, {"x": 2}, **{name: "no"})
    with pytest.raises(UsageError, match=f"{name}=1 is neither True nor False"):
        load(tmp_path, {"x": 2}, **{name: 1})
    assert load(tmp_path, {"x": 0})["x"] == 1


def test_a_dict_is_not_filled_from_a_list(tmp_path: Path) -> None:
    save(tmp_path, {"x": [torch.ones(1)]})
    with pytest.raises(CheckpointError, match="is not a dict in the checkpoint"):
        load(tmp_path, {"x": {"a": torch.zeros(1)}})


def test_copies_are_compared_whole_unless_they_are_parameters(tmp_path: Path) -> None:
    trees = [{"mask": torch.zeros(1_000_000)} for _ in range(2)]
    trees[1]["mask"][123_457] = 1.0
    with pytest.raises((UsageError, CheckpointError), match="mask"):
        together(lambda r: save(tmp_path, trees[r.rank], ranks=r))
    assert not os.path.exists(tmp_path / "index.json")
