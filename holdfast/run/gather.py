"""Gathering of all workers' layers: to write the model as one file, and to hash the whole state."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from holdfast.checkpoint.disk import BLOCK, Bytes, blocks_of, sync_folder, write_blocks
from holdfast.checkpoint.safetensors_writer import Array, Image, array_of
from holdfast.cluster import tags
from holdfast.cluster.group import Group
from holdfast.cluster.texts import Texts
from holdfast.engine.agreement import refuse_to_drift
from holdfast.engine.model import LayeredModel
from holdfast.engine.names import Named, Names
from holdfast.engine.state import State
from holdfast.errors import HoldfastError, UsageError

WRITER = 0  # the rank that writes the file
LEFTOVER_SECONDS = 3600.0  # an unfinished file that was not written to for so long is of a writer that was killed


class Holders(Protocol):
    """The holders of each layer, such as a ``Layout``."""

    def holders(self, layer: int) -> tuple[int, ...]:
        """Return the ranks that hold a layer, ascending."""


def gather_sha256(group: Group | None, state: State, *, weights_only: bool = False) -> str:
    """Return the hash of the whole state, the same on every worker. All of the group call it.

    Only digests are sent. Raises ``Broken``, ``HoldfastError`` if nobody holds a part of the state, and ``Drift`` if
    workers have different values of it.
    """
    if group is None:
        return state.sha256(weights_only=weights_only)
    mine = state.digests(weights_only=weights_only)
    if group.team.size > 1:  # the digests are of whole tensors
        ranks = [f"rank {rank}" for rank in range(group.team.size)]
        refuse_to_drift(state.names(weights_only=weights_only), group.team.exchange("the digests", mine), ranks)
    said = Texts(group, state.model.device).exchange(json.dumps(mine).encode())
    parts = [json.loads(text) for text in said]
    return state.combine(parts, weights_only=weights_only, workers=group.generation.workers)


def write_model(
    group: Group | None,
    model: LayeredModel,
    layout: Holders | None,
    path: Path,
    *,
    weights: Mapping[nn.Parameter, torch.Tensor] | None = None,
) -> None:
    """Write all weights as one safetensors file, whole or not at all. All of the group call it, the first one writes.

    The others send the weights that it lacks, block by block as it writes, so it needs memory for one block only. A
    tied weight is written once, and its other names are noted as ``save_model`` of safetensors does. ``weights``: what
    is written in the place of these parameters that are held here. Raises ``Broken``, and ``HoldfastError`` if the file
    cannot be written or nobody holds a weight.
    """
    rank = WRITER if group is None else group.rank
    named = Names(model).saved(model.is_held)
    first = first_names({name: one.tensor for name, one in named.items()})
    arrays = []
    for name, one in named.items():
        if first[name] == name:
            sender = _sender(name, one, layout)
            arrays.append(_array(name, _instead(one, weights or {}), sender, rank, group))
    second = {name: kept for name, kept in sorted(first.items()) if name != kept}
    image = Image(sorted(arrays, key=lambda array: array.name), second)
    if rank == WRITER:
        _write(image, path)
        return
    # This worker walks through the same blocks in the same order, writes nothing, and sends its parts when they come.
    scratch: Bytes = np.empty(BLOCK, dtype=np.uint8)
    for start in blocks_of(image.size):
        image.fill(start, min(start + BLOCK, image.size), scratch)


def _instead(one: Named, weights: Mapping[nn.Parameter, torch.Tensor]) -> Named:
    """Return a named value with other weights in its place, if there are some."""
    other = weights.get(one.tensor) if isinstance(one.tensor, nn.Parameter) else None
    return one if other is None else dataclasses.replace(one, value=other, tensor=other)


def first_names(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, str]:
    """Return the name under which each tensor is written: the first of its names in alphabetical order.

    Raises ``UsageError`` for a name without a tensor.

    >>> w = torch.zeros(1)
    >>> first_names({"head": w, "embed": w, "bias": torch.zeros(1)})
    {'head': 'embed', 'embed': 'embed', 'bias': 'bias'}
    """
    kept: dict[int, str] = {}
    for name in sorted(tensors):
        if tensors[name] is None:
            raise UsageError(
                f"{name} is no tensor: a safetensors file cannot hold it", hint="save a checkpoint instead"
            )
        kept.setdefault(id(tensors[name]), name)
    return {name: kept[id(tensor)] for name, tensor in tensors.items()}


def _sender(name: str, one: Named, layout: Holders | None) -> int:
    """Return the rank that provides a tensor: the lowest that holds it, so the writer itself if it can."""
    if layout is None or not one.layers:
        return WRITER
    ranks = [rank for layer in one.layers for rank in layout.holders(layer)]
    if not ranks:
        layers = ", ".join(map(str, sorted(one.layers)))
        raise HoldfastError(f"no worker holds {name} (layer {layers})", hint="the model cannot be written without it")
    return min(ranks)


def _array(name: str, one: Named, sender: int, rank: int, group: Group | None) -> Array:
    """Return a tensor's place in the file, with the function that reads, sends or receives its bytes on this rank."""
    assert one.tensor is not None
    if sender == rank and not one.held:
        raise HoldfastError(f"{name} is not held here", hint="write the model once training has begun")
    if sender == WRITER:
        return array_of(name, one.tensor) if rank == WRITER else _described(name, one.tensor, _nothing)
    assert group is not None
    if rank == WRITER:
        return _described(name, one.tensor, _receiving(group, sender, one.tensor.device))
    return _described(name, one.tensor, _sending(group, one.tensor) if rank == sender else _nothing)


def _described(name: str, tensor: torch.Tensor, fill: Callable[[int, int, Bytes], None]) -> Array:
    return Array(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), fill=fill)


def _nothing(start: int, stop: int, out: Bytes) -> None:
    """Do nothing: this rank neither provides the tensor nor writes it."""


def _sending(group: Group, tensor: torch.Tensor) -> Callable[[int, int, Bytes], None]:
    """Return a function that sends a range of a tensor's bytes. Nothing is copied: weights do not change until the
    vote."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    line = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8) if flat.numel() else None

    def send(start: int, stop: int, out: Bytes) -> None:
        assert line is not None
        group.start([(WRITER, line[start:stop], tags.MODEL)], [])

    return send


def _receiving(group: Group, sender: int, device: torch.device) -> Callable[[int, int, Bytes], None]:
    """Return a function that receives a range of a tensor's bytes."""

    def receive(start: int, stop: int, out: Bytes) -> None:
        place = torch.from_numpy(out)
        room = place if device.type == "cpu" else torch.empty_like(place, device=device)
        group.finish(group.start([], [(sender, room, tags.MODEL)]))
        if room is not place:
            place.copy_(room)

    return receive


def _write(image: Image, path: Path) -> None:
    """Write the file under a random name beside it, and rename it when it is complete.

    Nobody can know the name before: neither a second writer nor a link that somebody has put there is in the way.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        write_blocks(unfinished, image.size, image.fill, threads=1)  # one thread: blocks arrive in order
        unfinished.replace(path)
        sync_folder(path.parent)
    except OSError as e:
        raise HoldfastError(f"cannot write {path}: {e.strerror or e}") from e
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Remove what killed writers of the same file have left; one that is still written to stays."""
    left = re.compile(rf"\.{re.escape(path.name)}(\.[0-9a-f]{{12}})?\.unfinished")
    for other in path.parent.iterdir():
        if left.fullmatch(other.name):
            with contextlib.suppress(OSError):
                if time.time() - other.lstat().st_mtime > LEFTOVER_SECONDS:
                    other.unlink()
