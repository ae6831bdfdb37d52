"""Reads and writes ``torch.save`` files: a zip of a pickle and one uncompressed record for each storage.

Read through :mod:`pickled`; written record by record, so that no more than a few megabytes are in memory.
``torch.load(…, weights_only=True)`` reads them back.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from holdfast.checkpoint.disk import BLOCK, BUFFERS, Progress, explained, silent
from holdfast.checkpoint.formats import pickled
from holdfast.checkpoint.formats.archive import LEGACY_MAGIC
from holdfast.checkpoint.formats.canonical import Tree, assemble, groups_in
from holdfast.checkpoint.formats.output import appearing, with_arrays, without_numpy
from holdfast.checkpoint.formats.rebuild import STORAGES
from holdfast.checkpoint.pieces import Catalogue, row_major
from holdfast.checkpoint.safetensors_writer import Array
from holdfast.errors import CheckpointError
from holdfast.words import a_kind

_ALIGN = 64  # bytes; torch aligns each storage to this, so that a mapped file can be used as it is
_LARGE = 1 << 30  # bytes from which on a record gets the long form of a zip's header; it is needed from 4 GB on
_LEGACY = pickle.dumps(LEGACY_MAGIC, protocol=2)


def recognise(path: Path) -> bool:
    """Whether a file was written by ``torch.save``, in the new or the old form."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            if file.read(len(_LEGACY)) == _LEGACY:
                return True
        return any(name.endswith("/data.pkl") for name in zipfile.ZipFile(path).namelist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


def open(path: Path) -> Catalogue:
    """The catalogue of a saved dict; a bare state_dict of tensors is a model."""
    tree = pickled.load(path, root=path.parent, given=True)
    if not isinstance(tree, dict):
        hint = 'save a dict, such as {"model": model.state_dict()}'
        raise CheckpointError(f"{path} holds {a_kind(tree)}, not a dict with names", hint=hint)
    return assemble(format="torch", root=path.parent, tree=tree, where=path, read=[path.name])


def write(catalogue: Catalogue, path: Path, *, progress: Progress = silent) -> None:
    """Writes one file. Tied tensors share a storage; the optimizer has the form that ``load_state_dict`` takes."""
    tree = dict(catalogue.tree)
    if isinstance(tree.get("optimizer"), dict):
        tree["optimizer"] = numbered(in_model_order(catalogue))
    with appearing(path) as unfinished, explained(unfinished, "write"), unfinished.open("xb") as stream:
        save(with_arrays(catalogue, without_numpy(tree)), stream, progress=progress)
        stream.flush()
        os.fsync(stream.fileno())


def save(tree: Any, stream: BinaryIO, *, progress: Progress = silent) -> None:
    """Does what ``torch.save`` does, for a tree with :class:`Array` leaves; arrays of one name share a storage."""
    code = io.BytesIO()
    pickler = _Pickler(code, protocol=2)
    pickler.dump(tree)
    with zipfile.ZipFile(_FileTail(stream), "w") as archive:
        for name, text in {
            "data.pkl": code.getvalue(),
            ".format_version": b"1",
            ".storage_alignment": str(_ALIGN).encode(),
            "byteorder": b"little",
        }.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), text)
        for key, source in enumerate(pickler.arrays.values()):
            _write_record(archive, f"archive/data/{key}", source, progress)
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")


def _write_record(archive: zipfile.ZipFile, name: str, source: Array, progress: Progress) -> None:
    info = zipfile.ZipInfo(name)
    info.file_size = source.nbytes
    large = source.nbytes >= _LARGE
    assert archive.fp is not None
    start = archive.fp.tell() + 30 + len(name) + (20 if large else 0) + 4
    info.extra = struct.pack("<2sH", b"FB", -start % _ALIGN) + b"\0" * (-start % _ALIGN)
    with archive.open(info, "w", force_zip64=large) as record, BUFFERS.lend(BLOCK) as buffer:
        for begin in range(0, source.nbytes, BLOCK):
            end = min(begin + BLOCK, source.nbytes)
            source.fill(begin, end, buffer[: end - begin])
            record.write(buffer[: end - begin].data)
            progress(end - begin)


class _FileTail(io.RawIOBase):
    """The rest of a file as a file of its own: a zip inside of a larger file counts from its own begin."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._start = stream, stream.tell()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell() - self._start

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._stream.seek(offset + self._start if whence == 0 else offset, whence)
        return self.tell()

    def write(self, data: Any, /) -> int:
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()


class _Storage:
    """A stand-in for the record of an array, in the pickle."""

    def __init__(self, source: Array) -> None:
        self.source = source


class _Pickler(pickle.Pickler):
    """Writes arrays as torch writes tensors: a call of a function of torch's, and a reference to a record."""

    def __init__(self, stream: BinaryIO, protocol: int) -> None:
        super().__init__(stream, protocol=protocol)
        self.arrays: dict[str, Array] = {}
        self._keys: dict[str, int] = {}

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle for each object."""
        if not isinstance(value, Array):
            return NotImplemented
        utils = torch._utils
        layout: tuple[Any, ...] = (_Storage(value), 0, value.shape, row_major(value.shape), False, OrderedDict())
        if value.dtype in STORAGES:
            return utils._rebuild_tensor_v2, layout
        return utils._rebuild_tensor_v3, (*layout, value.dtype)

    def persistent_id(self, value: Any) -> Any:
        """Called by pickle for each object: the reference to a record for a stand-in, else None."""
        if not isinstance(value, _Storage):
            return None
        source = value.source
        self.arrays.setdefault(source.name, source)
        key = str(self._keys.setdefault(source.name, len(self._keys)))
        if source.dtype in STORAGES:
            kind, count = getattr(torch, f"{STORAGES[source.dtype]}Storage"), source.nbytes // source.dtype.itemsize
        else:
            kind, count = torch.storage.UntypedStorage, source.nbytes
        return ("storage", kind, key, "cpu", count)


# --- the optimizer --------------------------------------------------------------------------------


def in_model_order(catalogue: Catalogue) -> Tree:
    """The optimizer with the parameters of each group in the model's order, if several ranks have saved it.

    torch loads optimizers by position. What pipeline stages saved was put together rank by rank, and stages that
    take turns do not hold the layers in their order. Of one rank the order is the script's own, and stays.
    """
    optimizer: Tree = catalogue.tree["optimizer"]
    model = catalogue.tree.get("model")
    groups = groups_in(optimizer) or []
    names = [name for group in groups for name in group["params"]]
    if catalogue.details.get("ranks", 1) == 1 or not all(isinstance(name, str) for name in names):
        return optimizer
    if isinstance(model, dict) and model.keys() >= set(names):
        names = list(model)
    place = {name: number for number, name in enumerate(_counted(names))}
    return {**optimizer, "param_groups": [{**g, "params": sorted(g["params"], key=place.__getitem__)} for g in groups]}


def _counted(names: list[str]) -> list[str]:
    """Names in the order of a module: those of one submodule together, numbered submodules by number.

    >>> _counted(["embed", "layers.0.w", "layers.2.w", "layers.1.w", "norm", "layers.10.w"])
    ['embed', 'layers.0.w', 'layers.1.w', 'layers.2.w', 'layers.10.w', 'norm']
    """
    root: Tree = {}
    for name in names:
        node = root
        for part in name.split("."):
            node = node.setdefault(part, {})
        node[""] = name  # no part of a name is empty where a module's are meant

    def walk(node: Tree) -> Iterator[str]:
        keys = list(node)
        numbers = iter(sorted((key for key in keys if key.isdecimal()), key=int))
        for key in (next(numbers) if key.isdecimal() else key for key in keys):
            if isinstance(node[key], str):
                yield node[key]
            else:
                yield from walk(node[key])

    return list(walk(root))


def numbered(optimizer: Tree) -> Tree:
    """An optimizer in the form that ``Optimizer.load_state_dict`` takes: by numbers, with the names beside them.

    >>> numbered({"state": {"b": {}}, "param_groups": [{"params": ["a", "b"], "lr": 0.1}]})
    {'state': {1: {}}, 'param_groups': [{'params': [0, 1], 'lr': 0.1, 'param_names': ['a', 'b']}]}
    """
    groups = groups_in(optimizer) or []
    names = [name for group in groups for name in group["params"]]
    if not names or not all(isinstance(name, str) for name in names):
        return optimizer
    numbers = {name: number for number, name in enumerate(names)}
    made = [{**g, "params": [numbers[name] for name in g["params"]], "param_names": list(g["params"])} for g in groups]
    state = {numbers.get(name, name): value for name, value in (optimizer.get("state") or {}).items()}
    return {**optimizer, "state": state, "param_groups": made}
