"""Carries values from one stage to the next: in order, and while the workers compute.

A value is any nest of tensors, numbers and text. A message has up to three parts:

1. a header of two integers: the number of the value's *description* (its structure, with the tensors' types and
   shapes), and the length of that description's text, or 0 if it was sent before;
2. the description's text, the first time: shapes may change from micro-batch to micro-batch, but few are new;
3. the tensors, each with the tag of its description.

A transfer can only start when the receiver has offered memory for it. So the receiver offers memory for the next
header at all times; and when two messages in a row had the same description, it also offers memory for a third, before
that is sent. Then the sender's transfer runs at once, and no thread of the receiver has to wake up for it. A message
with another description waits until the receiver has read its header and made room.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast import codec
from holdfast.cluster.group import Group
from holdfast.cluster.talk import Transfer
from holdfast.engine.boundary import lies_well
from holdfast.errors import UsageError
from holdfast.log.record import Message
from holdfast.words import a_kind

REMEMBERED = 256  # descriptions that both ends remember; both forget the oldest at the same message
UNCLAIMED = 4  # rooms (memory for messages that did not come) at a time: an offer to receive cannot be taken back


@dataclass(frozen=True, kw_only=True)
class Description:
    """The structure of a value, and the types and shapes of its tensors: all but the tensors' contents."""

    number: int  # counted by the sender
    encoded: Any  # the value, with numbers in place of tensors
    facts: Sequence[tuple[str, list[int], list[int], bool]]  # dtype, shape, stride, whether it requires a gradient

    @staticmethod
    def of(text: str, *, number: int = 0) -> Description:
        """Read the text that ``describe`` makes."""
        encoded, facts = json.loads(text)
        return Description(number=number, encoded=encoded, facts=facts)

    def room(self, device: torch.device) -> list[Tensor]:
        """Make tensors without contents, to receive into."""
        return [
            torch.empty_strided(shape, stride, dtype=codec.dtype_of(dtype), device=device).requires_grad_(wants)
            for dtype, shape, stride, wants in self.facts
        ]

    def assemble(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value with these tensors in it."""
        return codec.decode(self.encoded, lambda number: tensors[number])


class Outbox:
    """Sends messages to one neighbour, one after the other, as long as a generation lasts."""

    def __init__(self, group: Group, peer: int, tag: int, device: torch.device) -> None:
        self._group, self._peer, self._tag, self._device = group, peer, tag, device
        self._numbers: dict[str, int] = {}  # text of a description → its number; the oldest first
        self._next = 0

    def send(self, message: Message) -> list[Any]:
        """Start to send; return what must be kept until the message is known to have arrived. Raises ``Broken``."""
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
    """Memory that was offered for one message with a certain description."""

    tensors: list[Tensor]
    works: list[Any]  # the receives under way; done when the tensors are filled


class Inbox:
    """Receives values from one neighbour, in order, as long as a generation lasts."""

    def __init__(self, group: Group, peer: int, tag: int, device: torch.device) -> None:
        self._group, self._peer, self._tag, self._device = group, peer, tag, device
        self._known: dict[int, Description] = {}
        self._rooms: dict[int, _Room] = {}  # by description; offered before it is known that they are needed
        self._last: int | None = None  # the number of the last message's description
        self._header = self._ask_for_header()

    def _ask_for_header(self) -> tuple[Tensor, list[Any]]:
        header = torch.zeros(2, dtype=torch.int64, device=self._device)
        return header, self._group.start([], [(self._peer, header, self._tag)])

    def take(self) -> Any:
        """Wait for the next value and return it. Raises ``Broken`` if the generation ends first."""
        found: list[tuple[Description, _Room]] = []
        self._group.finish(self._arrivals(found))
        ((description, room),) = found
        self._header = self._ask_for_header()
        # Two in a row are alike: a third is likely. It gets its memory now, before it is sent.
        if description.number == self._last and len(self._rooms) < UNCLAIMED:
            self._rooms[description.number] = self._make_room(description)
        self._last = description.number
        return description.assemble(room.tensors)

    def _arrivals(self, found: list[tuple[Description, _Room]]) -> Iterator[Any]:
        """Yield the receives to wait for, one after the other; put what arrived into ``found``.

        A generator, because each receive tells what comes next: the group waits for what is yielded, then goes on.
        """
        header, works = self._header
        self._header = (header, [])  # ``close`` must not wait for it again
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
        """Offer memory for one message with this description."""
        tensors = description.room(self._device)
        tag = self._tag + 1 + description.number
        filled: list[Transfer] = [(self._peer, in_memory_order(t), tag) for t in tensors if t.numel()]
        return _Room(tensors=tensors, works=self._group.start([], filled))

    def close(self) -> None:
        """Return when nothing is written any more into memory that was offered. Called after the group's abort."""
        self._group.drain(self._header[1])
        for room in self._rooms.values():
            self._group.drain(room.works)


def forget_oldest(known: dict[Any, Any]) -> None:
    """Forget the description that came first, if more than ``REMEMBERED`` are known.

    Both ends call this for the same messages, so both always know the same descriptions.
    """
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


# --- descriptions ------------------------------------------------------------------------------------


def read(message: Message) -> Any:
    """Return the value of a message, as the other stage would have received it.

    It shares memory with the message's tensors.

    >>> read(describe((torch.ones(2), 7)))
    (tensor([1., 1.]), 7)
    """
    text, tensors = message
    description = Description.of(text)
    wanted = zip(tensors, description.facts, strict=True)
    return description.assemble([tensor.detach().requires_grad_(wants) for tensor, (*_, wants) in wanted])


def describe(value: Any) -> Message:
    """Return a value as a message: the text of its description, and its distinct tensors, dense and aligned.

    Raises ``UsageError`` if there is something in it that cannot be sent.

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
    """Return a flat view of a dense tensor's elements, as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _refuse_subclasses(value: Any) -> None:
    """Raise ``UsageError`` for subclasses of tuple, list and dict: the other stage would get a plain one instead."""
    if isinstance(value, tuple | list | dict):
        if type(value) not in (tuple, list, dict, torch.Size):
            raise UsageError(
                f"a layer gives {a_kind(value)}, which cannot be sent to another worker as such",
                hint="tensors, numbers and text, in tuples, lists or dicts",
            )
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_subclasses(item)
