"""Requests to a framework's process: make a model, save and load it and take the time, train a lesson."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from holdfast.study.adapters.base import STEPS, Shapes
from holdfast.study.inside import file_control
from holdfast.study.inside.session import Session

AFTER = 3  # least steps after a save that count as its cost: its leftovers may slow them down
USUAL, LONG = 5, 0.2  # least steps, and least seconds, that tell how long an undisturbed step takes


def make(session: Session, *, shapes: Shapes, seed: int) -> dict[str, Any]:
    """Make a model and train it one step; the one before is dropped first, to save memory."""
    drop(session)
    session.training = session.adapter.make(shapes, seed)
    loss = session.training.step()
    return {"loss": loss, "bytes": sum(array.nbytes for array in session.training.arrays().values())}


def drop(session: Session) -> dict[str, Any]:
    """Drop the model."""
    session.training = None
    gc.collect()
    return {}


def save(session: Session, *, form: str, folder: str, memory: bool = False) -> dict[str, Any]:
    """Save once, until it is on the disk, and return times and sizes. ``memory``: then save again, into memory."""
    target = Path(folder)
    file_control.empty(target)
    peak = file_control.Peak()
    begin = time.monotonic()
    wait = session.save(form, target)
    stall = time.monotonic() - begin
    if wait is not None:
        wait()
    called = time.monotonic() - begin
    unwritten = file_control.unwritten(target)
    file_control.sync_files(target)
    durable = time.monotonic() - begin
    files = file_control.files_of(target)
    return {
        "stall_s": stall,
        "called_s": called,
        "durable_s": durable,
        "fsync_s": durable - called,
        "unwritten": unwritten,
        "peak_bytes": peak.bytes(),
        "bytes": sum(each.stat().st_size for each in files),
        "files": len(files),
        "serialise_s": _into_memory(session, form) if memory else None,
    }


def _into_memory(session: Session, form: str) -> float | None:
    """Return the seconds of the same save into a file system in memory.

    None if there is no such file system, or too little room: in a container it may have 64 MB.
    """
    folder = file_control.memory_of(os.getpid())
    try:
        folder.mkdir()
        begin = time.monotonic()
        wait = session.save(form, folder)
        if wait is not None:
            wait()
        return time.monotonic() - begin
    except Exception:  # each framework has its own way to say that
        traceback.print_exc()
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load(session: Session, *, form: str, folder: str) -> dict[str, Any]:
    """Load from the disk, then from the page cache; return both times, and whether it gave what was saved."""
    training = session.training
    expected = training.digests()
    seconds = {}
    for name in ("cold_s", "warm_s"):
        training.clear()
        if name == "cold_s":
            file_control.drop_from_cache(Path(folder))
        begin = time.monotonic()
        try:
            session.load(form, Path(folder))
        except Exception:
            training.reset(0)  # the formats after this one must not save zeros: a compressor would shine
            raise
        seconds[name] = time.monotonic() - begin
    return {**seconds, "same": training.digests() == expected}


def beside(session: Session, *, form: str, folder: str) -> dict[str, Any]:
    """Return the seconds that a save costs a training loop.

    That is the time until the save is on the disk (and some steps longer), less the time of as many undisturbed steps.
    Means are compared with means: with a median, every slow step would count as the save's cost.
    """
    target = Path(folder)
    file_control.empty(target)
    usual = _usual_steps(session)
    begin = time.monotonic()
    wait = session.save(form, target)
    if wait is None:
        file_control.sync_files(target)
    stall = time.monotonic() - begin
    thread = threading.Thread(target=_finish, args=(wait, target))
    thread.start()
    steps = 0
    while thread.is_alive() or steps < AFTER:
        session.training.step()
        steps += 1
    seconds = time.monotonic() - begin
    thread.join()
    usual += _usual_steps(session)
    step = sum(usual) / len(usual)
    return {"stall_s": stall, "lost_s": max(0.0, seconds - steps * step), "step_s": step, "steps": steps}


def _finish(wait: Any, folder: Path) -> None:
    if wait is not None:
        wait()
        file_control.sync_files(folder)


def _usual_steps(session: Session) -> list[float]:
    """Return the seconds of each of some undisturbed steps."""
    found: list[float] = []
    while len(found) < USUAL or sum(found) < LONG:
        begin = time.monotonic()
        session.training.step()
        found.append(time.monotonic() - begin)
    return found


def join(session: Session, *, rank: int, ranks: int, address: str) -> dict[str, Any]:
    """Meet the other ranks at ``address`` (host:port)."""
    session.adapter.join(rank, ranks, address)
    return {}


def save_ranked(
    session: Session, *, strategy: str, folder: str, rank: int, ranks: int, at: float = 0.0
) -> dict[str, Any]:
    """Save this rank's part, from the moment ``at`` of the monotonic clock until it is on the disk."""
    time.sleep(max(0.0, at - time.monotonic()))
    before, begin = file_control.written(), time.monotonic()
    session.training.save_ranked(strategy, Path(folder), rank, ranks)
    file_control.sync_files(Path(folder))
    return {"seconds": time.monotonic() - begin, "written": file_control.written() - before}


def train(
    session: Session,
    *,
    seed: int,
    variant: str = "",
    restore: tuple[str, int, list[str]] | None = None,
    saves: list[tuple[int, str, list[str]]] = (),  # type: ignore[assignment]
) -> dict[str, Any]:
    """Train a lesson to its end; return its losses and digests.

    ``restore``: (folder, step, parts) to begin from. ``saves``: (step, folder, parts) in the order of their steps;
    training goes on after each.
    """
    lesson = session.adapter.lesson(seed, variant)
    step = 0
    if restore is not None:
        folder, step, parts = restore
        lesson.restore(Path(folder), frozenset(parts))
    first, losses = step, []
    for at, folder, parts in saves:
        losses += lesson.train(at - step)
        step = at
        lesson.save(Path(folder), frozenset(parts))
    losses += lesson.train(STEPS - step)
    return {"first": first, "losses": losses, "digests": lesson.digests()}
