"""Predictions: what a model gives for each sample of a data set, in the data set's order, the same on all workers.

Each pipeline computes its share. Its last stage keeps the outputs until all are done. Then workers tell each other the
shapes, and swap their shares in rounds. Nothing is padded or cut, and nothing depends on who computed what.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast import codec
from holdfast.cluster import faults, tags
from holdfast.cluster.butterfly import meetings
from holdfast.cluster.group import Group
from holdfast.cluster.texts import Texts
from holdfast.data.fetch import Dataset
from holdfast.engine.agreement import as_bytes
from holdfast.engine.engine import Engine
from holdfast.engine.rooms import Rooms
from holdfast.engine.walk import Passed, walk
from holdfast.errors import UsageError
from holdfast.words import a_kind

Keep = Callable[[Any, Any], Any]  # of output and target, or of model and batch: tensors with a row for each sample
BLOCK = 2**26  # bytes of one message: 64 MiB
REMEMBERED = 2**20  # compressed bytes: each checkpoint and each joiner gets what is remembered
TRIED = 2**26  # bytes: what is larger does not get so small
HINT = "as in keep=lambda output, target: (output.argmax(-1), target)"


class Forgotten(UsageError):
    """Error: predictions that this worker has missed were too large to be remembered for it."""

    refused = True  # the others train on without this worker


def both(output: Any, target: Any) -> Any:
    """Keep output and target as they are."""
    return output, target


@dataclass(kw_only=True)
class _Share:
    """The predictions of consecutive micro-batches."""

    tree: str | None = None  # the form of what is kept, as JSON with numbers of leaves; None: no micro-batch
    dtypes: list[str] = field(default_factory=list)  # by leaf
    shapes: list[list[tuple[int, ...]]] = field(default_factory=list)  # by leaf and micro-batch
    parts: list[list[torch.Tensor]] = field(default_factory=list)  # by leaf and micro-batch: bytes

    def add(self, kept: Any, samples: int, rooms: Rooms) -> None:
        """Add the next micro-batch. Raises ``UsageError`` for what cannot be put side by side with the others."""
        leaves: list[torch.Tensor] = []
        tree = json.dumps(codec.encode(_numbered(kept, leaves), lambda leaf: None, "predictions"))
        dtypes = [codec.dtype_name(leaf.dtype) for leaf in leaves]
        if not leaves:
            raise UsageError(f"keep gave {kept!r}, in which there is no tensor", hint=HINT)
        if self.tree is None:
            self.tree, self.dtypes = tree, dtypes
            self.shapes, self.parts = [[] for _ in leaves], [[] for _ in leaves]
        _refuse_to_differ([(self.tree, self.dtypes), (tree, dtypes)])
        for number, leaf in enumerate(leaves):
            if leaf.dim() == 0 or leaf.shape[0] != samples:
                raise UsageError(
                    f"a prediction has the shape {tuple(leaf.shape)}, but its micro-batch has {samples} samples",
                    hint="keep tensors whose first dimension is the sample; run.evaluate gives means",
                )
            self.shapes[number].append(tuple(leaf.shape))
            self.parts[number].append(rooms.keep(leaf))

    def described(self) -> bytes:
        """Return all but the parts, for the other workers. Equal shapes in a row are counted."""
        runs = [[[shape, len([*same])] for shape, same in itertools.groupby(shapes)] for shapes in self.shapes]
        return json.dumps([self.tree, self.dtypes, runs]).encode()

    @classmethod
    def read(cls, text: bytes) -> _Share:
        """Return what another worker has described."""
        tree, dtypes, runs = json.loads(text)
        shapes = [[tuple(shape) for shape, count in run for _ in range(count)] for run in runs]
        return cls(tree=tree, dtypes=dtypes, shapes=shapes)

    def bytes_of(self, leaf: int) -> int:
        """Return the size of all parts of a leaf."""
        size = codec.dtype_of(self.dtypes[leaf]).itemsize
        return sum(size * int(np.prod(shape, dtype=np.int64)) for shape in self.shapes[leaf])


def predict(engine: Engine, data: Dataset, keep: Keep, group: Group, rooms: Rooms) -> Any:
    """Return what ``keep`` gives for all samples of a data set, in order. All workers of the group call it.

    A tensor of the result has a row for each sample. Where shapes differ between micro-batches, there is a list with a
    tensor for each sample instead. Raises ``Broken``, and ``UsageError`` for empty data or what cannot be kept.
    """
    mine = _Share()
    walk(engine, data, group, lambda passed: _take(passed, keep, mine, rooms))
    faults.point("predict")
    told = Texts(group, engine.model.device).exchange(mine.described())
    owners = [line.ranks[-1] for line in engine.layout.pipelines]
    shares = {rank: mine if rank == group.rank else _Share.read(told[rank]) for rank in owners}
    shares = {rank: share for rank, share in shares.items() if share.tree is not None}
    _refuse_to_differ([(share.tree, share.dtypes) for share in shares.values()])
    first = next(iter(shares.values()))
    leaves = [_gather(number, shares, group, rooms, engine.model.device) for number in range(len(first.dtypes))]
    assert first.tree is not None
    return _filled(codec.decode(json.loads(first.tree), lambda found: found), leaves)


def _take(passed: Passed, keep: Keep, share: _Share, rooms: Rooms) -> None:
    share.add(keep(*passed.pair), passed.samples, rooms)


def _gather(leaf: int, shares: dict[int, _Share], group: Group, rooms: Rooms, device: torch.device) -> Any:
    """Return one leaf of all shares, which come in the order of their samples.

    Shares travel in the rounds of the ``butterfly``, whose places are in that order: what a block of workers has
    together lies side by side.
    """
    places = [*shares, *(rank for rank in range(group.size) if rank not in shares)]
    sizes = [share.bytes_of(leaf) for share in shares.values()]
    begins = [*itertools.accumulate(sizes, initial=0)] + [sum(sizes)] * (group.size - len(sizes))
    room = rooms.take(begins[-1])

    def of(block: range) -> torch.Tensor:
        return room[begins[block.start] : begins[block.stop]]

    place = places.index(group.rank)
    if group.rank in shares:
        _fill(of(range(place, place + 1)), shares[group.rank].parts[leaf])
        shares[group.rank].parts[leaf].clear()
    for meet in meetings(place, group.size):
        nothing = room[:0]
        mine, theirs = of(meet.mine) if meet.sends else nothing, of(meet.theirs) if meet.receives else nothing
        _swap(mine, theirs, places[meet.partner], group, device)
    shapes = [shape for share in shares.values() for shape in share.shapes[leaf]]
    return _shaped(room.view(codec.dtype_of(next(iter(shares.values())).dtypes[leaf])), shapes)


def _fill(room: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    place = 0
    for part in parts:
        room[place : place + part.numel()] = part
        place += part.numel()


def _swap(mine: torch.Tensor, theirs: torch.Tensor, partner: int, group: Group, device: torch.device) -> None:
    """Send ``mine`` to a partner and receive ``theirs``, in blocks. ``mine`` does not change until the vote."""
    for begin in range(0, max(mine.numel(), theirs.numel()), BLOCK):
        sent, place = mine[begin : begin + BLOCK], theirs[begin : begin + BLOCK]
        heard = place if device.type == "cpu" else torch.empty_like(place, device=device)
        sends = [(partner, sent.to(device), tags.MODEL)] if sent.numel() else []
        group.finish(group.start(sends, [(partner, heard, tags.MODEL)] if heard.numel() else []))
        if heard is not place:
            place.copy_(heard)


def _shaped(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return a tensor with a row for each sample; a list of rows if they have different shapes.

    >>> _shaped(torch.arange(3), [(2,), (1,)])
    tensor([0, 1, 2])
    >>> _shaped(torch.arange(5), [(2, 1), (1, 3)])
    [tensor([0]), tensor([1]), tensor([2, 3, 4])]
    """
    if len({shape[1:] for shape in shapes}) == 1:
        return flat.view(sum(shape[0] for shape in shapes), *shapes[0][1:])
    rows: list[torch.Tensor] = []
    start = 0
    for shape in shapes:
        stop = start + int(np.prod(shape, dtype=np.int64))
        rows += flat[start:stop].view(shape).unbind(0)
        start = stop
    return rows


def _refuse_to_differ(forms: Sequence[Any]) -> None:
    if any(form != forms[0] for form in forms):
        raise UsageError("what is kept has another form or dtype for some micro-batches than for others", hint=HINT)


def _numbered(value: Any, leaves: list[torch.Tensor]) -> Any:
    """Return a tree with each tensor replaced by its number among ``leaves``, where they are put."""
    if isinstance(value, np.ndarray):
        value = _from_numpy(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UsageError("a prediction is no plain tensor", hint="keep what its to_dense() or dequantize() gives")
        leaves.append(value)
        return len(leaves) - 1
    if isinstance(value, dict):
        return {key: _numbered(item, leaves) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_numbered(item, leaves) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if value is None:
        return None
    raise UsageError(f"a prediction is {a_kind(value)}, not a tensor", hint=HINT)


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array as a tensor, also one with reversed rows or another byte order, which torch does not take."""
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError as e:
        raise UsageError(f"a prediction is an array of {array.dtype}, not of numbers", hint=HINT) from e


def _filled(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree with numbers replaced by leaves."""
    if isinstance(tree, dict):
        return {key: _filled(item, leaves) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_filled(item, leaves) for item in tree)
    return None if tree is None else leaves[tree]


# --- for workers that join later ---------------------------------------------------------------------


def to_remember(value: Any) -> dict[str, Any]:
    """Return predictions as JSON values, for workers that join later; only their size if they are too large for that.

    >>> found = recalled(to_remember((torch.arange(3), [torch.ones(1)])))
    >>> found[0].tolist(), found[1]
    ([0, 1, 2], [tensor([1.])])
    """
    text, tensors = codec.flatten(value)
    size = sum(tensor.nbytes for tensor in tensors)
    if size <= TRIED:
        data = zlib.compress(b"".join(as_bytes(tensor) for tensor in tensors), 1)
        if len(data) <= REMEMBERED:
            return {"tree": text.decode(), "data": base64.b64encode(data).decode()}
    return {"bytes": size}


def recalled(known: dict[str, Any]) -> Any:
    """Return the predictions that ``to_remember`` was given. Raises ``Forgotten`` if they were too large."""
    if "data" not in known:
        raise Forgotten(
            f"this worker has missed predictions of {known['bytes']:,} bytes, which nobody remembers",
            hint="keep less of each output between two loops, such as argmax, or use run.evaluate",
        )
    text, data = known["tree"].encode(), zlib.decompress(base64.b64decode(known["data"]))
    tensors, place = codec.empty_tensors(text), 0
    for tensor in tensors:
        if tensor.numel():
            part = torch.frombuffer(bytearray(data[place : place + tensor.nbytes]), dtype=tensor.dtype)
            tensor.copy_(part.view(tensor.shape))
        place += tensor.nbytes
    return codec.unflatten(text, tensors)
