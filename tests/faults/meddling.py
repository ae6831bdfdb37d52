"""Faults that no phase can name, as in ``MEDDLE="deaf 0.0 5; die 0.1 5; copying 0.2; filling 0.3"``.

``deaf W N``: vote number N of worker W is heard by the others, but it hears nobody until the generation breaks.
``die W N``: W is killed when it has heard everybody in its vote number N. ``copying W``: W is killed when
layers come or go, but not at the begin. ``filling W``: W is killed when it has read its layers from a checkpoint.
``sending W N``: W is killed in the middle of the Nth large message that it sends. ``late W N``: in step N, W begins
no eager update until the generation breaks: it is untouched. ``begin W N``: in step N, W tells when it has updated
its first bucket; ``follow W N``: in step N, W has updated its first bucket, waits to be told so, and is killed.
``slow W S``: W's disk takes S seconds for each block of a checkpoint.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.checkpoint import disk
from holdfast.cluster import faults
from holdfast.cluster.group import Group
from holdfast.cluster.talk import Shared, Transfer
from holdfast.recovery import copy
from holdfast.recovery.resume import Resumer
from holdfast.undo.eager import Eager

LARGE = 1_000_000


def meddle(plan: str) -> None:
    """Prepares what is planned for this worker."""
    worker = os.environ.get("HOLDFAST_WORKER")
    planned = [part.split() for part in plan.split(";") if part.strip()]
    mine = [(what, *rest) for what, name, *rest in planned if name == worker]
    votes = {int(rest[0]): what for what, *rest in mine if what in ("deaf", "die")}
    if votes:
        _meddle_with_votes(votes)
    for number in [int(rest[0]) for what, *rest in mine if what == "sending"]:
        _die_sending(number)
    for step in [int(rest[0]) for what, *rest in mine if what == "late"]:
        _update_late(step)
    for what, step in [(what, int(rest[0])) for what, *rest in mine if what in ("begin", "follow")]:
        _tell_or_die(step, dies=what == "follow")
    for seconds in [float(rest[0]) for what, *rest in mine if what == "slow"]:
        _slow_disk(seconds)
    if ("copying",) in mine:
        _die_copying()
    if ("filling",) in mine:
        _die_filling()


def _slow_disk(seconds: float) -> None:
    real = disk._write_all

    def write_all(fd: int, data: Any, offset: int) -> None:
        time.sleep(seconds)
        real(fd, data, offset)

    disk._write_all = write_all


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _meddle_with_votes(planned: dict[int, str]) -> None:
    count = itertools.count(1)
    real = Group.vote

    def vote(group: Group, ballot: Tensor, shared: Shared | None = None) -> list[float]:
        what = planned.get(next(count))
        if what == "deaf":
            group.finish = lambda receives: _hear_nobody(group)  # type: ignore[method-assign]
        sums = real(group, ballot, shared)
        if what == "die":
            _die()
        return sums

    Group.vote = vote  # type: ignore[method-assign]


def _hear_nobody(group: Group) -> None:
    """Wait until the generation breaks: what this worker says has gone out, what others say is not taken in."""
    while True:
        time.sleep(0.002)
        group.check()


def _die_sending(number: int) -> None:
    """What is posted is sent by a thread of its own: of a large message, some has been sent a moment later."""
    count = itertools.count(1)
    real = Group.start

    def start(group: Group, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Any]:
        works = real(group, sends, receives)
        if any(tensor.nbytes >= LARGE for _, tensor, _ in sends) and next(count) == number:
            time.sleep(0.002)
            _die()
        return works

    Group.start = start  # type: ignore[method-assign]


def _update_late(step: int) -> None:
    real, waited = Eager.summed, threading.Event()

    def summed(eager: Eager, bucket: Any) -> None:
        from holdfast.run.process import runs

        group = runs[0]._cohort.group
        first = group is not None and group.generation.number == 1  # later nobody dies: it would wait for ever
        if faults._step == step and first and not waited.is_set():
            waited.set()
            while True:
                time.sleep(0.002)
                group.check()
        real(eager, bucket)

    Eager.summed = summed  # type: ignore[method-assign]


def _tell_or_die(step: int, *, dies: bool) -> None:
    real, told = Eager.summed, Path(os.environ["RESULTS"]).with_name("begun")

    def summed(eager: Eager, bucket: Any) -> None:
        real(eager, bucket)
        if faults._step == step and not dies:
            told.touch()
        elif faults._step == step:
            while not told.exists():
                time.sleep(0.002)
            _die()

    Eager.summed = summed  # type: ignore[method-assign]


def _die_copying() -> None:
    real = faults.point

    def point(phase: faults.Phase, *, step: int | None = None) -> None:
        trained = [member.standing.operation for member in _generation()]
        if phase == "copy" and any(trained):
            _die()
        real(phase, step=step)

    copy.faults.point = point


def _generation():  # type: ignore[no-untyped-def]
    from holdfast.run.process import clients

    generation = clients[0]._seat.generation
    return () if generation is None else generation.members


def _die_filling() -> None:
    real = Resumer.fill

    def fill(resumer: Resumer, step: int) -> None:
        real(resumer, step)
        _die()

    Resumer.fill = fill  # type: ignore[method-assign]
