"""Sends state to those who lack it: only what is missing, the load spread over all who hold it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast import codec
from holdfast.cluster import faults, tags
from holdfast.cluster.group import Group, Transfer
from holdfast.commit.cohort import Traffic
from holdfast.engine.state import State
from holdfast.errors import Broken, HoldfastError

WINDOW = 64 << 20  # bytes under way from one sender: beside the layers' own memory, that much is taken


@dataclass(frozen=True, kw_only=True)
class Move:
    """A unit of state that goes from one rank to another."""

    unit: int
    sender: int
    receiver: int


def moves(held: Sequence[Collection[int]], wanted: Sequence[Collection[int]], sizes: Mapping[int, int]) -> list[Move]:
    """What has to be sent so that every rank holds what it wants: each unit by the holder with the least to send.

    >>> [(move.unit, move.sender) for move in moves([{0, 1}, {0, 1}, set()], [{0}, {1}, {0, 1}], {0: 8, 1: 8})]
    [(0, 0), (1, 1)]
    """
    load = [0] * len(held)
    found = []
    missing = [
        (unit, receiver) for receiver, units in enumerate(wanted) for unit in units if unit not in held[receiver]
    ]
    # The largest first: the small ones then even it out.
    for unit, receiver in sorted(missing, key=lambda pair: (-sizes[pair[0]], pair)):
        holders = [rank for rank, units in enumerate(held) if unit in units]
        if not holders:
            raise HoldfastError(
                f"nobody holds part {unit} of the state", hint="this is a mistake of ours: please tell us"
            )
        sender = min(holders, key=lambda rank: (load[rank], rank))
        load[sender] += sizes[unit]
        found.append(Move(unit=unit, sender=sender, receiver=receiver))
    return sorted(found, key=lambda move: (move.unit, move.receiver))


def tell(group: Group, state: State, *, teller: int, listeners: Collection[int]) -> None:
    """Newcomers get what is not part of any unit: the step, the settings, what the layers cost."""
    value = state.common() if group.rank == teller else None
    heard = pass_on(group, value, sender=teller, listeners=listeners, device=state.model.device)
    if group.rank in listeners:
        state.set_common(heard)


def pass_on(group: Group, value: Any, *, sender: int, listeners: Collection[int], device: torch.device) -> Any:
    """The sender's value, everywhere it is asked for; numbers, text and tensors, in lists and dicts."""
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
    """Every member calls this. What is sent must stay as it is until the next vote.

    ``arrived`` is called with each unit that is complete.
    """
    units, device, total = state.model.units, state.model.device, 0
    for receiver in sorted({move.receiver for move in planned if move.sender == group.rank}):
        faults.point("copy")
        sent = [move.unit for move in planned if (move.sender, move.receiver) == (group.rank, receiver)]
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
    """The units that one sender sends, in order: as many are asked for as keep the link busy."""

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
        text, tensors, works = self._asked.popleft()
        self._group.finish(works)
        self._ask()
        return codec.unflatten(text, tensors)

    def drain(self) -> None:
        """After a break: nothing may be written any more into memory that is given back."""
        for _, _, works in self._asked:
            self._group.drain(works)


def _message(flat: tuple[bytes, list[torch.Tensor]], receiver: int, device: torch.device) -> list[Transfer]:
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
