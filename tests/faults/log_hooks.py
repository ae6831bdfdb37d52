"""What is done to a worker's log, as in ``LOG_MEDDLE="flip 0.0; die 0.2 3; count *"``; ``*`` means every worker.

Before the first replay, to what it needs: ``lose W``: one record is gone that W said it had. ``forget W``: it is gone
before anybody was asked. ``flip W``: a bit of one record in memory; ``spoil W how``: of one in a file, ``how`` being
flip, cut, delete or swap; ``rot W how``: the checkpoint that it begins from, how being flip, cut, delete or vanish. In
every replay: ``die W N``: W is killed at its Nth step. ``unclipped *``: no gradient is clipped. ``reseed *``: dropout
draws other numbers. ``count *``: an event says what was computed. While training: ``watch *``: an event at each step
says how much the log holds. ``slow W seconds``: each commit of a checkpoint is late. ``cramp W bytes``: no more may
be kept, whatever was planned. ``ready *``: the first checkpoint is there before the second step begins.
"""

import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint import series
from holdfast.cluster import faults
from holdfast.engine.again import Again
from holdfast.engine.model import LayeredModel
from holdfast.log.log import Log
from holdfast.plan.log_records import Direction, Key
from holdfast.plan.replay_plan import Replay
from holdfast.recovery import replay as module
from holdfast.recovery.replay import Replayer
from holdfast.run.saver import Saver

Changed = Callable[[Log, Key], None]


def meddle_with_log(plan: str) -> None:
    """Prepares what is planned for this worker."""
    worker = os.environ.get("HOLDFAST_WORKER")
    for what, name, *rest in [part.split() for part in plan.split(";") if part.strip()]:
        if name in (worker, "*"):
            _HOOKS[what](*rest)


def _patch(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """``around`` is called with what was there before, and with the arguments."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(real, *args, **kwargs))


# --- records -------------------------------------------------------------------------------------


def _before_replay(change: Changed) -> None:
    done: list[bool] = []

    def carry_out(real: Any, replayer: Replayer, group: Any, replay: Replay, holdings: Any) -> None:
        if not done:
            done.append(True)
            change(replayer.log, _needed_of(replayer, replay))
        real(replayer, group, replay, holdings)

    _patch(Replayer, "carry_out", carry_out)


def _needed_of(replayer: Replayer, replay: Replay) -> Key:
    """A record of this worker, of a step in the middle, that the replay cannot do without."""
    step, layers = (replay.first + replay.stop) // 2, len(replayer._engine.model.layers)
    everything = range(replayer._engine.order.micro_batches(step))
    keys = list(module.needed(replay, step, everything, layers=layers, ties=replayer._ties))
    held = replayer.log.holdings(replay.stop)
    return next(key for key in keys if any(each.has(key) for each in held) and key.direction != Direction.TIE)


def _lose() -> None:
    _before_replay(lambda log, key: log._steps[key.step].records.pop(key) and None)


def _forget() -> None:
    done: list[bool] = []

    def holdings(real: Any, log: Log, stop: int) -> Any:
        if not done:
            done.append(True)
            step = log._steps[stop // 2].records
            del step[next(key for key in step if key.direction != Direction.TIE)]
        return real(log, stop)

    _patch(Log, "holdings", holdings)


def _flip() -> None:
    def change(log: Log, key: Key) -> None:
        tensors = log._steps[key.step].records[key].tensors
        tensor = next(each for each in tensors if each.is_floating_point() and each.numel())
        with torch.no_grad():
            tensor.view(torch.int32).reshape(-1)[0] ^= 1 << 20

    _before_replay(change)


def _spoil(how: str) -> None:
    def change(log: Log, key: Key) -> None:
        log.settle()
        place = log._steps[key.step].records[key].place
        assert place is not None, "it is not in a file"
        path, middle = Path(place.file.path), place.offset + len(place.head) + place.text + 3
        if how == "delete":
            path.unlink()
        elif how == "cut":
            os.truncate(path, middle)
        elif how == "swap":  # sound, but another record: the next one
            raw = bytearray(path.read_bytes())
            raw[place.offset :] = raw[place.offset + 8 :]
            path.write_bytes(raw)
        else:
            raw = bytearray(path.read_bytes())
            raw[middle] ^= 1 << random.Random(0).randrange(8)
            path.write_bytes(raw)

    _before_replay(change)


def _rot(how: str) -> None:
    done: list[bool] = []

    def plan(real: Any, replayer: Replayer, *rest: Any) -> Any:
        found = real(replayer, *rest)
        if not done:
            done.append(True)
            folder = series.folder_of(replayer._resumer.settings.root, found[0].first)
            ruin(folder, how)
        return found

    _patch(Replayer, "plan", plan)


def ruin(folder: Path, how: str) -> None:
    """All files with tensors, or the whole checkpoint."""
    if how == "vanish":
        shutil.rmtree(folder)
        return
    for path in [path for path in folder.rglob("*") if path.is_file() and path.suffix == ".safetensors"]:
        raw = bytearray(path.read_bytes())
        if how == "delete":
            path.unlink()
        elif how == "cut":
            path.write_bytes(raw[: len(raw) // 2])
        else:
            raw[len(raw) // 2 :] = bytes(byte ^ 4 for byte in raw[len(raw) // 2 :])
            path.write_bytes(raw)


# --- replay --------------------------------------------------------------------------------------


def _die(number: str) -> None:
    seen: list[str] = []

    def point(real: Any, phase: faults.Phase) -> None:
        seen.extend([phase] if phase == "replay" else [])
        if phase == "replay" and len(seen) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        real(phase)

    module.faults = type("Faults", (), {"point": staticmethod(lambda phase: point(faults.point, phase))})  # type: ignore


def _unclipped() -> None:
    def apply(real: Any, again: Again, step: int, terms: Any) -> None:
        real(again, step, dataclasses.replace(terms, norm=None))

    _patch(Again, "apply", apply)


def _reseed() -> None:
    def attempt(real: Any, again: Again, number: int, shares: Any) -> None:
        forward = LayeredModel.forward

        def other(model: LayeredModel, x: Any, layers: range, *, step: Any, **rest: Any) -> Any:
            return forward(model, x, layers, step=step + 1000, **rest)

        LayeredModel.forward = other  # type: ignore[assignment,method-assign]
        try:
            real(again, number, shares)
        finally:
            LayeredModel.forward = forward  # type: ignore[method-assign]

    _patch(Again, "attempt", attempt)


def _count() -> None:
    """How often each layer was computed in a replay."""
    counts: dict[int, int] = {}
    replaying: list[bool] = []

    def forward(real: Any, model: LayeredModel, x: Any, layers: range, **rest: Any) -> Any:
        for layer in layers if replaying else ():
            counts[layer] = counts.get(layer, 0) + 1
        return real(model, x, layers, **rest)

    def carry_out(real: Any, replayer: Replayer, group: Any, replay: Replay, holdings: Any) -> None:
        counts.clear()
        replaying.append(True)
        real(replayer, group, replay, holdings)
        replaying.clear()
        worker = group.generation.workers[group.rank]
        said = {str(layer): number for layer, number in sorted(counts.items())}
        replayer._events.write("recomputed", worker=worker, generation=group.generation.number, counts=said)

    _patch(LayeredModel, "forward", forward)
    _patch(Replayer, "carry_out", carry_out)


# --- while training ------------------------------------------------------------------------------


def _watch() -> None:
    def if_due(real: Any, saver: Saver, cohort: Any, **rest: Any) -> None:
        real(saver, cohort, **rest)
        log = saver._log
        if log is not None:
            steps = sorted(log._steps)
            facts = {"bytes": log.bytes, "spilled": log.spilled, "steps": steps, "usable": log.usable}
            saver._events.write("log", worker=log.name, step=saver._state.progress.step, **facts)

    _patch(Saver, "if_due", if_due)


def _slow(seconds: str) -> None:
    def commit(real: Any, saver: Saver, *args: Any) -> None:
        time.sleep(float(seconds))
        real(saver, *args)

    _patch(Saver, "_commit", commit)


def _ready() -> None:
    def if_due(real: Any, saver: Saver, cohort: Any, **rest: Any) -> None:
        real(saver, cohort, **rest)
        waits = saver._state.progress.step == 1 and (time.monotonic() + 5.0)
        while time.monotonic() < waits and not saver.steps() and cohort._ended < cohort.generation:
            time.sleep(0.005)  # unless somebody is lost, and it never comes

    _patch(Saver, "if_due", if_due)


def _cramp(size: str) -> None:
    def no_room(real: Any, log: Log, more: int) -> str | None:
        if log.bytes + more > int(size):
            return f"it would hold more than {size} bytes"
        text: str | None = real(log, more)
        return text

    _patch(Log, "_no_room", no_room)


_HOOKS: dict[str, Callable[..., None]] = {
    "lose": _lose,
    "forget": _forget,
    "flip": _flip,
    "spoil": _spoil,
    "rot": _rot,
    "die": _die,
    "unclipped": _unclipped,
    "reseed": _reseed,
    "count": _count,
    "watch": _watch,
    "slow": _slow,
    "cramp": _cramp,
    "ready": _ready,
}
