"""Finds where the parts of a ``torch.save`` stream lie, in the new form (zip) or the old, without reading a tensor.

Both kinds store tensors uncompressed, so a storage is a range of bytes of the file.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from holdfast.errors import CheckpointError

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the first thing pickled in a file of the old form
DAMAGED = "it may be damaged; copy it again"


ZIP = b"PK\x03\x04"  # begins each record of a zip
ZIP_HEADER = 30  # bytes of a record's header before its name


def header_length(begin: bytes) -> int | None:
    """The length of a zip record's header, name and extra field, from its first 30 bytes; None if it is no header.

    The zip's directory has these lengths, too, but those of the header may differ, and these count.
    """
    if len(begin) < ZIP_HEADER or begin[:4] != ZIP:
        return None
    return ZIP_HEADER + int.from_bytes(begin[26:28], "little") + int.from_bytes(begin[28:30], "little")


class Window(io.RawIOBase):
    """Some bytes of an open file, as a read-only file of their own.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(b"0123456789")
    ...     file.flush()
    ...     Window(file.fileno(), start=2, length=5).read()
    b'23456'
    """

    def __init__(self, fd: int, *, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._at = fd, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._length - self._at))
        data = os.pread(self._fd, wanted, self._start + self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageSpan:
    """A range of bytes in the file (not in the window)."""

    offset: int
    length: int


class Archive:
    """The records of a torch.save zip; ``where`` names the file in errors."""

    def __init__(self, stream: BinaryIO, *, start: int, length: int, where: str) -> None:
        self._stream, self._start, self._length, self._where = stream, start, length, where
        try:
            infos = zipfile.ZipFile(stream).infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{where} is cut off or damaged: {error}", hint="copy it again") from error
        self._records = {info.filename: info for info in infos}
        self._spans: dict[str, StorageSpan] = {}  # a pickle may ask for one record again and again
        if len(self._records) < len(infos):
            raise CheckpointError(f"{where} has two records of the same name", hint=DAMAGED)
        pickles = [name for name in self._records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{where} is a zip, but not one of torch.save: no data.pkl")
        self._prefix = pickles[0].removesuffix("data.pkl")
        if "byteorder" in self and (order := self.read("byteorder")) != b"little":
            raise CheckpointError(f"{where} has byte order {order!r}", hint="only little-endian files are read")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._records

    def span(self, name: str) -> StorageSpan:
        """The bytes of a record in the file; ``CheckpointError`` if it is not there, compressed or cut off."""
        if name not in self._spans:
            self._spans[name] = self._find(name)
        return self._spans[name]

    def _find(self, name: str) -> StorageSpan:
        info = self._records.get(self._prefix + name)
        if info is None:
            raise CheckpointError(f"{self._where} has no record {name[:200]}", hint=DAMAGED)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError(
                f"{self._where}: record {name} is compressed or encrypted", hint="unpack and zip it -0"
            )
        skip = header_length(self._bytes(info.header_offset, ZIP_HEADER))
        if skip is None:
            raise CheckpointError(f"{self._where}: record {name} has no header", hint=DAMAGED)
        offset = info.header_offset + skip
        if offset + info.file_size > self._length:
            raise CheckpointError(f"{self._where} is cut off inside record {name}", hint="copy it again")
        return StorageSpan(offset=self._start + offset, length=info.file_size)

    def read(self, name: str) -> bytes:
        """The bytes of a record; ``CheckpointError`` for a wrong checksum, unless torch was told to compute none."""
        span = self.span(name)
        data = self._bytes(span.offset - self._start, span.length)
        if not self._matches(name, data) and "version" in self:
            version = self.span("version")
            if self._matches("version", self._bytes(version.offset - self._start, version.length)):
                raise CheckpointError(f"{self._where}: record {name} does not match its checksum", hint="copy it again")
        return data

    def _matches(self, name: str, data: bytes) -> bool:
        return zlib.crc32(data) == self._records[self._prefix + name].CRC

    def _bytes(self, offset: int, length: int) -> bytes:
        self._stream.seek(offset)
        return self._stream.read(length)


def legacy_spans(
    stream: BinaryIO, keys: Any, itemsizes: Mapping[str, int], *, start: int, length: int, where: str
) -> Callable[[str], StorageSpan]:
    """A function from a storage's key to its bytes, for a torch.save file of the old form.

    There the storages lie behind the pickles, each after its count of elements; ``stream`` stands before the first.
    """
    spans: dict[str, StorageSpan] = {}
    at = stream.tell()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError(f"{where} does not list its storages", hint=DAMAGED)
    for key in keys:
        if key not in itemsizes:
            raise CheckpointError(f"{where}: storage {key!r} is in no tensor", hint=DAMAGED)
        stream.seek(at)
        size = int.from_bytes(stream.read(8), "little") * itemsizes[key]
        if at + 8 + size > length:
            raise CheckpointError(f"{where} is cut off inside storage {key}", hint="copy it again")
        spans[key] = StorageSpan(offset=start + at + 8, length=size)
        at += 8 + size

    def locate(key: str) -> StorageSpan:
        if key not in spans:
            raise CheckpointError(f"{where} has no storage {key}", hint=DAMAGED)
        return spans[key]

    return locate
