"""Reads a checkpoint that has one file for each place of a layout; only rules can put it together.

``rank{tp}.pt`` or ``stage{pp}/shard{tp}.safetensors``: a word in braces is an axis, and stands for a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from holdfast.checkpoint.formats import hf, torchsave
from holdfast.checkpoint.pieces import Catalogue, DataFile, Piece, TensorEntry
from holdfast.checkpoint.rules import Fragment, Rules, merge
from holdfast.checkpoint.rules.renaming import rename_tree
from holdfast.checkpoint.trees import merge_trees
from holdfast.errors import CheckpointError, UsageError

_AXIS = re.compile(r"\{([a-z]+)\}")


def recognise(path: Path) -> bool:
    """Whether a path has axes in braces."""
    return _AXIS.search(str(path)) is not None and not path.exists()


def open(path: Path, rules: Rules | None = None) -> Catalogue:
    """The catalogue of all files that fit the path, put together by the rules.

    Raises ``UsageError`` without rules, ``CheckpointError`` if no file fits.
    """
    if rules is None:
        raise UsageError(f"{path} has a file for each place; only rules can put them together", hint="rules=Rules(...)")
    root = Path(*path.parts[: _fixed(path)])
    opened = [(place, _below(root, file)) for place, file in _found(path, root)]
    fragments = [
        Fragment(name=name, shape=entry.shape, dtype=entry.dtype, place=place, holder=holder, stored=entry)
        for holder, (place, catalogue) in enumerate(opened)
        for name, entry in catalogue.tensors.items()
    ]
    tensors = merge(fragments, rules)
    names = {name: target.name for name, target in rules.targets(f.name for f in fragments).items()}
    return Catalogue(
        format=f"fragments of {opened[0][1].format}",
        root=root,
        tensors=tensors,
        tree=rename_tree(merge_trees([catalogue.tree for _, catalogue in opened]), names),
        files={name: file for _, catalogue in opened for name, file in catalogue.files.items()},
    )


def _fixed(path: Path) -> int:
    """The number of parts of a path before the first with an axis."""
    return next(number for number, part in enumerate(path.parts) if _AXIS.search(part))


def _found(path: Path, root: Path) -> list[tuple[Mapping[str, int], Path]]:
    pattern = path.relative_to(root).as_posix()
    axes = _AXIS.findall(pattern)
    if len(set(axes)) != len(axes):
        raise UsageError(f"{path} names an axis twice")
    regex = re.compile(_AXIS.sub(r"(\\d+)", re.escape(pattern).replace(r"\{", "{").replace(r"\}", "}")))
    files: list[tuple[Mapping[str, int], Path]] = [
        ({axis: int(number) for axis, number in zip(axes, match.groups(), strict=True)}, file)
        for file in sorted(root.glob(_AXIS.sub("*", pattern)))
        if (match := regex.fullmatch(file.relative_to(root).as_posix()))
    ]
    if not files:
        raise CheckpointError(f"no file fits {path}", hint="a word in braces stands for a number")
    return files


def _below(root: Path, file: Path) -> Catalogue:
    """A file's catalogue, with files named relative to ``root``."""
    module: ModuleType = hf if file.suffix == ".safetensors" else torchsave
    catalogue: Catalogue = module.open(file)
    folder = catalogue.root

    def moved(name: str) -> str:
        return (folder / name).relative_to(root).as_posix()

    def entry(one: TensorEntry) -> TensorEntry:
        pieces = (Piece(box=p.box, stored=replace(p.stored, file=moved(p.stored.file))) for p in one.pieces)
        return replace(one, pieces=tuple(pieces))

    files: dict[str, DataFile] = {moved(name): known for name, known in catalogue.files.items()}
    return replace(catalogue, root=root, files=files, tensors={n: entry(e) for n, e in catalogue.tensors.items()})
