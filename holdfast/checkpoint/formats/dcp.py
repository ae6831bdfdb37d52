"""Folders of ``torch.distributed.checkpoint`` (DCP): a pickled table, and files full of small ``torch.save`` streams.

The table says which box of which tensor is at which bytes of which file; each box is a zip of its own there, whose
directory tells where the data lies. Nothing else is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from holdfast.checkpoint.coverage import check_tiling
from holdfast.checkpoint.formats import dcp_write, pickled
from holdfast.checkpoint.formats.archive import ZIP
from holdfast.checkpoint.formats.canonical import assemble
from holdfast.checkpoint.formats.pickled import Foreign, PickleFile
from holdfast.checkpoint.formats.safetensors_header import Header, read_header
from holdfast.checkpoint.pieces import Box, Catalogue, Piece, Shape, Stored, TensorEntry
from holdfast.errors import CheckpointError

NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_CLASSES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((_METADATA, name) for name in ("Metadata", "StorageMeta", "MetadataIndex", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    (_METADATA, "TensorProperties"),
    # Megatron leaves its save plans in the table; nothing of them is used.
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "TensorWriteData", "WriteItemType")),
}
_INCOMPLETE = "the checkpoint is incomplete or damaged; copy it again, or load an older one"

write = dcp_write.write


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRange:
    """Some bytes of a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(kw_only=True)
class Logical:
    """A tensor as the table describes it: the boxes that it is saved in."""

    shape: Shape
    dtype: torch.dtype
    boxes: list[Box]


@dataclass(kw_only=True)
class DcpTable:
    """The table in ``.metadata``: tensors and objects (None) by their flat names, and where each part is.

    ``paths`` leads from a flat name to the keys of the nested dicts and lists that were saved.
    """

    items: dict[str, Logical | None] = field(default_factory=dict)
    places: dict[tuple[str, Shape | None], ByteRange] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The files of all listed parts, and the table's own."""
        return [NAME, *sorted({place.file for (name, _), place in self.places.items() if name in self.items})]


def recognise(path: Path) -> bool:
    """Whether a folder was written by DCP; one without its table counts, but cannot be opened."""
    try:
        return path.is_dir() and ((path / NAME).is_file() or any(path.glob("__*.distcp")))
    except OSError:
        return False


def open(path: Path) -> Catalogue:
    """The catalogue of a DCP folder, with the nested dicts and lists that were saved."""
    items, table = read_items(path)
    tree = nested(items, table.paths, path)
    return assemble(format="dcp", root=path, tree=tree, where=path, read=table.files)


def read_items(path: Path) -> tuple[dict[str, Any], DcpTable]:
    """Everything in the folder by flat names (a ``TensorEntry`` for each tensor, objects themselves), and the table."""
    if not (path / NAME).is_file():
        hint = "it is written last: the save was not completed, or the file was not copied"
        raise CheckpointError(f"{path / NAME} is missing", hint=hint)
    table = read_table(path)
    for name, logical in table.items.items():
        if logical is not None:
            check_tiling(logical.boxes, logical.shape, name=name, where=path / NAME)
    parts = dict(_read_parts(path, table))
    items: dict[str, Any] = {}
    for name, logical in table.items.items():
        if logical is None:
            items[name] = parts[name, None]
            continue
        pieces = tuple(Piece(box=box, stored=parts[name, box.offset]) for box in logical.boxes)
        items[name] = TensorEntry(shape=logical.shape, dtype=logical.dtype, pieces=pieces)
    return items, table


# --- the table ------------------------------------------------------------------------------------


def read_table(path: Path) -> DcpTable:
    """Reads the table of a folder; ``CheckpointError`` if it is not one."""
    where = path / NAME
    found = pickled.load(where, root=path, allow=_CLASSES)
    try:
        return _table(found.fields, where)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is not a table of DCP: {error!r:.300}", hint=_INCOMPLETE) from error


def _table(fields: dict[str, Any], where: Path) -> DcpTable:
    table = DcpTable()
    for name, item in fields["state_dict_metadata"].items():
        table.items[name] = None if item.name == "BytesStorageMetadata" else _logical(item.fields, name, where)
    for index, info in fields["storage_data"].items():
        place = info.fields
        if place.get("transform_descriptors"):
            raise CheckpointError(
                f"{where}: {index.fields['fqn']} is stored through {place['transform_descriptors']}",
                hint="save it again without extensions",
            )
        key = index.fields["fqn"], index.fields.get("offset")
        table.places[key] = _place(place, where)
    paths = fields.get("planner_data")
    if isinstance(paths, dict):
        table.paths = {name: tuple(keys) for name, keys in paths.items() if isinstance(keys, tuple | list)}
    return table


def _logical(item: dict[str, Any], name: str, where: Path) -> Logical:
    dtype, layout = item["properties"].state[:2]
    if isinstance(layout, Foreign) and layout.args != ("torch.strided",):
        raise CheckpointError(f"{where}: {name} is not a dense tensor", hint="only dense tensors are read")
    chunks = [chunk.fields for chunk in item["chunks"]]
    boxes = [Box(offset=tuple(chunk["offsets"]), shape=tuple(chunk["sizes"])) for chunk in chunks]
    return Logical(shape=tuple(item["size"]), dtype=dtype, boxes=boxes)


def _place(place: dict[str, Any], where: Path) -> ByteRange:
    file, offset, length = PurePosixPath(place["relative_path"]), int(place["offset"]), int(place["length"])
    if file.is_absolute() or ".." in file.parts:
        raise CheckpointError(f"{where} refers to {file}, outside of its folder", hint="do not trust this file")
    return ByteRange(file=file.as_posix(), offset=offset, length=length)


# --- the parts ------------------------------------------------------------------------------------


def _read_parts(path: Path, table: DcpTable) -> Iterator[tuple[tuple[str, Shape | None], Any]]:
    """Every part of the table, with its name and offset, in the order of the files; each file is opened once."""
    wanted: list[tuple[ByteRange, str, Box | None]] = []
    for name, logical in table.items.items():
        for box in [None] if logical is None else logical.boxes:
            place = table.places.get((name, None if box is None else box.offset))
            if place is None:
                at = "" if box is None else f" at {box.offset}"
                raise CheckpointError(f"{path / NAME} does not say where {name}{at} is", hint=_INCOMPLETE)
            wanted.append((place, name, box))
    wanted.sort(key=lambda item: (item[0].file, item[0].offset))
    for file, inside in groupby(wanted, key=lambda item: item[0].file):
        first, *rest = inside
        if not (path / file).is_file():
            raise CheckpointError(f"{path / file}, which holds {first[1]}, is missing", hint=_INCOMPLETE)
        with PickleFile(path / file, root=path) as source:
            parts = _Parts(source=source)
            for place, name, box in (first, *rest):
                logical = table.items[name]
                found: Any
                if logical is None or box is None:
                    found = source.load(offset=place.offset, length=place.length, name=name)
                else:
                    found = parts.tensor(place, name, box, logical.dtype)
                parts.take(place, name, tensor=box is not None)
                yield (name, None if box is None else box.offset), found


@dataclass(kw_only=True)
class _Parts:
    """The tensors in an open file of the folder."""

    source: PickleFile
    headers: dict[int, Header] = field(default_factory=dict)
    last: ByteRange | None = None  # the zip before
    tensors: dict[ByteRange, Any] = field(default_factory=dict)  # tied tensors are one zip under several names

    def take(self, place: ByteRange, name: str, *, tensor: bool) -> None:
        """Refuses a zip that shares bytes with the one before: it would be read anew under every name it has."""
        if self.is_zip(place):
            last, self.last = self.last, place
            if last is not None and place.offset < last.offset + last.length and not (tensor and last == place):
                reason = f"{self.source.path}: {name} lies at byte {place.offset}, inside of what comes before it"
                raise CheckpointError(reason, hint=_INCOMPLETE)

    def is_zip(self, place: ByteRange) -> bool:
        """Whether a zip begins at a place; else it is a file of safetensors, which all its tensors share."""
        with self.source.window(max(place.offset, 0), 4) as begin:
            return begin.read(4) == ZIP

    def tensor(self, place: ByteRange, name: str, box: Box, dtype: torch.dtype) -> Stored:
        """The array of one box; ``CheckpointError`` if it is not what the table says."""
        if place in self.tensors:
            stored = self.tensors[place]
            self.source.claim(stored)
        elif self.is_zip(place):
            stored = self.tensors[place] = self.source.load(offset=place.offset, length=place.length, name=name)
        else:  # torch's SerializationFormat.SAFETENSORS: all tensors of a file in one, at the place of each
            if place.offset not in self.headers:
                self.headers[place.offset] = read_header(self.source, offset=place.offset)
            stored = self.headers[place.offset].arrays.get(name)
        if not isinstance(stored, Stored):
            raise CheckpointError(f"{self.source.path} has no tensor for {name} at {box.offset}", hint=_INCOMPLETE)
        if (stored.shape, stored.dtype) != (box.shape, dtype):
            raise CheckpointError(
                f"{self.source.path}: {name} at {box.offset} is {stored.dtype} of shape {stored.shape}, "
                f"the table says {dtype} of shape {box.shape}",
                hint=_INCOMPLETE,
            )
        return stored


# --- the tree -------------------------------------------------------------------------------------


def nested(items: dict[str, Any], paths: dict[str, tuple[str | int, ...]], where: Path) -> dict[str, Any]:
    """The dicts and lists that DCP has flattened; a number in a path is a place in a list.

    >>> nested({"a.0.b": 1}, {"a.0.b": ("a", 0, "b")}, Path("x"))
    {'a': [{'b': 1}]}
    """
    root = _Node()
    for name, value in items.items():
        path = paths.get(name) or (name,)
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise CheckpointError(f"{where / NAME}: {name} lies inside of something that is no dict")
        if path[-1] in node:
            raise CheckpointError(f"{where / NAME}: two items have the path {path}")
        node[path[-1]] = value
    return {str(key): _settled(value, where) for key, value in root.items()}


class _Node(dict[Any, Any]):
    """A dict or a list that is being built, told apart from dicts that are values."""


def _settled(node: Any, where: Path) -> Any:
    if not isinstance(node, _Node):
        return node
    if not all(isinstance(key, int) for key in node):
        return {key: _settled(value, where) for key, value in node.items()}
    if sorted(node) != list(range(len(node))):
        raise CheckpointError(f"{where / NAME}: a list has only the places {sorted(node)}", hint=_INCOMPLETE)
    return [_settled(node[place], where) for place in range(len(node))]
