"""Checkpoints on a terminal: tables that a person can read, as wide as the terminal is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.diff import Difference, Row
from holdfast.checkpoint.facts import some
from holdfast.checkpoint.listing import COMPLETE, UNFINISHED, Found
from holdfast.checkpoint.verify import Damage, Verdict
from holdfast.screen import ROWS, Screen
from holdfast.words import count, size_text, time_text

# --- ls -------------------------------------------------------------------------------------------


def show_list(screen: Screen, root: Path, found: Sequence[Found]) -> None:
    if not found:
        screen.say(f"there is no checkpoint in {root}")
        return
    rows = [
        [
            _inside(one.path, root),
            "" if one.step is None else str(one.step),
            one.format,
            size_text(one.bytes) if one.bytes else "",
            f"{one.tensors:,}" if one.tensors else "",
            str(one.files or ""),
            time_text(one.saved, short=screen.console.width < 90),
            _state(one),
        ]
        for one in found
    ]
    screen.table(["checkpoint~", ">step", "format", ">size", ">tensors?", ">files?", "saved", "state~"], rows)
    for one in found:
        if one.state not in (COMPLETE, UNFINISHED):
            screen.say(f"{_inside(one.path, root)}: {one.state}", style="red")


def _state(one: Found) -> str:
    if one.state not in (COMPLETE, UNFINISHED):
        return "damaged"
    return "newest" if one.newest else one.state


def _inside(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else str(path)


# --- verify ---------------------------------------------------------------------------------------


def show_verdict(screen: Screen, path: Path, verdict: Verdict, *, seconds: float) -> None:
    shown = verdict.damaged if screen.everything else verdict.damaged[:ROWS]
    for one in shown:
        screen.say(_damage(one))
    screen.more(len(verdict.damaged) - len(shown))
    checked = [count(number, noun) for noun, number in verdict.checked.items()]
    done = f"{size_text(verdict.bytes)} in {seconds:.1f} s" + (f": {', '.join(checked)}" if checked else "")
    if verdict.damaged:
        screen.say(f"{path} is damaged in {count(len(verdict.damaged), 'place')} ({done})", style="bold red")
    elif verdict.unchecked:
        screen.say(f"{path}: nothing wrong was found ({done})", style="bold")
    else:
        # Between the records of a zip are bytes that mean nothing, and have no checksum.
        what = "every record" if "record" in verdict.checked else "every byte"
        screen.say(f"{path}: {what} is as it was written ({done})", style="bold green")
    for sentence in verdict.unchecked:
        screen.say(f"not checked: {sentence}", style="yellow")


def _damage(one: Damage) -> str:
    where = [one.file] if one.file else []
    where += [f"bytes {one.start:,} to {one.stop:,}"] if one.stop else []
    held = f"\n    in it: {some(one.tensors)}" if one.tensors and one.file else ""
    return ", ".join(where) + (": " if where else "") + one.what + held


# --- diff -----------------------------------------------------------------------------------------


def show_difference(screen: Screen, a: Path, b: Path, difference: Difference) -> None:
    screen.say(f"A: {a}")
    screen.say(f"B: {b}")
    if difference.rows:
        rows = [[row.name, _differs(row), _largest(row)] for row in collapsed(difference.rows)]
        screen.say()
        screen.table(["name~", "difference~", ">max |A-B|"], rows)
        screen.say()
    for sentence in difference.notes if screen.everything else difference.notes[:ROWS]:
        screen.say(sentence, style="dim")
    for side, names in (("A", difference.only_a), ("B", difference.only_b)):
        if names:
            screen.say(f"only {side} has {some(names, 8)}: not compared", style="yellow")
    equal = [count(difference.equal, "tensor")] if difference.equal else []
    equal += [count(difference.close, "tensor") + " within the tolerance"] if difference.close else []
    equal += [count(difference.values, "value")] if difference.values else []
    if difference.rows:
        text = f"different: {count(len(difference.rows), 'difference')}"
        screen.say(f"{text}; equal: {', '.join(equal) or 'nothing'}", style="bold red")
    else:
        screen.say(f"equal: {', '.join(equal) or 'nothing was compared'}", style="bold green" if equal else "bold")


def collapsed(rows: Sequence[Row]) -> list[Row]:
    """Settings that differ in the same way for many parameters in one row.

    >>> lr = [Row(name=f"optimizer/param_groups/{name}/lr", kind="value", a="0.1", b="0.2") for name in "ab"]
    >>> [row.name for row in collapsed(lr)]
    ['optimizer/param_groups/* (2 parameters)/lr']
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        parts = row.name.split("/")
        plain = row.kind not in ("value", "only in A", "only in B") or "a tensor" in (row.a, row.b)
        if len(parts) < 4 or parts[1] not in ("state", "param_groups") or plain:
            groups[row.name, row.kind] = [row]
        else:
            parts[2] = "*"
            groups.setdefault((*parts, row.kind, row.a, row.b), []).append(row)
    made = []
    for alike in groups.values():
        first = alike[0]
        parts = first.name.split("/")
        name = "/".join([*parts[:2], f"* ({len(alike)} parameters)", *parts[3:]]) if len(alike) > 1 else first.name
        made.append(Row(**{**vars(first), "name": name}))
    return made


def _differs(row: Row) -> str:
    if row.kind.startswith("only"):
        return row.kind
    if row.kind == "values":
        return f"{row.differing:,} of {row.elements:,} elements"
    text = f"{row.a} in A, {row.b} in B"
    if row.kind != "dtype":
        return text
    return f"{text}; {f'{row.differing:,}' if row.differing else 'none'} of {row.elements:,} values differ"


def _largest(row: Row) -> str:
    if row.largest is None:
        return ""
    return f"{row.largest:.3g}" if math.isfinite(row.largest) else "inf or nan"
