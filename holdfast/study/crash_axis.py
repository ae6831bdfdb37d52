"""The axis "crash safety": saves that overwrite the one before are killed, and another process loads what is left.

Kills (SIGKILL) come at random moments, and right after the save has begun to change the old files, where most harm is
done. A kill is no power cut: bytes that the dead process had handed to the kernel still reach the disk. Whether a save
is on the disk when it returns is ``durable_on_return`` of the cost axis. ``damage`` has what a disk does to a good
save.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.study.damage import BIT_FLIP, SMALL, TRUNCATION, damage_rows, row_about, spots
from holdfast.study.models import Shape, StudyModel
from holdfast.study.process import Failed, Start
from holdfast.study.turns import Say
from holdfast.study.witness import LIMIT, Looked, Witness, a_few

Row = dict[str, Any]
KILL = "kill"
WHATS = (KILL, BIT_FLIP, TRUNCATION)
TRIES = 3  # of one kill: a save may be over before it is killed
AIMED = (0.0, 0.001, 0.003)  # seconds after the first change of an old file
OUTCOMES = ("old", "new", "mixed", "nothing")


def judge(old: dict[str, str], new: dict[str, str], looked: Looked) -> str:
    """Return which version loads: all of the ``old``, all of the ``new``, a ``mixed`` one, or ``nothing``.

    >>> old, new = {"a": "1", "b": "1"}, {"a": "2", "b": "2"}
    >>> judge(old, new, {"error": None, "digests": {"a": "2", "b": "1"}})
    'mixed'
    >>> judge(old, new, {"error": "no such file", "digests": None})
    'nothing'
    """
    found = looked["digests"]
    if found is None:
        return "nothing"
    return "old" if found == old else "new" if found == new else "mixed"


def verdict(counts: dict[str, int], killed: int) -> tuple[str, str]:
    """Return ``safe``, ``unsafe`` or ``failed``, and a sentence. ``killed``: kills that came during a save.

    >>> verdict({"old": 1, "new": 1, "mixed": 0, "nothing": 2}, 3)
    ('unsafe', '2 of 3 kills left nothing that loads')
    >>> verdict({"old": 3, "new": 1, "mixed": 0, "nothing": 0}, 3)
    ('safe', 'always the old or the new one (3 kills)')
    """
    if killed == 0:
        return "failed", "every save was over before it was killed"
    kills = f"{killed} kill{'s' if killed > 1 else ''}"
    left = {"nothing": "nothing that loads", "mixed": "a mixture of old and new"}
    lost = [f"{counts[outcome]} left {what}" for outcome, what in left.items() if counts[outcome]]
    if not lost:
        return "safe", f"always the old or the new one ({kills})"
    return "unsafe", ", ".join(lost).replace(" left", f" of {kills} left", 1)


def moment(usual: Row, share: float) -> float:
    """Return the seconds after which to kill: ``share`` of the way from the first change on the disk to the end.

    A save that is over by then counts as a try that left the new one; another try comes at an earlier moment.

    >>> moment({"touched": 0.2, "seconds": 1.2}, 0.5)
    0.7
    """
    begin, end = usual["touched"], usual["seconds"]
    return float(begin + share * (end - begin))


def measure(
    framework: str,
    start: Start,
    formats: Sequence[str],
    *,
    model: StudyModel,
    folder: Path,
    logs: Path,
    kills: int,
    seed: int,
    say: Say,
) -> list[Row]:
    """Return three rows for each format: kill, bit flip, truncation.

    Args:
        framework: its name.
        start: starts a process of it.
        formats: names of its formats.
        model: the model whose saves are killed.
        folder: for checkpoints; nothing is left there.
        logs: folder for what processes print.
        kills: kills of each format, beside the aimed ones.
        seed: decides moments and damaged bytes.
        say: called with what is being done.

    An error becomes a row with the verdict ``failed``.
    """
    rows: list[Row] = []
    scratch = folder / "crash"
    scratch.mkdir(parents=True)
    try:
        with Witness(framework, start, logs) as witness, Killer(start, logs / f"{framework}-killer.log") as killer:
            witness.model(model.shapes)
            for form in formats:
                say(f"{framework}: {form}, killed while it saves")
                source = random.Random(f"{seed}/{framework}/{form}")
                row = kill_row(witness, killer, form, scratch, shapes=model.shapes, kills=kills, source=source)
                rows.append(row | {"model": model.name})
            witness.model(SMALL)
            for form in formats:
                say(f"{framework}: {form}, damaged")
                rows += damage_rows(witness, form, scratch / "state", seed=seed)
    except (Failed, OSError) as e:
        done = {row["id"] for row in rows}
        missing = [(form, what) for form in formats for what in WHATS]
        failed = [row_about(framework, *each) | {"verdict": "failed", "error": str(e)} for each in missing]
        rows += [row for row in failed if row["id"] not in done]
    finally:
        shutil.rmtree(scratch)
    return rows


class Killer:
    """A process whose forks save and are killed. It makes no model itself, because frameworks cannot be forked then."""

    def __init__(self, start: Start, log: Path) -> None:
        self._start, self._log = start, log
        self._process = start(log)

    def doom(
        self, shapes: list[Shape], form: str, folder: Path, delay: float | None, *, from_change: bool = False
    ) -> Row:
        given = {"shapes": shapes, "form": form, "folder": str(folder.absolute())}
        try:
            return self._process.ask("doom", within=LIMIT, delay=delay, from_change=from_change, **given)
        except Failed:
            self._process.kill()
            self._process = self._start(self._log)
            raise

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


def kill_row(
    witness: Witness,
    killer: Killer,
    form: str,
    folder: Path,
    *,
    shapes: list[Shape],
    kills: int,
    source: random.Random,
) -> Row:
    """Return the row of a format's kills.

    Two controls: without a kill the new version must load, and after all kills the old files must still load. If one
    does not, the errors may not be the kills', and the verdict is ``failed``.
    """
    row = row_about(witness.framework, form, KILL)
    state, old = folder / "state", folder / "old"
    try:
        witness.save_old(form, state)
        _lay(state, old)
        usual = killer.doom(shapes, form, state, None)
        looked = witness.look(form, state)
        if judge(witness.old, witness.new, looked) != "new":
            raise Failed(f"what was overwritten without a kill is not the new one: {looked['error'] or 'it differs'}")
        tried = []
        for share in spots(kills, 1.0, source):
            for number in range(TRIES):
                _lay(old, state)
                done = killer.doom(shapes, form, state, moment(usual, share * 0.8**number))
                tried.append((done["killed"], witness.look(form, state)))
                if done["killed"]:
                    break
                usual = done
        for delay in AIMED:
            _lay(old, state)
            done = killer.doom(shapes, form, state, delay, from_change=True)
            tried.append((done["killed"], witness.look(form, state)))
        _lay(old, state)
        if judge(witness.old, witness.new, witness.look(form, state)) != "old":
            raise Failed("the old one does not load any more: the errors may not be the kills'")
        return row | _numbers(witness, tried)
    except Failed as e:
        return row | {"verdict": "failed", "error": str(e)}


def _lay(source: Path, target: Path) -> None:
    """Make ``target`` a copy of ``source``; that is cheaper than to save again, above all with compression."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def _numbers(witness: Witness, tried: Sequence[tuple[bool, Looked]]) -> Row:
    outcomes = [judge(witness.old, witness.new, looked) for _, looked in tried]
    counts = {name: outcomes.count(name) for name in OUTCOMES}
    killed = sum(hit for hit, _ in tried)
    safe, says = verdict(counts, killed)
    errors = a_few([looked["error"] for _, looked in tried if looked["error"]])
    return {"tries": len(tried), "killed": killed, **counts, "verdict": safe, "says": says, "errors": errors}
