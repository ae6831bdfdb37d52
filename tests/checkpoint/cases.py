"""Checkpoints to break: small ones of many blocks, and what they should hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from holdfast.checkpoint import disk, index, safetensors_writer, save, tensor_reader, transfer
from holdfast.checkpoint.formats import open_checkpoint
from holdfast.checkpoint.pieces import Box, Catalogue, DataFile, Piece, Ref, Stored, TensorEntry, row_major
from holdfast.errors import CheckpointError

SMALL = 4 * disk.ALIGN
Tree = dict[str, Any]
Change = Callable[[dict[str, Any]], None]


@contextmanager
def blocks(size: int = SMALL, span: int | None = None) -> Iterator[None]:
    """Small blocks: many cases for few bytes. The constants are imported by name, so each place has its own."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (disk, safetensors_writer, tensor_reader, transfer, index):
            patch.setattr(module, "BLOCK", size)
        patch.setattr(tensor_reader, "SPAN", span or 2 * size)
        patch.setattr(tensor_reader, "CHUNK", 16 * size)
        yield


def tree_of(seed: int, elements: int = 9000) -> Tree:
    """Something to save: two large tensors, small ones of other kinds, and values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(3, elements // 3, generator=generator),
            "bias": torch.randn(elements // 2, generator=generator).to(torch.bfloat16),
            "count": torch.tensor(seed),
        },
        "rng": torch.randint(0, 256, (100,), generator=generator, dtype=torch.uint8),
        "step": seed,
    }


def content(path: Path) -> Tree:
    """Everything in a checkpoint: its values, and its tensors as bytes."""
    catalogue = open_checkpoint(path)
    found: Tree = {
        name: safetensors_writer.bytes_of(tensor_reader.read_tensor(catalogue, name)).tobytes()
        for name in catalogue.tensors
    }
    return {**found, "step": catalogue.tree["step"]}


def content_of(tree: Tree) -> Tree:
    """What :func:`content` should find."""
    tensors = {**{f"model/{name}": t for name, t in tree["model"].items()}, "rng": tree["rng"]}
    return {**{name: safetensors_writer.bytes_of(t).tobytes() for name, t in tensors.items()}, "step": tree["step"]}


def settle() -> None:
    """Waits for what is being removed in the background."""
    while disk._discarding:
        disk._discarding.pop().join()


def saved(path: Path, seed: int = 1, **options: int) -> Tree:
    """A checkpoint at a path, and what it holds."""
    tree = tree_of(seed, **options)
    save(path, tree)
    settle()
    return content_of(tree)


def in_two_files(folder: Path, seed: int = 1) -> torch.Tensor:
    """A checkpoint as two workers write it: a file each, of the same length."""
    whole = torch.randn(6, 2000, generator=torch.Generator().manual_seed(seed))
    folder.mkdir(parents=True, exist_ok=True)
    identity, files, pieces = index.new_id(), {}, []
    for rank, rows in enumerate((whole[:3], whole[3:])):
        name = index.data_name(identity, rank)
        array = safetensors_writer.array_of(f"w@{3 * rank},0", rows)
        written = safetensors_writer.write_safetensors(folder / name, [array])
        files[name] = DataFile(bytes=written.bytes, checksums=written.checksums, writer=f"rank {rank}")
        stored = Stored(
            file=name,
            offset=written.offsets[array.name],
            dtype=rows.dtype,
            shape=(3, 2000),
            strides=row_major((3, 2000)),
        )
        pieces.append(Piece(box=Box(offset=(3 * rank, 0), shape=(3, 2000)), stored=stored))
    entry = TensorEntry(shape=(6, 2000), dtype=whole.dtype, pieces=tuple(pieces))
    tree = {"w": Ref(name="w"), "step": seed}
    index.commit(Catalogue(format="holdfast", root=folder, tensors={"w": entry}, tree=tree, files=files), identity)
    return whole


def data_of(folder: Path) -> list[Path]:
    """A checkpoint's data files, in the order of their ranks."""
    return sorted(folder.glob("data-*"), key=lambda path: path.stem.split("-")[-1])


def rewrite(folder: Path, change: Change) -> None:
    """Changes the index as somebody would who knows how its checksum is made."""
    path = folder / index.NAME
    said = json.loads(path.read_bytes())["index"]
    change(said)
    rewrite_text(folder, json.dumps(said, separators=(",", ":")).encode())


def rewrite_text(folder: Path, body: bytes) -> None:
    sum_ = xxhash.xxh3_64_hexdigest(body).encode()
    (folder / index.NAME).write_bytes(b'{"xxh3":"' + sum_ + b'","index":' + body + b"}")


def refusal(path: Path) -> str:
    """The sentence with which a checkpoint is refused; fails if it is not, or with anything else."""
    with pytest.raises(CheckpointError) as caught:
        content(path)
    return str(caught.value)
