"""The messages of a connection: any order of asking, any cut of the bytes, and what a break leaves."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.links.frames import SMALL, Frames, Receive, carry

SIZES = [0, 1, 7, 300, SMALL, SMALL + 1, 3 * SMALL]


def is_done(receive: Receive) -> bool:
    return not receive._done.locked()


def carry_some(sender: Frames, receiver: Frames, most: int) -> None:
    """Move a few bytes."""
    if sender.outbox:
        count = min(len(sender.outbox[0]), len(receiver.wanted), most)
        receiver.wanted[:count] = sender.outbox[0][:count]
        sender.sent(count)
        receiver.arrived(count)


@given(
    messages=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(SIZES)), max_size=12),
    seed=st.integers(0, 10**6),
)
def test_every_message_arrives_in_the_order_of_its_tag(messages: list[tuple[int, int]], seed: int) -> None:
    chance = random.Random(seed)
    one, other = Frames(), Frames()
    sent: defaultdict[int, list[bytes]] = defaultdict(list)
    rooms: defaultdict[int, list[tuple[Receive, bytearray]]] = defaultdict(list)
    to_send, to_ask = list(messages), list(messages)
    by_tag = {tag: [m for m in messages if m[0] == tag] for tag, _ in messages}
    asked: defaultdict[int, int] = defaultdict(int)
    while to_send or to_ask or one.outbox or other.outbox:
        kind = chance.randrange(4)
        if kind == 0 and to_send:
            tag, size = to_send.pop(0)
            data = chance.randbytes(size)
            sent[tag].append(data)
            one.send(tag, memoryview(data))
        elif kind == 1 and to_ask:
            tag, _ = to_ask.pop(chance.randrange(len(to_ask)))  # any tag next, but each in its order
            size = by_tag[tag][asked[tag]][1]
            asked[tag] += 1
            room = bytearray(size)
            rooms[tag].append((other.receive(tag, memoryview(room)), room))
        elif kind == 2:
            carry_some(one, other, chance.choice([1, 5, 10**6]))
        else:
            carry_some(other, one, chance.choice([1, 5, 10**6]))
    for tag, expected in sent.items():
        for receive, room in rooms[tag]:
            receive.wait()
            assert room is not None
        assert [bytes(room) for _, room in rooms[tag]] == expected


def test_a_large_message_waits_for_room_and_is_not_copied() -> None:
    one, other = Frames(), Frames()
    data, room = bytes(2 * SMALL), bytearray(2 * SMALL)
    one.send(1, memoryview(data))
    carry(one, other)
    assert not one.outbox, "nobody has offered room"
    receive = other.receive(1, memoryview(room))
    carry(other, one)
    assert len(one.outbox) == 2
    one.sent(16)
    assert one.outbox[0].obj is data, "it goes out from where it is"
    other._header[:] = b"\0" * 7 + b"\x01" + (2 * SMALL).to_bytes(8, "big")
    other.arrived(16)
    assert other.wanted.obj is room, "and comes in where it is wanted"
    other.arrived(2 * SMALL)
    assert is_done(receive)


def test_a_small_message_does_not_overtake_a_large_one_of_its_tag() -> None:
    one, other = Frames(), Frames()
    one.send(1, memoryview(bytes(2 * SMALL)))
    one.send(1, memoryview(b"small"))
    one.send(2, memoryview(b"other"))
    carry(one, other)
    rooms = [bytearray(2 * SMALL), bytearray(5), bytearray(5)]
    receives = [other.receive(tag, memoryview(room)) for tag, room in zip((1, 1, 2), rooms, strict=True)]
    assert [is_done(receive) for receive in receives] == [False, False, True]
    carry(other, one)
    carry(one, other)
    assert all(map(is_done, receives))
    assert rooms[1] == b"small"


def test_a_break_fails_what_is_open_and_keeps_what_has_come() -> None:
    one, other = Frames(), Frames()
    one.send(1, memoryview(b"early"))
    one.send(2, memoryview(b"half of it"))
    for _ in range(3):
        carry_some(one, other, 10**6)
    half = other.receive(2, memoryview(bytearray(10)))
    carry_some(one, other, 4)
    waiting = other.receive(3, memoryview(bytearray(5)))
    other.fail("the other side is gone")
    other.fail("something else")
    room = bytearray(5)
    other.receive(1, memoryview(room)).wait()
    assert room == b"early"
    for receive in (half, waiting, other.receive(4, memoryview(bytearray(1)))):
        with pytest.raises(RuntimeError, match="the other side is gone"):
            receive.wait()
    assert not other.outbox


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("size", [3, SMALL + 5])
def test_a_message_of_another_size_is_an_error_in_words(early: bool, size: int) -> None:
    """Workers that do different things: nothing is written beyond the room."""
    one, other = Frames(), Frames()
    room = bytearray(4)
    if early and size <= SMALL:
        one.send(1, memoryview(bytes(size)))
        carry(one, other)
        with pytest.raises(RuntimeError, match="3 bytes"):
            other.receive(1, memoryview(room)).wait()
        return
    other.receive(1, memoryview(room))
    one._offers[1] += size > SMALL
    one.send(1, memoryview(bytes(size)))
    with pytest.raises(RuntimeError, match=f"{size} bytes"):
        carry(one, other)
    assert room == bytes(4)


def test_a_large_message_that_nobody_has_asked_for_is_refused() -> None:
    """It would take memory that the receiver has not offered."""
    one, other = Frames(), Frames()
    one._offers[1] += 1
    one.send(1, memoryview(bytes(SMALL + 1)))
    with pytest.raises(RuntimeError, match="no room"):
        carry(one, other)
