"""What ``holdfast ckpt inspect`` shows of a catalogue, for people and for machines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from holdfast import codec
from holdfast.checkpoint.facts import box_text, bytes_of, groups_of, leaves, marks_of, shape_text, some, step_of
from holdfast.checkpoint.pieces import Catalogue, Entry, Ref
from holdfast.errors import UsageError
from holdfast.screen import ROWS, Screen
from holdfast.words import count, ranges_text, size_text, time_text


def matching(catalogue: Catalogue, pattern: str | None) -> dict[str, Entry]:
    """The tensors whose name, with or without its section, a pattern like ``*.bias`` matches."""
    if pattern is None:
        return catalogue.tensors
    found = {
        name: entry
        for name, entry in catalogue.tensors.items()
        if fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2], pattern)
    }
    if not found:
        hint = f"the tensors are {some([*catalogue.tensors])}" if catalogue.tensors else "there are no tensors"
        raise UsageError(f"no tensor is named {pattern}", hint=hint)
    return found


def to_json(catalogue: Catalogue, path: Path, tensors: Mapping[str, Entry]) -> dict[str, Any]:
    """Everything about a checkpoint but its data."""
    marks = marks_of(catalogue)
    return {
        "path": str(path),
        "format": catalogue.format,
        "step": step_of(catalogue),
        "bytes": bytes_of(catalogue),
        "details": _plain(catalogue.details),
        "files": [
            {"name": name, "bytes": file.bytes, "writer": file.writer, "checksums": file.checksums is not None}
            for name, file in catalogue.files.items()
        ],
        "tensors": [_tensor(name, entry, marks.get(name, [])) for name, entry in tensors.items()],
        "tied": catalogue.tied,
        "values": {name: _plain(value) for name, value in _values(catalogue).items()},
        "groups": {section: _plain(groups) for section, groups in _groups(catalogue).items()},
    }


def _tensor(name: str, entry: Entry, marks: Sequence[str]) -> dict[str, Any]:
    return {
        "name": name,
        "shape": [*entry.shape],
        "dtype": codec.dtype_name(entry.dtype),
        "bytes": entry.nbytes,
        "mean": entry.mean,
        "marks": [*marks],
        "pieces": [
            {"file": p.stored.file, "byte": p.stored.offset, "offset": [*p.box.offset], "shape": [*p.box.shape]}
            for p in entry.pieces
        ],
    }


def _plain(value: Any) -> Any:
    return codec.encode(value, lambda other: other.name if isinstance(other, Ref) else repr(other))


def _groups(catalogue: Catalogue) -> dict[str, list[dict[str, Any]]]:
    found = ((str(key), groups_of(node)) for key, node in catalogue.tree.items())
    return {key: groups for key, groups in found if groups is not None}


def _values(catalogue: Catalogue) -> dict[str, Any]:
    """All that is not a tensor, but for the settings of groups."""
    begins = tuple(f"{section}/param_groups/" for section in _groups(catalogue))
    found = leaves(catalogue.tree).items()
    return {name: value for name, value in found if not isinstance(value, Ref) and not name.startswith(begins)}


# --- on a terminal --------------------------------------------------------------------------------


def show(screen: Screen, catalogue: Catalogue, path: Path, pattern: str | None) -> None:
    """Header, files, tensors, values, and what could not be read."""
    tensors = matching(catalogue, pattern)
    numbers = {name: number for number, name in enumerate(catalogue.files)}
    for line in _head(catalogue, path):
        screen.say(line, style="bold" if line.startswith(str(path)) else "")
    screen.say()
    _files(screen, catalogue, numbers)
    if pattern is not None:
        _pieces(screen, catalogue, tensors, numbers)
        return
    _tensors(screen, catalogue, numbers)
    _show_values(screen, catalogue)
    for sentence in catalogue.details.get("left_out", ()):
        screen.say(f"not read: {sentence}", style="yellow")


def _head(catalogue: Catalogue, path: Path) -> Iterator[str]:
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
    others = [f"{key} {value}" for key, value in details.items() if key != "left_out"]
    if others:
        yield ", ".join(others)


def _files(screen: Screen, catalogue: Catalogue, numbers: Mapping[str, int]) -> None:
    rows = [
        [str(numbers[name]), name, size_text(file.bytes), file.writer, "yes" if file.checksums else ""]
        for name, file in catalogue.files.items()
    ]
    screen.table([">#", "file~", ">size", "written by~", "checksums?"], rows)


def _tensors(screen: Screen, catalogue: Catalogue, numbers: Mapping[str, int]) -> None:
    marks = marks_of(catalogue)
    sections: dict[str, dict[str, Entry]] = {}
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


def _row(name: str, entry: Entry, section: str, marks: Sequence[str], numbers: Mapping[str, int]) -> list[str]:
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


def _pieces(screen: Screen, catalogue: Catalogue, tensors: Mapping[str, Entry], numbers: Mapping[str, int]) -> None:
    """Where every piece of some tensors lies, and who wrote it."""
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


def _show_values(screen: Screen, catalogue: Catalogue) -> None:
    rows = [[name, _short(value)] for name, value in _together(_values(catalogue)).items()]
    for section, groups in _groups(catalogue).items():
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
    """What an optimizer keeps as a plain value for each parameter is one row where it is the same for all.

    >>> _together({"optimizer/state/a/step": 3, "optimizer/state/b/step": 3, "step": 3})
    {'optimizer/state/* (2 parameters)/step': 3, 'step': 3}
    """
    groups: dict[tuple[str, ...], list[tuple[str, Any]]] = {}
    for name, value in values.items():
        parts = name.split("/")
        slot = len(parts) > 3 and parts[1] == "state"
        groups.setdefault((parts[0], *parts[3:], repr(value)) if slot else (name,), []).append((name, value))
    made = {}
    for alike in groups.values():
        name, value = alike[0]
        parts = name.split("/")
        many = [*parts[:2], f"* ({len(alike)} parameters)", *parts[3:]]
        made["/".join(many) if len(alike) > 1 else name] = value
    return made


def _short(value: Any) -> str:
    if isinstance(value, Ref):
        return "(a tensor)"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text):,} characters)"
