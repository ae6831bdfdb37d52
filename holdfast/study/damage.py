"""Damage after a good save, a flipped bit or a cut file: does the load notice it?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from holdfast.study.inside import file_control
from holdfast.study.models import gpt
from holdfast.study.process import Failed
from holdfast.study.witness import Looked, Witness, a_few

Row = dict[str, Any]
BIT_FLIP, TRUNCATION = "bit flip", "truncation"
SMALL = list(gpt(layers=2, width=128, vocabulary=2048, context=128))  # 5 MB: what is noticed does not depend on size
FLIPS, CUTS = 8, 4  # tries of each format: few, because every try loads the whole checkpoint


def judge(saved: dict[str, str], looked: Looked) -> str:
    """Return the effect of damage: ``noticed`` by an error, ``silent`` (other numbers), or ``harmless``.

    >>> judge({"a": "1"}, {"error": "CRC", "digests": None})
    'noticed'
    >>> judge({"a": "1"}, {"error": None, "digests": {"a": "2"}})
    'silent'
    """
    if looked["digests"] is None:
        return "noticed"
    return "harmless" if looked["digests"] == saved else "silent"


def verdict(what: str, counts: dict[str, int]) -> tuple[str, str]:
    """Return ``safe`` or ``unsafe``, and a sentence.

    >>> verdict("bit flip", {"noticed": 5, "silent": 0, "harmless": 1})
    ('safe', '5 of 6 bit flips were noticed, 1 changed nothing')
    >>> verdict("truncation", {"noticed": 0, "silent": 2, "harmless": 0})
    ('unsafe', '2 of 2 truncations loaded as if nothing had happened, with other numbers')
    """
    things = f"{sum(counts.values())} {what}s"
    if counts["silent"]:
        return "unsafe", f"{counts['silent']} of {things} loaded as if nothing had happened, with other numbers"
    rest = f", {counts['harmless']} changed nothing" if counts["harmless"] else ""
    return "safe", f"{counts['noticed']} of {things} were noticed{rest}"


def spots(tries: int, whole: float, source: random.Random) -> list[float]:
    """Return random points between 0 and ``whole``, one in each of ``tries`` equal parts.

    >>> [int(spot) for spot in spots(4, 100, random.Random(0))]
    [21, 43, 60, 81]
    """
    return [(number + source.random()) / tries * whole for number in range(tries)]


@contextmanager
def flipped(file: Path, offset: int, bit: int) -> Iterator[None]:
    """Flip one bit of a file; it is flipped back at the end."""
    _flip(file, offset, bit)
    try:
        yield
    finally:
        _flip(file, offset, bit)


def _flip(file: Path, offset: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << bit]))


@contextmanager
def cut(file: Path, length: int) -> Iterator[None]:
    """Cut a file to ``length`` bytes; its end is appended again at the end."""
    with file.open("r+b") as opened:
        opened.seek(length)
        end = opened.read()
        opened.truncate(length)
    try:
        yield
    finally:
        with file.open("ab") as opened:
            opened.write(end)


def row_about(framework: str, form: str, what: str) -> Row:
    """Return the fields that every row of this axis begins with."""
    return {"id": f"crash/{framework}/{form}/{what}", "framework": framework, "format": form, "what": what}


def damage_rows(witness: Witness, form: str, folder: Path, *, seed: int) -> list[Row]:
    """Return a row for flipped bits and one for cuts, of the largest file only: it has nearly all bytes."""
    source = random.Random(f"{seed}/{witness.framework}/{form}")
    rows = []
    for what in (BIT_FLIP, TRUNCATION):
        row = row_about(witness.framework, form, what)
        try:
            witness.save_old(form, folder)
            largest = max(file_control.files_of(folder), key=lambda file: file.stat().st_size)
            tried = [_try(witness, form, folder, damage) for damage in _damages(what, largest, source)]
            if witness.look(form, folder)["digests"] != witness.old:
                raise Failed("what was repaired does not load any more: the errors may not be the damage's")
            rows.append(row | _numbers(what, tried))
        except Failed as e:
            rows.append(row | {"verdict": "failed", "error": str(e)})
    return rows


def _damages(what: str, file: Path, source: random.Random) -> list[AbstractContextManager[None]]:
    size = file.stat().st_size
    if what == BIT_FLIP:
        return [flipped(file, int(spot), source.randrange(8)) for spot in spots(FLIPS, size, source)]
    return [cut(file, int(spot)) for spot in spots(CUTS, size, source)]


def _try(witness: Witness, form: str, folder: Path, damage: AbstractContextManager[None]) -> tuple[str, str]:
    with damage:
        looked = witness.look(form, folder)
    return judge(witness.old, looked), looked["error"] or ""


def _numbers(what: str, tried: Sequence[tuple[str, str]]) -> Row:
    outcomes = [outcome for outcome, _ in tried]
    counts = {name: outcomes.count(name) for name in ("noticed", "silent", "harmless")}
    safe, says = verdict(what, counts)
    return {
        "tries": len(tried),
        **counts,
        "verdict": safe,
        "says": says,
        "errors": a_few([error for _, error in tried if error]),
    }
