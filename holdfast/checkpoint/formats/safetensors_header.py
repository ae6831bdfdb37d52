"""Reads the header of a safetensors file: which arrays lie where. Every number in it is checked."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.formats.pickled import PickleFile
from holdfast.checkpoint.formats.rebuild import is_possible
from holdfast.checkpoint.pieces import Stored, dense
from holdfast.checkpoint.safetensors_writer import BY_NAME
from holdfast.errors import CheckpointError

_LIMIT = 100_000_000  # bytes of a header, as in safetensors itself


@dataclass(kw_only=True)
class Header:
    """The arrays of a file, and the texts in its header's ``__metadata__``."""

    arrays: dict[str, Stored] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def read_header(source: PickleFile, *, offset: int = 0) -> Header:
    """Reads the header at ``offset`` of a file, whose arrays go on to its end; ``CheckpointError`` if it is damaged."""
    where = f"{source.path} at byte {offset}" if offset else str(source.path)
    with source.window(offset, source.bytes - offset) as stream:
        size = int.from_bytes(stream.read(8), "little")
        if source.bytes - offset < 8 or size > min(_LIMIT, source.bytes - offset - 8):
            raise CheckpointError(f"{where} is cut off, or no safetensors file", hint="copy it again")
        text = stream.read(size)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        metadata = header.pop("__metadata__", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} has no readable header: {error}", hint="copy it again") from error
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{where} has no readable header: its metadata is not a dict of texts")
    start = offset + 8 + size
    found = {name: _array(name, item, source, start, where) for name, item in header.items()}
    _check_order(found, start, source, where)
    return Header(arrays=found, metadata=metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:200]} is there twice")
    return made


def _array(name: str, item: Any, source: PickleFile, start: int, where: str) -> Stored:
    try:
        kind, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: the header's entry of {name} is damaged") from error
    if not isinstance(kind, str) or kind not in BY_NAME:
        raise CheckpointError(f"{where}: {name} has dtype {kind}, which torch does not know")
    dtype = BY_NAME[kind]
    numbers = (*shape, begin, end)
    sound = all(type(n) is int and n >= 0 for n in numbers) and is_possible(shape)
    if not sound or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{where}: {name} of shape {shape} and dtype {kind} cannot be bytes {begin} to {end}")
    if start + end > source.bytes:
        raise CheckpointError(f"{where} is cut off inside {name}", hint="copy it again")
    return dense(file=source.name, offset=start + begin, dtype=dtype, shape=shape)


def _check_order(arrays: dict[str, Stored], start: int, source: PickleFile, where: str) -> None:
    """Refuses arrays that leave gaps, overlap, or do not end with the file."""
    at = start
    for name, stored in sorted(arrays.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != at:
            what = "overlaps what is before it" if stored.offset < at else "is behind a gap"
            raise CheckpointError(f"{where}: {name} {what}", hint="the header is damaged")
        at += stored.nbytes
    if at != source.bytes:
        raise CheckpointError(f"{where} is {source.bytes - at} bytes longer than its arrays", hint="copy it again")
