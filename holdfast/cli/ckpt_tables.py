"""Tables of ``holdfast ckpt`` on a terminal, as wide as the terminal is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast import codec
from holdfast.checkpoint.diff import CheckpointDiff, Row
from holdfast.checkpoint.inspection import groups_by_section, matching, values_of
from holdfast.checkpoint.listing import COMPLETE, UNFINISHED, Found
from holdfast.checkpoint.pieces import Catalogue, Ref, TensorEntry
from holdfast.checkpoint.places import Place
from holdfast.checkpoint.trees import box_text, bytes_of, marks_of, shape_text, some, step_of
from holdfast.checkpoint.verify import Damage, VerifyResult
from holdfast.screen import ROWS, Screen
from holdfast.words import count, ranges_text, size_text, time_text

# --- ls -------------------------------------------------------------------------------------------


def show_list(screen: Screen, root: Place, found: Sequence[Found]) -> None:
    """Shows the checkpoints below ``root``, one in a row, and the full reason for each that is damaged."""
    if not found:
        screen.say(f"there is no checkpoint in {root}")
        return
    rows = [
        [
            _inside(one.path, root),
            "" if one.step is None else str(one.step),
            one.format,
            size_text(one.bytes) if one.bytes else "",
            size_text(one.shared) if one.shared else "",
            f"{one.tensors:,}" if one.tensors else "",
            str(one.files or ""),
            time_text(one.saved, short=screen.console.width < 90),
            _state(one),
        ]
        for one in found
    ]
    screen.table(
        ["checkpoint~", ">step", "format", ">size", ">shared?", ">tensors?", ">files?", "saved", "state~"], rows
    )
    for one in found:
        if one.state not in (COMPLETE, UNFINISHED):
            screen.say(f"{_inside(one.path, root)}: {one.state}", style="red")


def _state(one: Found) -> str:
    if one.state not in (COMPLETE, UNFINISHED):
        return "damaged"
    return "newest" if one.newest else one.state


def _inside(path: Place, root: Place) -> str:
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else str(path)


# --- inspect --------------------------------------------------------------------------------------


def show_checkpoint(screen: Screen, catalogue: Catalogue, path: Place, pattern: str | None) -> None:
    """Shows header, files, tensors, values, and what could not be read.

    With a ``pattern`` (a glob, as ``*.bias``) it shows where each piece of the tensors that match lies instead.
    """
    tensors = matching(catalogue, pattern)
    numbers = {name: number for number, name in enumerate(catalogue.files)}
    for line in _inspect_head(catalogue, path):
        screen.say(line, style="bold" if line.startswith(str(path)) else "")
    screen.say()
    _inspect_files(screen, catalogue, numbers)
    if pattern is not None:
        _inspect_pieces(screen, catalogue, tensors, numbers)
        return
    _inspect_tensors(screen, catalogue, numbers)
    _inspect_values(screen, catalogue)
    for sentence in catalogue.details.get("left_out", ()):
        screen.say(f"not read: {sentence}", style="yellow")


def _inspect_head(catalogue: Catalogue, path: Place) -> Iterator[str]:
    step = step_of(catalogue)
    yield f"{path}: {catalogue.format} checkpoint" + ("" if step is None else f" of step {step}")
    details = dict(catalogue.details)
    ranks, saved, torch = details.pop("ranks", None), details.pop("saved", None), details.pop("torch", None)
    told = [f"saved {time_text(saved)}"] if isinstance(saved, float | int) else []
    told += [f"by {count(ranks, 'rank')}"] if isinstance(ranks, int) else []
    told += [f"with torch {torch}"] if torch else []
    if told:
        yield " ".join(told)
    size, files = size_text(bytes_of(catalogue)), count(len(catalogue.files), "file")
    yield f"{count(len(catalogue.tensors), 'tensor')} in {files}, {size}"
    if absent := catalogue.left_out:
        yield f"{count(len(absent), 'frozen weight')} left out (trainable_only): {some(absent)}"
    others = [f"{key} {value}" for key, value in details.items() if key != "left_out"]
    if others:
        yield ", ".join(others)


def _inspect_files(screen: Screen, catalogue: Catalogue, numbers: Mapping[str, int]) -> None:
    rows = [
        [str(numbers[name]), name, size_text(file.bytes), file.writer, "yes" if file.checksums else ""]
        for name, file in catalogue.files.items()
    ]
    screen.table([">#", "file~", ">size", "written by~", "checksums?"], rows)


def _inspect_tensors(screen: Screen, catalogue: Catalogue, numbers: Mapping[str, int]) -> None:
    marks = marks_of(catalogue)
    sections: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in catalogue.tensors.items():
        first, _, rest = name.partition("/")
        section = f"{first}/state" if rest.startswith("state/") else first
        sections.setdefault(section if rest else "", {})[name] = entry
    for section, inside in sections.items():
        rows = [_row(name, entry, section, marks.get(name, []), numbers) for name, entry in inside.items()]
        total = size_text(sum(entry.nbytes for entry in inside.values()))
        screen.say()
        title = f"{section or 'tensors'}: {count(len(inside), 'tensor')}, {total}"
        screen.table(["name~", "shape", "dtype", ">size", ">pieces?", "in file", "notes~"], rows, title=title)


def _row(name: str, entry: TensorEntry, section: str, marks: Sequence[str], numbers: Mapping[str, int]) -> list[str]:
    files = ranges_text(numbers[piece.stored.file] for piece in entry.pieces)
    held, wanted = sum(piece.box.numel for piece in entry.pieces), math.prod(entry.shape)
    notes = [*marks, *([f"mean of {len(entry.pieces)}"] if entry.mean else [])]
    if not entry.mean and held > wanted:
        notes.append(f"{held / wanted:.3g} copies")
    return [
        name.removeprefix(f"{section}/"),
        shape_text(entry.shape),
        codec.dtype_name(entry.dtype),
        size_text(entry.nbytes),
        str(len(entry.pieces)) if len(entry.pieces) != 1 else "",
        files if len(numbers) > 1 else "",
        ", ".join(notes),
    ]


def _inspect_pieces(
    screen: Screen, catalogue: Catalogue, tensors: Mapping[str, TensorEntry], numbers: Mapping[str, int]
) -> None:
    """Shows where every piece of some tensors lies, and who wrote it."""
    marks = marks_of(catalogue)
    shown = [*tensors.items()] if screen.everything else [*tensors.items()][:ROWS]
    for name, entry in shown:
        notes = ["mean of its pieces"] if entry.mean else []
        facts = [shape_text(entry.shape), codec.dtype_name(entry.dtype), size_text(entry.nbytes)]
        rows = [
            [
                box_text(piece.box),
                str(numbers[piece.stored.file]),
                f"{piece.stored.offset:,}",
                size_text(piece.stored.nbytes),
                catalogue.files[piece.stored.file].writer,
            ]
            for piece in entry.pieces
        ]
        screen.say()
        title = f"{name}: {', '.join([*facts, *marks.get(name, []), *notes])}"
        screen.table(["piece~", ">in file", ">at byte", ">size", "written by~"], rows, title=title)
    screen.more(len(tensors) - len(shown), " tensors")


def _inspect_values(screen: Screen, catalogue: Catalogue) -> None:
    rows = [[name, _short(value)] for name, value in _together(values_of(catalogue)).items()]
    for section, groups in groups_by_section(catalogue).items():
        for number, group in enumerate(groups):
            settings = {key: value for key, value in group.items() if key != "params" and value is not None}
            text = ", ".join(f"{key} {_short(value)}" for key, value in settings.items())
            names = group["params"]
            ends = " … ".join(dict.fromkeys([str(names[0]), str(names[-1])])) if names else ""
            rows.append([f"{section} group {number}", f"{text}; {count(len(names), 'parameter')}: {ends}"])
    if rows:
        screen.say()
        screen.table(["name~", "value~"], rows, title="values")


def _together(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with those that an optimizer keeps for each parameter in one row, where they are the same.

    >>> _together({"optimizer/state/a/step": 3, "optimizer/state/b/step": 3, "step": 3})
    {'optimizer/state/* (2 parameters)/step': 3, 'step': 3}
    """
    groups: dict[tuple[str, ...], list[tuple[str, Any]]] = {}
    for name, value in values.items():
        parts = name.split("/")
        slot = len(parts) > 3 and parts[1] == "state"
        groups.setdefault((parts[0], *parts[3:], repr(value)) if slot else (name,), []).append((name, value))
    return {_for_all(alike[0][0], len(alike)): alike[0][1] for alike in groups.values()}


def _for_all(name: str, number: int) -> str:
    """The name of a row that stands for the same thing of several parameters."""
    parts = name.split("/")
    return "/".join([*parts[:2], f"* ({number} parameters)", *parts[3:]]) if number > 1 else name


def _short(value: Any) -> str:
    if isinstance(value, Ref):
        return "(a tensor)"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text):,} characters)"


# --- verify ---------------------------------------------------------------------------------------


def show_verdict(screen: Screen, path: Place, verdict: VerifyResult, *, seconds: float) -> None:
    """Shows what is damaged, what was checked, and what could not be checked."""
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


def show_difference(screen: Screen, a: Place, b: Place, difference: CheckpointDiff) -> None:
    """Shows every difference in a row, and how much is equal."""
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
    """Rows with those in one that differ in the same way for many parameters.

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
    return [replace(alike[0], name=_for_all(alike[0].name, len(alike))) for alike in groups.values()]


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
