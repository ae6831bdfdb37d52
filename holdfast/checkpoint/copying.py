"""Copies a complete checkpoint into an object store, as it is: the same files, and the same index last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint import index
from holdfast.checkpoint.disk import Bytes, discard, explained, make_folder, read_exactly, write_blocks
from holdfast.checkpoint.inside import open_regular, read_begin
from holdfast.checkpoint.pieces import DataFile
from holdfast.checkpoint.places import Remote
from holdfast.checkpoint.shared_files import is_shared
from holdfast.errors import CheckpointError


def copy_to_store(source: Path, target: Remote, *, guard: Callable[[], object] = lambda: None) -> int:
    """Copy a checkpoint of our format; return the bytes written. A copy that is there already is left alone.

    ``guard`` raises if this process may not write there any more. Raises ``CheckpointError`` if a byte of the source is
    damaged, or the store refuses; then the copy does not exist.
    """
    catalogue = index.open(source)
    with explained(source / index.NAME, "read"):
        text = read_begin(source / index.NAME, -1)
    with explained(target, "write"):
        make_folder(target)
        before = index.version_in(target)
        if before and read_begin(target / index.NAME, -1) == text:
            return 0
    written = 0
    for name, file in catalogue.files.items():
        if not (is_shared(name) and _is_there(target / name, file)):
            _copy_file(source / name, target / name, file)
            written += file.bytes
    guard()
    with explained(target / index.NAME, "write"):
        made = (target / index.NAME).replace(text, before) if before else (target / index.NAME).create(text)
    if not made:
        raise CheckpointError(f"somebody else has saved {target} at the same moment: it is not replaced")
    index.clean(target, keep=catalogue.files)
    return written


def _is_there(place: Remote, file: DataFile) -> bool:
    """Whether shared weights have been copied with another checkpoint: names of files are never used twice."""
    with explained(place, "read"):
        try:
            return place.stat().st_size == file.bytes
        except FileNotFoundError:
            return False


def _copy_file(source: Path, target: Remote, file: DataFile) -> None:
    with explained(source, "read"):
        fd = open_regular(source)
    try:

        def fill(start: int, stop: int, buffer: Bytes) -> Bytes:
            read_exactly(fd, buffer, start, stop, source)
            return buffer

        sums = write_blocks(target, file.bytes, fill, threads=1)
    finally:
        os.close(fd)
    if sums != file.checksums:
        discard([target])
        raise CheckpointError(f"{source} is damaged: it is not copied", hint="holdfast ckpt verify names the place")
