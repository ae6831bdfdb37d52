"""Measurements: what modules measure in training calls of the forward pass, on their way between workers.

Each micro-batch is computed by one pipeline, but all holders of a layer have to know what its modules have measured. So
each sends the others its own micro-batches' measurements, as one message of bytes. Both ends know its size: it has
room for one call of each module in each micro-batch. If a module was called more often, a second message follows.
Replicas of the whole model, and any workers if they are many, pass on what they have heard, so that each needs few
messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.cluster import tags, talk
from holdfast.cluster.group import Group
from holdfast.cluster.talk import share

HEAD = 4  # numbers in front of a measurement: calls of the module, momentum, counted, narrow


@dataclass(slots=True)
class Measurement:
    """What one training call of a module has measured.

    ``values`` are the tensors, of the forms that the module always has. ``momentum``, ``counted`` (by how much the call
    raises the counter of batches) and ``is_narrow`` (the input had 16 bits) are for running averages.
    """

    values: list[Tensor]
    momentum: float = 0.0
    counted: int = 0
    is_narrow: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """A module of a layer that measures something. ``forms``: shape and dtype of each tensor of a measurement."""

    layer: int
    wanted: frozenset[int]  # layers whose holders need the measurements: those that have the same buffers
    forms: tuple[tuple[torch.Size, torch.dtype], ...]

    @property
    def bytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.forms)


Measured = dict[tuple[int, int], list[Measurement]]  # by micro-batch and number of the source, in order of the calls
LayersOf = Callable[[int], Collection[int]]  # the layers that a rank holds


def exchange(
    group: Group,
    sources: Sequence[Source],
    measured: Measured,
    layers_of: LayersOf,
    shares: Sequence[range],
    device: torch.device,
) -> Measured:
    """Return all measurements that this worker needs, its own and those of others. May raise ``Broken``.

    ``measured``: those of this worker. ``layers_of`` gives the layers of each rank, and ``shares`` its micro-batches.
    """

    def cells(sender: int, receiver: int) -> list[tuple[int, int]]:
        """What a rank tells another one: micro-batches and sources."""
        has, needs = set(layers_of(sender)), set(layers_of(receiver))
        told = [number for number, one in enumerate(sources) if one.layer in has and one.wanted & needs]
        return list(itertools.product(shares[sender], told))

    if group.size > talk.DIRECT or len({frozenset(layers_of(rank)) for rank in range(group.size)}) == 1:
        own = [cells(rank, rank) for rank in range(group.size)]
        everything, mine = _among_all(group, sources, measured, own, device), set(layers_of(group.rank))
        return {cell: calls for cell, calls in everything.items() if sources[cell[1]].wanted & mine}
    others = [rank for rank in range(group.size) if rank != group.rank]
    outgoing = {rank: cells(group.rank, rank) for rank in others}
    incoming = {rank: cells(rank, group.rank) for rank in others}
    found = dict(measured)
    rooms = {rank: _room(sources, its, device) for rank, its in incoming.items() if its}
    _swap(group, {rank: _first(sources, measured, its, device) for rank, its in outgoing.items() if its}, rooms)
    more: dict[int, list[tuple[int, int]]] = {}  # by rank: a cell for each further call
    for rank, room in rooms.items():
        for cell, (calls, one) in zip(incoming[rank], _read(sources, incoming[rank], room), strict=True):
            found[cell] = [one] if calls else []
            more.setdefault(rank, []).extend([cell] * (calls - 1))
    rooms = {rank: _room(sources, its, device) for rank, its in more.items() if its}
    letters = {rank: _rest(sources, measured, its, device) for rank, its in outgoing.items()}
    _swap(group, {rank: letter for rank, letter in letters.items() if letter is not None}, rooms)
    for rank, room in rooms.items():
        for cell, (_, one) in zip(more[rank], _read(sources, more[rank], room), strict=True):
            found[cell].append(one)
    return found


def _among_all(
    group: Group,
    sources: Sequence[Source],
    measured: Measured,
    cells: Sequence[list[tuple[int, int]]],
    device: torch.device,
) -> Measured:
    """Return all measurements of everybody. ``cells``: those of each rank."""
    found = dict(measured)
    more: list[list[tuple[int, int]]] = []  # by rank: a cell for each further call
    first = _first(sources, measured, cells[group.rank], device)
    for its, letter in zip(cells, _share(group, sources, first, cells), strict=True):
        read = list(zip(its, _read(sources, its, letter), strict=True))
        found |= {cell: [one] if calls else [] for cell, (calls, one) in read if cell not in measured}
        more.append([cell for cell, (calls, _) in read for _ in range(calls - 1)])
    if any(more):
        rest = _rest(sources, measured, cells[group.rank], device)
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        for its, letter in zip(more, _share(group, sources, nothing if rest is None else rest, more), strict=True):
            for cell, (_, one) in zip(its, _read(sources, its, letter), strict=True):
                if cell not in measured:
                    found[cell].append(one)
    return found


def _share(
    group: Group, sources: Sequence[Source], letter: Tensor, cells: Sequence[list[tuple[int, int]]]
) -> list[Tensor]:
    """Return everybody's letters, by rank. They are copies, because numbers in them must be aligned."""
    sizes = [_size(sources, its) for its in cells]
    return [part.clone() for part in share(group, letter, sizes, tag=tags.STATISTICS)]


def _swap(group: Group, letters: dict[int, Tensor], rooms: dict[int, Tensor]) -> None:
    """Send a letter to some ranks, and fill the rooms for those of others."""
    if letters or rooms:
        sends = [(rank, letter, tags.STATISTICS) for rank, letter in letters.items()]
        group.finish(group.start(sends, [(rank, room, tags.STATISTICS) for rank, room in rooms.items()]))


def _room(sources: Sequence[Source], cells: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.empty(_size(sources, cells), dtype=torch.uint8, device=device)


def _size(sources: Sequence[Source], cells: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of a letter with one call of each cell."""
    return sum(8 * HEAD + sources[number].bytes for _, number in cells)


def _first(
    sources: Sequence[Source], measured: Measured, cells: Sequence[tuple[int, int]], device: torch.device
) -> Tensor:
    """Return a letter with the first call of each cell; zeros for a module that was not called."""
    listed = []
    for cell in cells:
        calls = measured.get(cell) or []
        listed.append((len(calls), calls[0] if calls else _nothing(sources[cell[1]], device)))
    return _letter(listed, device)


def _rest(
    sources: Sequence[Source], measured: Measured, cells: Sequence[tuple[int, int]], device: torch.device
) -> Tensor | None:
    """Return a letter with all further calls of the cells; None if there are none."""
    further = [(1, one) for cell in cells for one in measured.get(cell, [])[1:]]
    return _letter(further, device) if further else None


def _letter(listed: Sequence[tuple[int, Measurement]], device: torch.device) -> Tensor:
    numbers = [[calls, one.momentum, one.counted, one.is_narrow] for calls, one in listed]
    heads = torch.tensor(numbers, dtype=torch.float64, device=device)
    values = [value.reshape(-1) for _, one in listed for value in one.values]
    if len({value.dtype for value in values}) == 1:  # the usual case, and quicker
        values = [torch.cat(values)]
    return torch.cat([heads.view(-1).view(torch.uint8), *(value.view(torch.uint8) for value in values)])


def _read(sources: Sequence[Source], cells: Sequence[tuple[int, int]], letter: Tensor) -> list[tuple[int, Measurement]]:
    """Return what a letter says of each cell: how often the module was called, and a measurement."""
    forms = [form for _, number in cells for form in sources[number].forms]
    heads, rest = letter[: 8 * HEAD * len(cells)], letter[8 * HEAD * len(cells) :]
    dtypes = {dtype for _, dtype in forms}
    if len(dtypes) == 1:
        parts = rest.view(dtypes.pop()).split_with_sizes([shape.numel() for shape, _ in forms])
    else:  # copies, for a view of bytes as another type must begin at a whole number of elements
        split = rest.split_with_sizes([shape.numel() * dtype.itemsize for shape, dtype in forms])
        parts = tuple(part.clone().view(dtype) for part, (_, dtype) in zip(split, forms, strict=True))
    values = iter([part.view(shape) for part, (shape, _) in zip(parts, forms, strict=True)])
    found = []
    numbers = heads.view(torch.float64).view(-1, HEAD).tolist()
    for (_, number), (calls, momentum, counted, narrow) in zip(cells, numbers, strict=True):
        own = list(itertools.islice(values, len(sources[number].forms)))
        found.append((int(calls), Measurement(own, momentum, int(counted), bool(narrow))))
    return found


def _nothing(source: Source, device: torch.device) -> Measurement:
    return Measurement([torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in source.forms])
