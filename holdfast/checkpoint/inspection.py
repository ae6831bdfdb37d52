"""Inspection: everything that a checkpoint holds but its data, as plain values for ``holdfast ckpt inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from holdfast import codec
from holdfast.checkpoint.pieces import Catalogue, Ref, TensorEntry
from holdfast.checkpoint.places import Place
from holdfast.checkpoint.trees import bytes_of, groups_of, leaves, marks_of, some, step_of
from holdfast.errors import UsageError


def matching(catalogue: Catalogue, pattern: str | None) -> dict[str, TensorEntry]:
    """The tensors whose name, with or without its section, matches a glob like ``*.bias``; all without one.

    Raises ``UsageError`` if none does.
    """
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


def to_json(catalogue: Catalogue, path: Place, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Everything about a checkpoint but its data; of its tensors, only those that are given."""
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
        "frozen_left_out": catalogue.left_out,
        "values": {name: _plain(value) for name, value in values_of(catalogue).items()},
        "groups": {section: _plain(groups) for section, groups in groups_by_section(catalogue).items()},
    }


def _tensor(name: str, entry: TensorEntry, marks: Sequence[str]) -> dict[str, Any]:
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


def groups_by_section(catalogue: Catalogue) -> dict[str, list[dict[str, Any]]]:
    """The groups of each optimizer in a checkpoint, by the section it is saved under."""
    found = ((str(key), groups_of(node)) for key, node in catalogue.tree.items())
    return {key: groups for key, groups in found if groups is not None}


def values_of(catalogue: Catalogue) -> dict[str, Any]:
    """All values of a checkpoint that are not tensors, except the settings of an optimizer's groups, by name."""
    begins = tuple(f"{section}/param_groups/" for section in groups_by_section(catalogue))
    found = leaves(catalogue.tree).items()
    return {name: value for name, value in found if not isinstance(value, Ref) and not name.startswith(begins)}
