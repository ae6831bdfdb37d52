"""The index of a checkpoint: the one small file whose appearance makes it exist.

docs/checkpoint-format.md describes it byte by byte.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast import codec
from holdfast.checkpoint.disk import BLOCK, blocks_of, checksum, explained, sync_folder
from holdfast.checkpoint.pieces import Box, Catalogue, Entry, File, Piece, Ref, Shape, Stored, row_major
from holdfast.errors import CheckpointError, UsageError

NAME = "index.json"
VERSION = 1
_PREFIX = '{"xxh3":"%s","index":'
_DATA = re.compile(r"data-[0-9a-f]{12}-\d+\.safetensors")
_UNFINISHED = re.compile(r"\.index-[0-9a-f]{12}\.json")


def new_id() -> str:
    """Tells the files of one save from those of another in the same folder."""
    return secrets.token_hex(6)


def data_name(save: str, rank: int) -> str:
    """The name of the file that a worker writes."""
    return f"data-{save}-{rank}.safetensors"


# --- writing --------------------------------------------------------------------------------------


def commit(catalogue: Catalogue, save: str) -> None:
    """Makes a checkpoint exist, whose data files are durable: the old one until the rename, the new one after."""
    body = json.dumps(_describe(catalogue), separators=(",", ":"))
    text = f"{_PREFIX % _checksum(body.encode())}{body}}}".encode()
    folder = catalogue.root
    unfinished = folder / f".index-{save}.json"
    with explained(unfinished, "write"):
        sync_folder(folder)  # the names of the data files, before anything refers to them
        with unfinished.open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, folder / NAME)
        sync_folder(folder)


def _checksum(body: bytes) -> str:
    return checksum(np.frombuffer(body, dtype=np.uint8))


def _describe(catalogue: Catalogue) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(catalogue.files)}
    return {
        "version": VERSION,
        "block": BLOCK,
        "details": {**catalogue.details, "torch": torch.__version__, "saved": round(time.time(), 3)},
        "files": [
            {"name": name, "bytes": file.bytes, "writer": file.writer, "blocks": list(file.checksums or ())}
            for name, file in catalogue.files.items()
        ],
        "tensors": {
            name: {
                "dtype": codec.dtype_name(entry.dtype),
                "shape": list(entry.shape),
                "pieces": [
                    [numbers[p.stored.file], p.stored.offset, list(p.box.offset), list(p.box.shape)]
                    for p in entry.pieces
                ],
            }
            for name, entry in catalogue.tensors.items()
        },
        "tied": dict(catalogue.tied),
        "frozen": list(catalogue.frozen),
        "buffers": list(catalogue.buffers),
        "tree": codec.encode(catalogue.tree, lambda value: value.name if isinstance(value, Ref) else None, "tree"),
    }


def clean(folder: Path, keep: Iterable[str] = ()) -> None:
    """Removes what unfinished or replaced saves have left in a folder; nothing that is not ours.

    In the background: to give back a gigabyte takes a file system a third of the time of writing it.
    """
    kept = {NAME, *keep}
    litter = [
        path
        for path in folder.iterdir()
        if path.name not in kept and (_DATA.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name))
    ]
    if litter:
        threading.Thread(target=lambda: [path.unlink(missing_ok=True) for path in litter]).start()


# --- reading --------------------------------------------------------------------------------------


def exists(folder: Path) -> bool:
    """Whether a checkpoint is in a folder; what is not committed does not count."""
    return (folder / NAME).is_file()


def recognise(path: Path) -> bool:
    """Whether this is a checkpoint of ours."""
    try:
        with (path / NAME).open("rb") as file:
            return file.read(9) == b'{"xxh3":"'
    except OSError:
        return False


def open(path: Path) -> Catalogue:
    """The catalogue of a checkpoint, after checking that its files are there and as long as they were."""
    index = _parse(path / NAME)
    try:
        catalogue = _catalogue(path, index)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, UsageError) as e:
        raise CheckpointError(f"{path / NAME} is not a valid index: {e!r}") from e
    for name, file in catalogue.files.items():
        _check_file(path / name, file)
    return catalogue


def _parse(path: Path) -> dict[str, Any]:
    with explained(path, "read"):
        text = path.read_bytes()
    length = len(_PREFIX % ("0" * 16))
    body = text[length:-1]
    expected = f"{_PREFIX % _checksum(body)}".encode()
    if text[:length] != expected or text[-1:] != b"}":
        raise CheckpointError(f"{path} is damaged", hint="restore it, or load an older checkpoint")
    index: dict[str, Any] = json.loads(body)
    if index.get("version") != VERSION or index.get("block") != BLOCK:
        raise CheckpointError(
            f"{path} has version {index.get('version')}, this holdfast reads version {VERSION}",
            hint="use the holdfast that wrote it, or a newer one",
        )
    return index


def _catalogue(root: Path, index: Mapping[str, Any]) -> Catalogue:
    names = [str(file["name"]) for file in index["files"]]
    for name in names:
        if not _DATA.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a data file")
    if len(set(names)) != len(names):
        raise ValueError("a data file is listed twice")
    files = {
        file["name"]: File(bytes=file["bytes"], checksums=tuple(file["blocks"]), writer=file["writer"])
        for file in index["files"]
    }
    tensors = {name: _entry(name, item, names, files) for name, item in index["tensors"].items()}
    return Catalogue(
        format="holdfast",
        root=root,
        tensors=tensors,
        tree=codec.decode(index["tree"], lambda name: Ref(name=name)),
        files=files,
        tied=index["tied"],
        frozen=tuple(index["frozen"]),
        buffers=tuple(index["buffers"]),
        details=index["details"],
    )


def _entry(name: str, item: Mapping[str, Any], names: list[str], files: Mapping[str, File]) -> Entry:
    dtype, shape = codec.dtype_of(item["dtype"]), tuple(item["shape"])
    pieces = []
    for number, position, offset, size in item["pieces"]:
        box = Box(offset=tuple(offset), shape=tuple(size))
        stored = Stored(file=names[number], offset=position, dtype=dtype, shape=box.shape, strides=row_major(box.shape))
        _check_piece(name, shape, box, stored, files)
        pieces.append(Piece(box=box, stored=stored))
    entry = Entry(shape=shape, dtype=dtype, pieces=tuple(pieces))
    if sum(piece.box.numel for piece in pieces) * dtype.itemsize != entry.nbytes:
        raise ValueError(f"the pieces of {name} are not as many elements as it has")
    return entry


def _check_piece(name: str, shape: Shape, box: Box, stored: Stored, files: Mapping[str, File]) -> None:
    inside = all(o >= 0 and n >= 0 and o + n <= m for o, n, m in zip(box.offset, box.shape, shape, strict=True))
    if not inside or stored.offset < 0 or stored.offset + stored.span > files[stored.file].bytes:
        raise ValueError(f"a piece of {name} lies outside of the tensor or of {stored.file}")


def _check_file(path: Path, file: File) -> None:
    if file.checksums is None or len(file.checksums) != len(blocks_of(file.bytes)):
        raise CheckpointError(f"{path} has no checksum for each of its blocks")
    with explained(path, "read"):
        actual = path.stat().st_size
    if actual != file.bytes:
        raise CheckpointError(
            f"{path} is {actual} bytes long, it was written with {file.bytes}", hint="the file is truncated or replaced"
        )
