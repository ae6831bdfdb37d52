"""Checks files of other formats by the CRC that a zip has of each of its records.

A file of torch.save is a zip, one of DCP is many zips, one behind the other. Safetensors files have no checksums;
their headers are checked whenever they are opened.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, cast

from holdfast.checkpoint.disk import BLOCK
from holdfast.checkpoint.formats.archive import ZIP, ZIP_HEADER, Window, header_length

_LISTED = 46  # bytes that a record takes in a zip's directory, at least


@dataclass(frozen=True, kw_only=True)
class Zone:
    """Bytes [start, stop) of a file: a record with its checksum, or bytes that have none."""

    start: int
    stop: int
    name: str = ""
    crc: int | None = None


class Unreadable(Exception):
    """An error: a file does not have the structure that it should have. Says where."""


def zones_of(fd: int, size: int) -> list[Zone]:
    """The zones of a file that cover all its data: the records of zips, or blocks without a checksum."""
    if os.pread(fd, 4, 0) == ZIP:
        zones = [*_zipped(fd, size)]
        for before, zone in pairwise(sorted(zones, key=lambda zone: zone.start)):
            if zone.start < before.stop:
                raise Unreadable(f"records {before.name} and {zone.name} share bytes, at {zone.start}")
        return zones
    return [Zone(start=at, stop=min(at + BLOCK, size)) for at in range(0, size, BLOCK)]


def _zipped(fd: int, end: int) -> Iterator[Zone]:
    """The records of all zips in a file, the last zip first: a zip says at its end where it begins."""
    room = end // _LISTED
    while end > 0:
        window = cast(BinaryIO, io.BufferedReader(Window(fd, start=0, length=end)))
        try:
            infos = zipfile.ZipFile(window).infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
            raise Unreadable(f"no zip ends at byte {end}: {error}") from error
        room -= len(infos)
        if room < 0:
            raise Unreadable("its zips list more records than there is room for")
        # torch can be told to leave checksums out, and then writes zeros.
        known = any(info.CRC for info in infos if info.file_size)
        for info in infos:
            yield _record(fd, info, known)
        start = min((info.header_offset for info in infos), default=0)
        if not 0 <= start < end:
            raise Unreadable(f"the zip that ends at byte {end} has no beginning")
        end = start


def _record(fd: int, info: zipfile.ZipInfo, known: bool) -> Zone:
    skip = header_length(os.pread(fd, ZIP_HEADER, info.header_offset))
    if skip is None:
        raise Unreadable(f"record {info.filename} has no header at byte {info.header_offset}")
    start = info.header_offset + skip
    plain = info.compress_type == zipfile.ZIP_STORED
    return Zone(
        start=start, stop=start + info.compress_size, name=info.filename, crc=info.CRC if known and plain else None
    )


def crc_of(fd: int, zone: Zone) -> Iterator[tuple[int, int]]:
    """Reads a zone block by block; gives each block's length and the CRC of all bytes so far."""
    crc, at = 0, zone.start
    while at < zone.stop:
        data = os.pread(fd, min(BLOCK, zone.stop - at), at)
        if not data:
            raise Unreadable(f"it ends at byte {at}, but its data goes on to {zone.stop}")
        crc, at = zlib.crc32(data, crc), at + len(data)
        yield len(data), crc
