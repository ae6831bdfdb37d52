"""Collects the files of a foreign checkpoint: those that were read to open it, and those with its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.checkpoint.pieces import DataFile, TensorEntry
from holdfast.errors import CheckpointError


def files_of(root: Path, tensors: Mapping[str, TensorEntry], read: Iterable[str] = ()) -> dict[str, DataFile]:
    """The files that were read and those with tensors; ``CheckpointError`` if one is missing or too short."""
    sizes: dict[str, DataFile] = {}

    def find(file: str, holds: str) -> None:
        if file not in sizes:
            try:
                sizes[file] = DataFile(bytes=(root / file).stat().st_size)
            except OSError as error:
                reason = f"{root / file}{holds} is missing: {error.strerror}"
                raise CheckpointError(reason, hint="copy the whole checkpoint") from error

    for file in read:
        find(file, "")
    for name, entry in tensors.items():
        for piece in entry.pieces:
            stored = piece.stored
            find(stored.file, f", which holds {name},")
            if stored.offset + stored.span > sizes[stored.file].bytes:
                reason = f"{root / stored.file} is too short to hold {name}"
                raise CheckpointError(reason, hint="it was cut off; copy it again")
    return sizes


def pointer_of(root: Path, path: Path, name: str) -> list[str]:
    """The pointer file ``name`` that led from ``path`` to a checkpoint's folder, relative to that; none if none did.

    >>> pointer_of(Path("run/tag"), Path("run/tag"), "latest")
    []
    """
    if path == root or not (path / name).is_file():
        return []
    inside = root / ".." / name  # another file, if the folder is a link
    same = inside.exists() and inside.samefile(path / name)
    return [f"../{name}" if same else str((path / name).absolute())]
