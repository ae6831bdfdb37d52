"""Copying of state to workers that lack it: only missing units are sent, and all holders share the sending.

All transfers have a fixed order, so no message needs a name. ``carry_out`` gives every worker the same list of moves,
sorted by unit. Each sender first sends a text that describes all its units for one receiver, then their tensors in the
order of the list. Each receiver takes units in the same order. Tensors of one sender under one tag arrive in order.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast import codec
from holdfast.cluster import faults, tags
from holdfast.cluster.group import Group
from holdfast.cluster.talk import Transfer
from holdfast.commit.cohort import Traffic
from holdfast.engine.state import State
from holdfast.errors import Broken, HoldfastError

WINDOW = 64 << 20  # bytes asked for from one sender at a time: keeps the link busy, and bounds the extra memory


@dataclass(frozen=True, kw_only=True)
class Move:
    """A unit of state that goes from one rank to another."""

    unit: int
    sender: int
    receiver: int


def moves(held: Sequence[Collection[int]], wanted: Sequence[Collection[int]], sizes: Mapping[int, int]) -> list[Move]:
    """Plan the moves after which every rank holds the units it wants.

    ``held`` and ``wanted``: units by rank. ``sizes``: bytes of each unit. The holder with the least to send so far
    sends a unit. Raises ``HoldfastError`` if nobody holds a wanted unit.

    >>> [(move.unit, move.sender) for move in moves([{0, 1}, {0, 1}, set()], [{0}, {1}, {0, 1}], {0: 8, 1: 8})]
    [(0, 0), (1, 1)]
    """
    load = [0] * len(held)
    missing: defaultdict[int, list[int]] = defaultdict(list)  # the receivers of each unit
    for receiver, units in enumerate(wanted):
        for unit in units:
            if unit not in held[receiver]:
                missing[unit].append(receiver)
    found = []
    # Large units first: the small ones then even out the load.
    for unit in sorted(missing, key=lambda number: (-sizes[number], number)):
        # A heap, as there may be hundreds of holders, and as many receivers. Only what it gives changes a load.
        holders = [(load[rank], rank) for rank, units in enumerate(held) if unit in units]
        if not holders:
            raise HoldfastError(
                f"nobody holds part {unit} of the state", hint="this is a mistake of ours: please tell us"
            )
        heapq.heapify(holders)
        for receiver in missing[unit]:
            sender = holders[0][1]
            load[sender] += sizes[unit]
            heapq.heapreplace(holders, (load[sender], sender))
            found.append(Move(unit=unit, sender=sender, receiver=receiver))
    return sorted(found, key=lambda move: (move.unit, move.receiver))


def tell(group: Group, state: State, *, teller: int, listeners: Collection[int]) -> None:
    """Send the listeners the state that is not part of any unit: step, settings, costs of the layers."""
    value = state.common() if group.rank == teller else None
    heard = pass_on(group, value, sender=teller, listeners=listeners, device=state.model.device)
    if group.rank in listeners:
        state.set_common(heard)


def pass_on(group: Group, value: Any, *, sender: int, listeners: Collection[int], device: torch.device) -> Any:
    """Return the sender's value on the sender and the listeners; other ranks get back what they passed.

    ``value``: numbers, text and tensors, in lists and dicts. May raise ``Broken``.
    """
    if group.rank == sender:
        for listener in listeners:
            group.start(_message(codec.flatten(value), listener, device), [])
    if group.rank not in listeners:
        return value
    text = _receive_text(group, sender, device)
    tensors = [tensor.to(device) for tensor in codec.empty_tensors(text)]
    group.finish(group.start([], [(sender, tensor, tags.TENSOR) for tensor in tensors if tensor.numel()]))
    return codec.unflatten(text, tensors)


def carry_out(group: Group, state: State, planned: Sequence[Move], arrived: Callable[[int], None]) -> Traffic:
    """Send and receive the planned units; return this worker's traffic. Every member calls this with the same plan.

    ``arrived`` is called with the number of each unit that has arrived whole. Tensors that are sent must not change
    until the next vote. May raise ``Broken``: then no receive writes into this worker's memory any more.
    """
    units, device, total = state.model.units, state.model.device, 0
    sending: defaultdict[int, list[int]] = defaultdict(list)  # the units for each receiver
    for move in planned:
        if move.sender == group.rank:
            sending[move.receiver].append(move.unit)
    for receiver, sent in sorted(sending.items()):
        faults.point("copy")
        flat = [codec.flatten(state.read(units[unit])) for unit in sent]
        text = json.dumps([text.decode() for text, _ in flat]).encode()
        tensors = [tensor for _, each in flat for tensor in each]
        group.start(_message((text, tensors), receiver, device), [])
        total += len(text) + sum(tensor.nbytes for tensor in tensors)
    mine = [move for move in planned if move.receiver == group.rank]
    coming: dict[int, _Coming] = {}
    try:
        for sender in sorted({move.sender for move in mine}):
            coming[sender] = _Coming(group, sender, device)
        for move in mine:
            faults.point("copy")
            state.write(units[move.unit], coming[move.sender].take())
            arrived(move.unit)
    except Broken:
        for each in coming.values():
            each.drain()
        raise
    return Traffic(received=sum(each.bytes for each in coming.values()), sent=total)


class _Coming:
    """The units that one sender sends, in order. ``WINDOW`` bytes of them are asked for ahead."""

    def __init__(self, group: Group, sender: int, device: torch.device) -> None:
        text = _receive_text(group, sender, device)
        self.bytes = len(text)
        self._group, self._sender, self._device = group, sender, device
        self._texts = deque(each.encode() for each in json.loads(text))
        self._asked: deque[tuple[bytes, list[torch.Tensor], list[Any]]] = deque()
        self._ask()

    def _ask(self) -> None:
        while self._texts and sum(t.nbytes for _, tensors, _ in self._asked for t in tensors) < WINDOW:
            text = self._texts.popleft()
            tensors = [tensor.to(self._device) for tensor in codec.empty_tensors(text)]
            wanted = [(self._sender, tensor, tags.TENSOR) for tensor in tensors if tensor.numel()]
            self._asked.append((text, tensors, self._group.start([], wanted)))
            self.bytes += sum(tensor.nbytes for tensor in tensors)

    def take(self) -> Any:
        """Wait for the next unit and return it; ask for more."""
        text, tensors, works = self._asked.popleft()
        self._group.finish(works)
        self._ask()
        return codec.unflatten(text, tensors)

    def drain(self) -> None:
        """Wait, after a break, until no receive writes into memory that is about to be freed."""
        for _, _, works in self._asked:
            self._group.drain(works)


def _message(flat: tuple[bytes, list[torch.Tensor]], receiver: int, device: torch.device) -> list[Transfer]:
    """Return the transfers of a flattened value: length of the text, text, tensors that are not empty."""
    text, tensors = flat
    header = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    length = torch.tensor([len(text)], device=device)
    sends: list[Transfer] = [(receiver, length, tags.LENGTH), (receiver, header, tags.TEXT)]
    return sends + [(receiver, t.to(device).contiguous(), tags.TENSOR) for t in tensors if t.numel()]


def _receive_text(group: Group, sender: int, device: torch.device) -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    group.finish(group.start([], [(sender, length, tags.LENGTH)]))
    header = torch.zeros(int(length), dtype=torch.uint8, device=device)
    group.finish(group.start([], [(sender, header, tags.TEXT)]))
    return header.cpu().numpy().tobytes()
