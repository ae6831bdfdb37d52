"""Checks every byte of a checkpoint, and lists everything that is wrong with it, not only the first error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from holdfast.checkpoint import index, series
from holdfast.checkpoint.coverage import gaps, overlaps
from holdfast.checkpoint.disk import (
    BLOCK,
    BUFFERS,
    THREADS,
    Progress,
    blocks_of,
    checksum,
    in_parallel,
    pass_cache,
    read_exactly,
    silent,
)
from holdfast.checkpoint.formats import open_checkpoint
from holdfast.checkpoint.formats.zip_records import Unreadable, Zone, crc_of, zones_of
from holdfast.checkpoint.inside import open_regular
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Piece, entry_of
from holdfast.checkpoint.places import Place, Remote
from holdfast.checkpoint.tensor_reader import read_range
from holdfast.checkpoint.trees import box_text, bytes_of, some
from holdfast.errors import CheckpointError, HoldfastError


@dataclass(frozen=True, kw_only=True, order=True)
class Damage:
    """A damaged place: bytes [start, stop) of a file, what is wrong, and the tensors that lie there."""

    file: str
    start: int = 0
    stop: int = 0
    what: str
    tensors: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {**vars(self), "tensors": [*self.tensors]}


@dataclass(kw_only=True)
class VerifyResult:
    """The result of a check.

    ``bytes`` were read; ``checked`` counts blocks, records and copies that were compared; ``unchecked`` says in words
    what has no checksum.
    """

    damaged: list[Damage] = field(default_factory=list)
    bytes: int = 0
    checked: dict[str, int] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return not self.damaged

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        shown = {"ok": self.ok, "bytes": self.bytes, "checked": self.checked, "unchecked": self.unchecked}
        return {**shown, "damaged": [one.to_json() for one in self.damaged]}


def open_to_verify(path: Place, open: Callable[[], Catalogue] | None = None) -> Catalogue:
    """Opens a checkpoint as ``open_checkpoint`` does, but leaves missing and short data files to :func:`verify`.

    ``open`` replaces ``open_checkpoint(path)``. Raises ``CheckpointError`` if the index itself is damaged.
    """
    try:
        return open() if open is not None else open_checkpoint(path)
    except CheckpointError as error:
        place = series.newest(path) or path
        if not index.recognise(place):
            raise
        try:
            catalogue = index.read(place)
        except HoldfastError:
            raise error from None  # it is the index itself that is damaged
        if any(len(file.checksums or ()) != len(blocks_of(file.bytes)) for file in catalogue.files.values()):
            raise
        return catalogue


def work_of(catalogue: Catalogue) -> int:
    """The number of bytes that :func:`verify` will read."""
    twice = sum(2 * box.numel * a.stored.dtype.itemsize for _, a, _, box in _all_copies(catalogue))
    return bytes_of(catalogue) + twice


def verify(catalogue: Catalogue, *, progress: Progress = silent, threads: int = THREADS) -> VerifyResult:
    """Checks a checkpoint: reads everything once, and pieces that must be equal once more.

    ``progress`` is called with the bytes read. Damage is in the result, not an error.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from holdfast.checkpoint import save
    >>> folder = Path(tempfile.mkdtemp())
    >>> save(folder, {"weight": torch.ones(3)})
    >>> verify(open_to_verify(folder)).ok
    True
    """
    check = _Check(catalogue, progress, threads)
    check.coverage()
    check.files()
    check.copies()
    check.verdict.damaged.sort()
    return check.verdict


class _Check:
    """One check of a catalogue, while it goes on."""

    def __init__(self, catalogue: Catalogue, progress: Progress, threads: int) -> None:
        self.catalogue = catalogue
        self.progress = progress
        self.threads = threads
        self.verdict = VerifyResult()
        self._lock = threading.Lock()
        self._places = _places(catalogue)
        self._unchecked: dict[str, list[str]] = {}

    def coverage(self) -> None:
        """Notes elements of tensors that no piece holds."""
        for name, entry in self.catalogue.tensors.items():
            for gap in gaps(entry):
                self._damaged("", what=f"no file holds {box_text(gap)} of {name}", tensors=[name])

    def files(self) -> None:
        """Reads every file, block by block (ours) or record by record (zips)."""
        work = [(name, zone) for name, file in self.catalogue.files.items() for zone in self._zones_of(name, file)]
        in_parallel(lambda item: self._zone(*item), work, self.threads)
        for reason, names in self._unchecked.items():
            self.verdict.unchecked.append(f"{some(names)}: {reason}")

    def copies(self) -> None:
        """Compares pieces that hold the same elements."""
        pairs = [*_all_copies(self.catalogue)]
        in_parallel(lambda pair: self._compare(*pair), pairs, self.threads)
        self._checked("copy", len(pairs))

    # --- files ---

    def _zones_of(self, name: str, file: DataFile) -> list[Zone]:
        """The zones of a file to read, after a look at its length."""
        try:
            with self._opened(name) as fd:
                actual = fd.stat().st_size if isinstance(fd, Remote) else os.fstat(fd).st_size
                self._length(name, file, actual)
                return self._blocks(file, actual) if file.checksums is not None else self._records(name, file, fd)
        except (Unreadable, OSError, CheckpointError) as error:
            self._damaged(name, 0, file.bytes, f"cannot be read: {_said(error)}")
            return []

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | Remote]:
        """Opens a file only while it is read: a checkpoint may have more files than a process may open."""
        path = self.catalogue.root / name
        if isinstance(path, Remote):
            yield path
            return
        ours = self.catalogue.files[name].checksums is not None
        fd = open_regular(path)
        try:
            if ours:
                pass_cache(fd)
            yield fd
        finally:
            os.close(fd)

    def _length(self, name: str, file: DataFile, actual: int) -> None:
        if actual < file.bytes:
            sure = actual if file.checksums is None else actual // BLOCK * BLOCK  # half a block cannot be checked
            self._damaged(name, sure, file.bytes, f"ends at byte {actual:,}, it was written with {file.bytes:,}")
        elif actual > file.bytes:
            self._damaged(name, file.bytes, actual, f"is {actual - file.bytes:,} bytes longer than it was written")

    def _blocks(self, file: DataFile, actual: int) -> list[Zone]:
        ends = {at: min(at + BLOCK, file.bytes) for at in blocks_of(file.bytes)}
        return [Zone(start=start, stop=stop) for start, stop in ends.items() if stop <= actual]

    def _records(self, name: str, file: DataFile, fd: int | Remote) -> list[Zone]:
        assert isinstance(fd, int)  # in a store there are only files of ours, which have checksums
        zones = zones_of(fd, file.bytes)
        if any(zone.crc is None for zone in zones):
            reason = "read to the end, but the file has no checksums"
            if any(zone.name for zone in zones):
                reason = "read to the end, but torch was told to leave checksums out"
            self._unchecked.setdefault(reason, []).append(name)
        return zones

    def _zone(self, name: str, zone: Zone) -> None:
        sums = self.catalogue.files[name].checksums
        try:
            with self._opened(name) as fd:
                if sums is None:
                    self._record(name, fd, zone)
                else:
                    self._block(name, fd, zone, sums[zone.start // BLOCK])
        except (OSError, Unreadable, HoldfastError) as error:
            self._damaged(name, zone.start, zone.stop, f"cannot be read: {_said(error)}")

    def _block(self, name: str, fd: int | Remote, zone: Zone, expected: str) -> None:
        with BUFFERS.lend(BLOCK) as buffer:
            read_exactly(fd, buffer, zone.start, zone.stop, self.catalogue.root / name)
            same = checksum(buffer[: zone.stop - zone.start]) == expected
        if not same:
            self._damaged(name, zone.start, zone.stop, "does not match its checksum")
        self._checked("block", 1)
        self._read(zone.stop - zone.start)

    def _record(self, name: str, fd: int | Remote, zone: Zone) -> None:
        assert isinstance(fd, int)
        crc = 0
        for done, crc in crc_of(fd, zone):  # noqa: B007
            self._read(done)
        if zone.crc is not None:
            if crc != zone.crc:
                self._damaged(name, zone.start, zone.stop, f"record {zone.name} does not match its CRC")
            self._checked("record", 1)

    # --- copies ---

    def _compare(self, name: str, a: Piece, b: Piece, box: Box) -> None:
        """Compares a box in two pieces of a tensor, as if each piece were a tensor of its own."""
        parts = [piece.stored.part(box.relative_to(piece.box)) for piece in (a, b)]
        pair = replace(self.catalogue, tensors={side: entry_of(part) for side, part in zip("ab", parts, strict=True)})
        size = parts[0].dtype.itemsize
        step = BLOCK // size
        differing = 0
        with BUFFERS.lend(BLOCK) as left, BUFFERS.lend(BLOCK) as right:
            for start in range(0, box.numel, step):
                stop = min(start + step, box.numel)
                used = (stop - start) * size
                try:
                    read_range(pair, "a", start, stop, left[:used])
                    read_range(pair, "b", start, stop, right[:used])
                except CheckpointError:
                    return  # the file is damaged, which has been noted already
                unlike = np.not_equal(left[:used], right[:used]).reshape(-1, size).any(axis=1)
                differing += int(unlike.sum())
                self.progress(2 * used)
        if differing:
            both = " and ".join(dict.fromkeys(part.file for part in parts))
            what = f"{differing:,} of {box.numel:,} elements differ between copies in {both}"
            self._damaged(parts[1].file, parts[1].offset, parts[1].offset + parts[1].span, what, [name])

    # --- notes ---

    def _damaged(self, file: str, start: int = 0, stop: int = 0, what: str = "", tensors: Iterable[str] = ()) -> None:
        names = dict.fromkeys(tensors) or dict.fromkeys(
            name for a, b, name in self._places.get(file, ()) if a < stop and b > start
        )
        with self._lock:
            self.verdict.damaged.append(Damage(file=file, start=start, stop=stop, what=what, tensors=tuple(names)))

    def _checked(self, what: str, number: int) -> None:
        with self._lock:
            if number:
                self.verdict.checked[what] = self.verdict.checked.get(what, 0) + number

    def _read(self, done: int) -> None:
        with self._lock:
            self.verdict.bytes += done
        self.progress(done)


def _said(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _places(catalogue: Catalogue) -> Mapping[str, list[tuple[int, int, str]]]:
    """For each file, (start, stop, tensor) of the bytes that belong to tensors."""
    places: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in catalogue.tensors.items():
        for piece in entry.pieces:
            stored = piece.stored
            places.setdefault(stored.file, []).append((stored.offset, stored.offset + stored.span, name))
    return places


def _all_copies(catalogue: Catalogue) -> Iterator[tuple[str, Piece, Piece, Box]]:
    for name, entry in catalogue.tensors.items():
        for a, b, box in overlaps(entry):
            yield name, a, b, box
