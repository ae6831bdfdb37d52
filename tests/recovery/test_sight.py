"""Whether workers see the same folder: the decision, and looks at real folders."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.lease import Claim
from holdfast.checkpoint.series import folder_of
from holdfast.cluster.texts import Texts
from holdfast.errors import CheckpointError
from holdfast.recovery import sight
from holdfast.recovery.fence import Fence
from holdfast.recovery.sight import CACHE_SECONDS, SOON_SECONDS, Unsighted, View, compare
from tests.recovery.test_resume import resumer
from tests.run.parts import CPU, PARTS, on_workers, save_parts, whole


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference is taken for one a little sooner than in a run."""
    monkeypatch.setattr(sight, "SOON_SECONDS", 0.3)


def view(worker: str, *steps: int, **more: Any) -> View:
    return View(worker=worker, machine=f"node{worker[0]}", folder="/runs", steps=steps, **more)


def test_all_see_the_same() -> None:
    assert compare([view("0.0", 3, 6), view("1.0", 3, 6)], waited=0.0).steps == (3, 6)
    assert compare([view("0.0", marked=True), view("1.0", marked=True)], waited=0.0).steps == ()


@pytest.mark.parametrize(
    "odd",
    [
        [view("0.0", 3, 6), view("1.0")],
        [view("0.0"), view("1.0", 3, 6)],
        [view("0.0", 3, marked=True), view("1.0", 3, marked=False)],
        [view("0.0", marked=True), view("1.0", marked=False)],
        [view("0.0", 3), view("1.0", error="no right to read /runs")],
    ],
)
def test_some_see_another_folder(odd: list[View]) -> None:
    assert compare(odd, waited=0.0).again
    assert compare(odd, waited=SOON_SECONDS - 0.1).again
    refusal = compare(odd, waited=SOON_SECONDS).refusal
    assert "0.0 on node0" in refusal
    assert "1.0 on node1" in refusal


def test_who_could_not_change_the_folder_waits_for_its_cache() -> None:
    old = view("1.0", fresh=False)
    assert compare([view("0.0", 3), old], waited=SOON_SECONDS).again
    assert compare([view("0.0", 3), old], waited=CACHE_SECONDS).refusal


def test_an_older_view_of_the_same_folder_is_no_reason_to_refuse() -> None:
    late = [view("0.0", 3, 6, marked=True), view("1.0", 3, marked=True)]
    assert compare(late, waited=0.0).again
    assert compare(late, waited=SOON_SECONDS) == sight.Verdict(steps=(3, 6)), "all must be able to read it, or take 3"


def test_workers_of_a_machine_that_see_the_same_are_named_together() -> None:
    said = compare([view("0.0", 3), view("0.1", 3), view("1.0"), view("1.1")], waited=99.0).refusal
    assert "0.0, 0.1 on node0 sees 1 checkpoint, the newest of step 3," in said
    assert "1.0, 1.1 on node1 sees none" in said


def test_the_lease_of_the_run_is_seen_where_the_folder_is(tmp_path: Path) -> None:
    assert Fence(tmp_path).begin(Claim(run="a"))
    files = sorted(tmp_path.rglob("*"))
    assert sight.look(tmp_path, "a", "0.0").marked
    assert sight.look(tmp_path, "b", "0.0").marked is False
    assert sight.look(tmp_path / "elsewhere", "a", "0.0").marked is False
    assert sorted(tmp_path.rglob("*")) == files, "a look leaves nothing"


def resume_in(folders: list[Path]) -> list[bool]:
    states, run = [whole() for _ in folders], Claim().run

    def work(group: Any) -> bool:
        claim = Claim(run=run, worker=f"{group.rank}.0")
        return resumer(folders[group.rank], states[group.rank]).resume(Texts(group, CPU), claim=claim)

    return on_workers(len(folders), work)


def test_a_run_does_not_start_where_some_see_checkpoints_and_others_none(tmp_path: Path, soon: None) -> None:
    save_parts(tmp_path / "a", PARTS[0])
    with pytest.raises(CheckpointError, match=r"1\.0 on \S+ sees none in \S+/b, and not the lease"):
        resume_in([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(CheckpointError, match=r"1\.0 on \S+ sees 1 checkpoint"):
        resume_in([tmp_path / "b", tmp_path / "a"])


def test_a_run_does_not_start_in_two_empty_folders(tmp_path: Path, soon: None) -> None:
    """Without a mark both would train, and never complete a checkpoint."""
    with pytest.raises(CheckpointError, match="do not see the same"):
        resume_in([tmp_path / "a", tmp_path / "b"])
    assert resume_in([tmp_path / "c", tmp_path / "c"]) == [False, False], "the control"


def test_a_folder_that_is_seen_a_little_later_is_waited_for(tmp_path: Path) -> None:
    """As on a machine whose view of a network's folder is old: by a link that comes while the others wait."""
    save_parts(tmp_path / "a", PARTS[0])
    waits = threading.Event()

    def mount() -> None:
        waits.wait()
        (tmp_path / "b").symlink_to(tmp_path / "a")

    def look(root: Path, *words: str) -> View:
        found = real(root, *words)
        if found.folder.endswith("b") and not found.steps:
            waits.set()
        return found

    real = sight.look
    mounting = threading.Thread(target=mount)
    mounting.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sight, "look", look)
        assert resume_in([tmp_path / "a", tmp_path / "b"]) == [True, True]
    mounting.join()


def welcome(folders: list[Path]) -> list[None]:
    """The first two train, the last one joins."""
    states = [whole() for _ in folders]
    assert Fence(folders[0]).begin(Claim(run="a"))

    def work(group: Any) -> None:
        mine = resumer(folders[group.rank], states[group.rank])
        mine._mark = "" if group.rank == 2 else "a"
        mine.welcome(group, worker=f"{group.rank}.0", teller=1, listeners=[2])
        group.vote(torch.zeros(1))

    return on_workers(3, work)


def test_a_joiner_that_does_not_see_the_folder_is_refused(tmp_path: Path, soon: None) -> None:
    here, other = folder_of(tmp_path / "here", 3), tmp_path / "other"
    here.mkdir(parents=True)
    other.mkdir()
    with pytest.raises(Unsighted, match=r"worker 2\.0 on \S+ cannot join, as it could not save: it sees none in"):
        welcome([here, here, other])
    assert Unsighted("").refused
    assert len(welcome([here, here, here])) == 3, "the control"
