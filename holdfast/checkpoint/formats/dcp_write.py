"""Writes folders that ``torch.distributed.checkpoint.load`` reads, on any number of ranks.

torch's own writer keeps every tensor of a file in memory until the file is complete, so the files are written
here, a few megabytes at a time; the table consists of torch's own classes.
"""

from __future__ import annotations

import math
import os
import pickle
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.checkpoint.disk import Bytes, Progress, explained, silent
from holdfast.checkpoint.formats import torchsave
from holdfast.checkpoint.formats.output import appearing, array, with_arrays, without_numpy
from holdfast.checkpoint.pieces import Catalogue, Ref
from holdfast.checkpoint.safetensors_writer import Array
from holdfast.errors import CheckpointError

_FILE = "__0_0.distcp"
# Ends the name of an empty dict. Under its plain name, torch would take the table for one of torch 2.3, which kept
# dicts of values whole, and would look for all other dicts under plain names, too.
_EMPTY = ".<empty>"
PART = 256 << 20  # bytes: a loading rank has to hold a whole part in memory, even if it needs one row
Keys = tuple[str | int, ...]


def write(catalogue: Catalogue, path: Path, *, progress: Progress = silent) -> None:
    """Writes a folder of one data file and its table."""
    tree = without_numpy(catalogue.tree)
    table = _TableWriter()
    with appearing(path) as folder, explained(folder, "write"):
        folder.mkdir()
        with (folder / _FILE).open("xb") as stream:
            for keys, value in _leaves(tree, ()):
                table.add(keys, value, catalogue, stream, progress)
            _sync(stream)
        with (folder / ".metadata").open("xb") as stream:
            pickle.dump(table.finished(path), stream)
            _sync(stream)


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _leaves(node: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    """The items that DCP saves one by one: values in dicts, and in lists that hold dicts or tensors somewhere.

    An empty dict is an item, too (see _EMPTY); torch's own writer drops it.
    """
    if isinstance(node, dict) and (node or not path):
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(node, list) and _is_taken_apart(node):
        for place, value in enumerate(node):
            yield from _leaves(value, (*path, place))
    else:
        yield path, node


def _is_taken_apart(node: Any) -> bool:
    if isinstance(node, list):
        return any(_is_taken_apart(value) for value in node)
    return isinstance(node, dict | Ref)


@dataclass
class _TableWriter:
    """The table while the data file grows. A tensor that has several names is written once."""

    items: dict[str, Any] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    paths: dict[str, Keys] = field(default_factory=dict)
    written: dict[str, list[_StorageInfo]] = field(default_factory=dict)

    def add(self, path: Keys, value: Any, catalogue: Catalogue, stream: BinaryIO, progress: Progress) -> None:
        """Appends a value to the data file and lists it."""
        name = ".".join(map(str, path)) + (_EMPTY if isinstance(value, dict) else "")
        if name in self.items:
            hint = "DCP joins names with dots; rename one of them"
            raise CheckpointError(f"{catalogue.root}: two items would be called {name}", hint=hint)
        self.paths[name] = path
        if not isinstance(value, Ref):
            self.items[name] = BytesStorageMetadata()
            self.places[MetadataIndex(name)] = _saved(with_arrays(catalogue, value), stream, progress)
            return
        whole = array(catalogue, value.name)
        parts = list(_parts(whole))
        if value.name not in self.written:
            self.written[value.name] = [_saved(part, stream, progress) for _, part in parts]
        chunks = [ChunkStorageMetadata(offsets=torch.Size(o), sizes=torch.Size(part.shape)) for o, part in parts]
        properties = TensorProperties(dtype=whole.dtype)
        self.items[name] = TensorStorageMetadata(properties=properties, size=torch.Size(whole.shape), chunks=chunks)
        for number, ((offset, _), place) in enumerate(zip(parts, self.written[value.name], strict=True)):
            self.places[MetadataIndex(name, offset, number)] = place

    def finished(self, path: Path) -> Metadata:
        """The table as torch pickles it."""
        return Metadata(
            state_dict_metadata=self.items,
            planner_data=self.paths,
            storage_data=self.places,
            storage_meta=StorageMeta(checkpoint_id=str(path), save_id=str(uuid.uuid4())),
            version=CURRENT_DCP_VERSION,
        )


def _saved(value: Any, stream: BinaryIO, progress: Progress) -> _StorageInfo:
    start = stream.tell()
    torchsave.save(value, stream, progress=progress)
    return _StorageInfo(relative_path=_FILE, offset=start, length=stream.tell() - start)


def _parts(whole: Array) -> Iterator[tuple[tuple[int, ...], Array]]:
    """An array in parts of some rows, each with the offset of its first row."""
    if whole.nbytes <= PART:
        yield (0,) * len(whole.shape), whole
        return
    row = math.prod(whole.shape[1:]) * whole.dtype.itemsize
    rows = max(PART // row, 1)
    for first in range(0, whole.shape[0], rows):
        count = min(rows, whole.shape[0] - first)

        def fill(start: int, stop: int, out: Bytes, skip: int = first * row) -> None:
            whole.fill(skip + start, skip + stop, out)

        part = Array(name=whole.name, dtype=whole.dtype, shape=(count, *whole.shape[1:]), fill=fill)
        yield (first, *(0,) * (len(whole.shape) - 1)), part
