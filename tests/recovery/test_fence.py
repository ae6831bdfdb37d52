"""Holding a folder: runs, halves of runs and generations of one, with real files and threads."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import index, lease, load, save, series
from holdfast.checkpoint.lease import Chain, Claim, Note, Process, Superseded, Taken
from holdfast.checkpoint.ranks import Alone
from holdfast.checkpoint.saving import Save
from holdfast.errors import CheckpointError
from holdfast.recovery import fence as fence_module
from holdfast.recovery.fence import Fence
from tests.harness import wait_until
from tests.recovery.test_resume import resumer
from tests.run.parts import PARTS, save_parts, whole

SHORT = 0.4  # seconds, of leases that are waited for
FOREIGN = Process(machine="node7", boot="another", space="pid:[1]", pid=1, start="1")


def claim(run: str = "a", epoch: int = 1, worker: str = "0.0", life: str = "") -> Claim:
    return Claim(run=run, epoch=epoch, worker=worker, life=life)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    for fence in made.fences:
        fence.release()


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.fences: list[Fence] = []

    def fence(self, seconds: float = 90.0) -> Fence:
        self.fences.append(Fence(self.root, seconds))
        return self.fences[-1]

    @property
    def newest(self) -> Note:
        found = Chain(self.root).newest()
        assert found is not None
        return found

    def leave(self, **more: Any) -> Note:
        """A note of a run on another machine, as it would be found after that one's power has failed."""
        note = Note(number=1, term=1, claim=claim("elsewhere"), process=FOREIGN, since=1.0, **more)
        Chain(self.root).prepare()
        assert Chain(self.root).make(note)
        return note


def test_it_is_renewed_while_its_holder_lives_and_given_back_at_the_end(folder: Folder) -> None:
    fence = folder.fence(SHORT)
    assert fence.begin(claim())
    fence.enter(claim(), first=True)
    wait_until("it is renewed", lambda: folder.newest.number > 4)
    assert folder.newest.term == 1
    fence.release()
    assert folder.newest.released
    with pytest.raises(Taken, match=r"given the folder .* back"):
        fence.check()


def test_another_run_is_refused_while_the_first_one_lives(folder: Folder, caplog: Any) -> None:
    first, second = folder.fence(2.0), folder.fence(2.0)
    assert first.begin(claim("a"))
    first.enter(claim("a"), first=True)
    with pytest.raises(Taken, match=r"worker 0\.0 of run a on \S+ \(process \d+, since .*\) is at work there"):
        second.begin(claim("b"))
    assert "waiting for the folder" in caplog.text, "it says for whom it waits"
    assert first.check().claim.run == "a"


def test_one_that_was_given_back_is_taken_at_once(folder: Folder) -> None:
    first = folder.fence()
    assert first.begin(claim("a"))
    first.enter(claim("a"), first=True)
    first.release()
    assert folder.fence().begin(claim("b"))
    assert folder.newest.claim.run == "b"
    assert folder.newest.term in (3, 4), "the thread of the first may have renewed it once"


def test_one_of_another_machine_is_waited_for(folder: Folder, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    folder.leave(seconds=SHORT)
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        real = fence_module.time.sleep
        patch.setattr(fence_module.time, "sleep", lambda seconds: (slept.append(seconds), real(seconds)))
        assert folder.fence().begin(claim())
    assert sum(slept) >= 0.9 * SHORT
    assert "worker 0.0 of run elsewhere on node7 (process 1, since" in caplog.text
    assert "has not been heard of for" in caplog.text


def test_a_clock_that_was_set_back_or_forward_changes_nothing(folder: Folder) -> None:
    """The wall clock is in the lease for people only: neither a future nor a past one is believed."""
    Chain(folder.root).prepare()
    for number, since in enumerate((0.0, 9e9), start=1):
        note = Note(number=number, term=number, claim=claim("elsewhere"), process=FOREIGN, since=since, seconds=SHORT)
        assert Chain(folder.root).make(note)
        begin = fence_module.time.monotonic()
        waiting = folder.fence()
        assert waiting.begin(claim())
        assert fence_module.time.monotonic() - begin >= SHORT
        for path in (folder.root / lease.FOLDER).iterdir():
            if path.name != f"lease-{number:08d}.json":
                path.unlink()


def test_a_newer_generation_takes_it_from_an_older_one_at_once(folder: Folder) -> None:
    old, new = folder.fence(), folder.fence()
    assert old.begin(claim(epoch=1, worker="0.0"))
    old.enter(claim(epoch=1, worker="0.0"), first=True)
    new.enter(claim(epoch=2, worker="0.1"), first=True)
    assert new.check().claim.epoch == 2
    with pytest.raises(Superseded, match=r"worker 0\.0 is of generation 1, and worker 0\.1 .* generation 2"):
        old.check()
    with pytest.raises(Superseded):
        old.raise_if_lost()
    assert new.check().claim.worker == "0.1"


def test_the_thread_notices_that_it_was_taken(folder: Folder) -> None:
    """An old half that trains on alone, without a commit: it stops at its next boundary."""
    old, new = folder.fence(SHORT), folder.fence()
    assert old.begin(claim(epoch=1))
    old.enter(claim(epoch=1), first=True)
    new.enter(claim(epoch=2, worker="1.0"), first=True)

    def lost() -> bool:
        try:
            old.raise_if_lost()
        except Superseded:
            return True
        return False

    wait_until("it is noticed", lost)


def test_a_worker_that_enters_the_newer_generation_has_lost_nothing(folder: Folder) -> None:
    """A joiner with a lower name becomes the first, and may be ready sooner than the one that was."""
    before, joiner = folder.fence(), folder.fence()
    assert before.begin(claim(epoch=1, worker="1.0"))
    joiner.enter(claim(epoch=2, worker="0.5"), first=True)
    joiner.check()
    with pytest.raises(Superseded):
        before.check()
    before.enter(claim(epoch=2, worker="1.0"), first=False)
    assert before.check().claim.worker == "0.5", "it may commit the checkpoint that it has begun"
    joiner.enter(claim(epoch=3, worker="0.5"), first=True)
    joiner.check()
    with pytest.raises(Superseded):
        before.check()


def test_a_worker_that_has_left_as_it_was_asked_completes_its_checkpoint(folder: Folder) -> None:
    """The next first worker may hold the lease by then. A worker that was given up may not."""
    left, others = folder.fence(), folder.fence()
    assert left.begin(claim(epoch=1, worker="0.0"))
    save = saving(folder.root, 3, 1, left)
    others.enter(claim(epoch=2, worker="0.1"), first=True)
    others.check()
    with pytest.raises(Superseded):
        left.check()
    left.dismiss()
    carry_out(save, left)
    assert series.steps_in(folder.root) == [3]
    assert others.check().claim.worker == "0.1"


def test_a_folder_that_was_deleted_is_made_again_by_the_next_checkpoint_only(folder: Folder) -> None:
    fence = folder.fence(SHORT)
    assert fence.begin(claim())
    shutil.rmtree(folder.root / lease.FOLDER)
    with pytest.raises(CheckpointError, match="does not exist"), fence._lock:
        fence._renew()
    assert fence.check().claim == claim()


def test_two_generations_of_one_number_do_not_take_it_from_each_other_for_ever(folder: Folder) -> None:
    one, two = folder.fence(), folder.fence()
    assert one.begin(claim(epoch=3, life="x"))
    two.enter(claim(epoch=3, life="y", worker="1.0"), first=True)
    two.check()
    with pytest.raises(Superseded):
        one.check()
    assert two.check().claim.life == "y"


def test_a_run_that_was_taken_over_never_takes_it_back(folder: Folder) -> None:
    paused, next_run = folder.fence(), folder.fence()
    assert paused.begin(claim("a"))
    newest = folder.newest
    foreign = dataclasses.replace(newest, number=2, process=FOREIGN, seconds=0.0)
    assert Chain(folder.root).make(foreign)
    assert next_run.begin(claim("b"))
    next_run.release()
    paused.enter(claim("a", epoch=2), first=True)
    with pytest.raises(Taken, match=r"run b .* has taken it over"):
        paused.check()


def test_a_folder_that_cannot_be_written_any_more_was_not_taken_by_its_last_run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run's folder on a read-only file system: its old lease is there, and nobody has taken anything."""
    folder.leave(released=True)

    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Chain, "_write", refuse)
    fence = folder.fence(SHORT)
    assert not fence.begin(claim())
    fence.enter(claim(), first=True)
    threading.Event().wait(SHORT)  # time for the thread that renews leases
    fence.raise_if_lost()
    with pytest.raises(CheckpointError, match="Read-only"):
        fence.check()


def test_a_folder_that_cannot_be_written_is_read_without_a_lease(tmp_path: Path, caplog: Any) -> None:
    save_parts(tmp_path, PARTS[0])
    (tmp_path / lease.FOLDER).write_text("where the lease would be")
    state = whole(seed=1)
    mine = resumer(tmp_path, state)
    assert mine.resume(claim=claim())
    assert state.progress.step == 3
    assert "no lease, so no checkpoint either, can be written in" in caplog.text
    with pytest.raises(CheckpointError):
        mine.fence.check()


# --- commits --------------------------------------------------------------------------------------


def saving(root: Path, step: int, value: int, fence: Fence) -> Save:
    save = Save(series.folder_of(root, step), {"value": value}, Alone())
    note = fence.check()
    save.details |= {"run": note.claim.run, "epoch": note.claim.epoch, "term": note.term}
    return save


def carry_out(save: Save, fence: Fence) -> None:
    save.commit([save.write([save.images[0].fill])], guard=fence.check)


def test_a_writer_that_sleeps_before_the_check_commits_nothing(folder: Folder) -> None:
    old, new = folder.fence(), folder.fence()
    assert old.begin(claim(epoch=1))
    late = saving(folder.root, 3, 1, old)
    report = late.write([late.images[0].fill])
    new.enter(claim(epoch=2, worker="0.1"), first=True)
    carry_out(saving(folder.root, 4, 2, new), new)
    with pytest.raises(Superseded):
        late.commit([report], guard=old.check)
    assert series.steps_in(folder.root) == [4]


@pytest.mark.parametrize("cleaned", [True, False])
def test_a_writer_that_sleeps_between_check_and_rename_replaces_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, cleaned: bool
) -> None:
    """The window that no check can close: the new holder commits the same step while the old one sleeps in it."""
    old, new = folder.fence(), folder.fence()
    assert old.begin(claim(epoch=1))
    late = saving(folder.root, 3, 1, old)
    report = late.write([late.images[0].fill])

    def sleep_after_check() -> None:
        old.check()
        if old._first and not slept:
            slept.append(True)
            new.enter(claim(epoch=2, worker="0.1"), first=True)
            carry_out(saving(folder.root, 3, 2, new), new)

    slept: list[bool] = []
    if not cleaned:  # the new holder removes the old one's files in the background: it may not have come to that
        monkeypatch.setattr(index, "discard_later", lambda paths: None)
    with pytest.raises(CheckpointError, match="at the same moment: it is not replaced"):
        late.commit([report], guard=sleep_after_check)
    assert load(folder.root, {"value": 0})["value"] == 2


def test_a_writer_that_sleeps_there_and_commits_another_step_is_known_by_its_term(folder: Folder, caplog: Any) -> None:
    old, new = folder.fence(), folder.fence()
    save_parts(folder.root, PARTS[0])
    assert old.begin(claim(epoch=1))
    late = Save(series.folder_of(folder.root, 9), whole(steps=3).tree(), Alone())
    late.details["term"] = old.check().term
    report = late.write([late.images[0].fill])
    calls: list[int] = []

    def sleep_after_check() -> None:
        old.check()
        calls.append(1)
        if len(calls) == 1:
            new.enter(claim(epoch=2, worker="0.1"), first=True)
            other = Save(series.folder_of(folder.root, 5), whole().tree(), Alone())
            other.details["term"] = new.check().term
            carry_out(other, new)

    with pytest.raises(Superseded):
        late.commit([report], guard=sleep_after_check)
    assert series.steps_in(folder.root) == [3, 5, 9], "nothing is removed"
    for fence in folder.fences:
        fence.release()
    state = whole(seed=1)
    assert resumer(folder.root, state).resume(claim=claim("b"))
    assert "step 9 is left out" in caplog.text
    assert index.read(series.folder_of(folder.root, 5)).details["term"] > late.details["term"]


def test_checkpoints_of_yesterday_are_resumed_from(tmp_path: Path) -> None:
    """They have no run, no epoch and no term."""
    for step in (3, 5):
        save(series.folder_of(tmp_path, step), whole().tree())
    assert "term" not in index.read(series.folder_of(tmp_path, 5)).details
    state = whole(seed=1)
    mine = resumer(tmp_path, state)
    assert mine.resume()
    assert state.sha256() == whole().sha256()


def test_many_runs_at_once_one_begins(folder: Folder) -> None:
    fences = [folder.fence(1.0) for _ in range(4)]
    won: list[str] = []
    refused: list[CheckpointError] = []

    def begin(fence: Fence, run: str) -> None:
        try:
            fence.begin(claim(run))
            fence.enter(claim(run), first=True)
            won.append(run)
        except Taken as e:
            refused.append(e)

    threads = [threading.Thread(target=begin, args=(fence, str(n))) for n, fence in enumerate(fences)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 3)
    assert folder.newest.claim.run == won[0]
