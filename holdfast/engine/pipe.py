"""Between two stages: what one gives arrives at the other, in order and beside the computing.

Shapes may change from micro-batch to micro-batch, so a message begins with the number of its description, and a
description is sent once. Most messages are as the one before; room for one more such is there before it comes, so that
nobody has to wake up in order that it can be sent. One that is different waits until its room is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast import codec
from holdfast.cluster.group import Group, Transfer
from holdfast.engine.boundary import lies_well
from holdfast.errors import UsageError
from holdfast.log.record import Message

REMEMBERED = 256  # descriptions; both ends forget the oldest alike
UNCLAIMED = 4  # rooms that may be left unused, where shapes change: what is asked for cannot be taken back


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a value is made of, but for the tensors' contents."""

    number: int
    encoded: Any
    facts: Sequence[tuple[str, list[int], list[int], bool]]  # dtype, shape, stride, whether a gradient is wanted

    @staticmethod
    def of(text: str, *, number: int = 0) -> Description:
        encoded, facts = json.loads(text)
        return Description(number=number, encoded=encoded, facts=facts)

    def room(self, device: torch.device) -> list[Tensor]:
        return [
            torch.empty_strided(shape, stride, dtype=codec.dtype_of(dtype), device=device).requires_grad_(wants)
            for dtype, shape, stride, wants in self.facts
        ]

    def assemble(self, tensors: Sequence[Tensor]) -> Any:
        return codec.decode(self.encoded, lambda number: tensors[number])


class Outbox:
    """Sends values to one neighbour, one after the other, as long as a generation lasts."""

    def __init__(self, group: Group, peer: int, tag: int, device: torch.device) -> None:
        self._group, self._peer, self._tag, self._device = group, peer, tag, device
        self._numbers: dict[str, int] = {}  # the oldest first
        self._next = 0

    def send(self, message: Message) -> list[Any]:
        """Returns what must be kept until the message is known to have arrived."""
        text, tensors = message
        is_new = text not in self._numbers
        if is_new:
            self._numbers[text] = self._next
            self._next += 1
            forget_oldest(self._numbers)
        number = self._numbers[text]
        header = torch.tensor([number, len(text) if is_new else 0], device=self._device)
        sends: list[Transfer] = [(self._peer, header, self._tag)]
        if is_new:
            letters = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8).to(self._device)
            sends.append((self._peer, letters, self._tag))
        sends += [(self._peer, in_memory_order(t), self._tag + 1 + number) for t in tensors if t.numel()]
        return self._group.send(sends)


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Memory for a value that was asked for."""

    tensors: list[Tensor]
    works: list[Any]


class Inbox:
    """Takes values from one neighbour, in order, as long as a generation lasts."""

    def __init__(self, group: Group, peer: int, tag: int, device: torch.device) -> None:
        self._group, self._peer, self._tag, self._device = group, peer, tag, device
        self._known: dict[int, Description] = {}
        self._rooms: dict[int, _Room] = {}  # by description; made before it is known that they are needed
        self._last: int | None = None
        self._header = self._ask_for_header()

    def _ask_for_header(self) -> tuple[Tensor, list[Any]]:
        header = torch.zeros(2, dtype=torch.int64, device=self._device)
        return header, self._group.start([], [(self._peer, header, self._tag)])

    def take(self) -> Any:
        """The next value, once all of it is here."""
        found: list[tuple[Description, _Room]] = []
        self._group.finish(self._arrivals(found))
        ((description, room),) = found
        self._header = self._ask_for_header()
        if description.number == self._last and len(self._rooms) < UNCLAIMED:
            self._rooms[description.number] = self._make_room(description)
        self._last = description.number
        return description.assemble(room.tensors)

    def _arrivals(self, found: list[tuple[Description, _Room]]) -> Iterator[Any]:
        """What to wait for, one after the other: only the header tells what comes after it."""
        header, works = self._header
        self._header = (header, [])  # a receive that was waited for must not be waited for again
        yield from works
        self._group.check()
        number, length = header.tolist()
        if length:
            letters = torch.zeros(length, dtype=torch.uint8, device=self._device)
            yield from self._group.start([], [(self._peer, letters, self._tag)])
            self._group.check()
            text = letters.cpu().numpy().tobytes().decode()
            self._known[number] = Description.of(text, number=number)
            forget_oldest(self._known)
        description = self._known[number]
        room = self._rooms.pop(number, None) or self._make_room(description)
        found.append((description, room))
        yield from room.works

    def _make_room(self, description: Description) -> _Room:
        tensors = description.room(self._device)
        tag = self._tag + 1 + description.number
        filled: list[Transfer] = [(self._peer, in_memory_order(t), tag) for t in tensors if t.numel()]
        return _Room(tensors=tensors, works=self._group.start([], filled))

    def close(self) -> None:
        """After an abort: returns when nothing is written any more into what was to be received."""
        self._group.drain(self._header[1])
        for room in self._rooms.values():
            self._group.drain(room.works)


def forget_oldest(known: dict[Any, Any]) -> None:
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


# --- descriptions ------------------------------------------------------------------------------------


def read(message: Message) -> Any:
    """The value of a message, as it would have arrived. The message's tensors are not written to.

    >>> read(describe((torch.ones(2), 7)))
    (tensor([1., 1.]), 7)
    """
    text, tensors = message
    description = Description.of(text)
    wanted = zip(tensors, description.facts, strict=True)
    return description.assemble([tensor.detach().requires_grad_(wants) for tensor, (*_, wants) in wanted])


def describe(value: Any) -> Message:
    """A value as text and its distinct tensors, each lying well.

    >>> x = torch.ones(2, 3)
    >>> text, tensors = describe({"x": x, "again": (x, 7)})
    >>> len(tensors), text
    (1, '[{"x": {"$tensor": 0}, "again": {"$tuple": [{"$tensor": 0}, 7]}}, [["float32", [2, 3], [3, 1], false]]]')
    """
    known: dict[int, int] = {}
    tensors: list[Tensor] = []

    def number_of(found: Any) -> int | None:
        if not isinstance(found, Tensor):
            return None
        if found.layout is not torch.strided or found.is_quantized or found.is_nested:
            raise UsageError(
                "a layer gives a sparse, nested or quantised tensor, which cannot be sent to another worker"
            )
        if id(found) not in known:
            known[id(found)] = len(tensors)
            tensors.append(found)
        return known[id(found)]

    _refuse_subclasses(value)
    encoded = codec.encode(value, number_of, "what the layer gives")
    sent = [tensor.detach() if lies_well(tensor) else tensor.detach().clone() for tensor in tensors]
    facts = [
        (codec.dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride()), given.requires_grad)
        for tensor, given in zip(sent, tensors, strict=True)
    ]
    return json.dumps([encoded, facts]), sent


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _refuse_subclasses(value: Any) -> None:
    """The other stage would get a plain tuple or dict, and not what its layer expects."""
    if isinstance(value, tuple | list | dict):
        if type(value) not in (tuple, list, dict, torch.Size):
            raise UsageError(
                f"a layer gives a {type(value).__name__}, which cannot be sent to another worker as such",
                hint="tensors, numbers and text, in tuples, lists or dicts",
            )
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_subclasses(item)
