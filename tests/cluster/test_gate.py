"""Strangers in numbers: what each costs, and that peers get in among them."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from holdfast.cluster import descriptors, door, handshake, wire
from holdfast.cluster.gate import Gate

TOKEN = "the right token of sixteen characters and more"
HELLO = handshake.hello(handshake.PLAIN, b"n" * handshake.NONCE_BYTES)
Address = tuple[str, int]


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Gate, Address, list[wire.Message]]]:
    """A gate, its address, and the hellos of those it has let in."""
    hellos: list[wire.Message] = []

    async def admitted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.Message) -> None:
        hellos.append(hello)
        while line := await reader.readline():
            writer.write(line)

    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    async with Gate(listener, token=TOKEN, admitted=admitted) as made:
        yield made, listener.getsockname(), hellos


class Crowd:
    """Strangers that connect, say something, and stay."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._sockets: list[socket.socket] = []

    async def come(self, number: int, said: bytes = b"") -> None:
        for count in range(number):
            stranger = socket.create_connection(self._address)
            self._sockets.append(stranger)
            stranger.send(said)
            if count % 32 == 0:
                await asyncio.sleep(0)

    def leave(self) -> None:
        for stranger in self._sockets:
            stranger.close()


async def settle(made: Gate, strangers: int) -> None:
    while len(made.door.strangers) != strangers:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)  # and until the gate has heard what they say


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's time is up during the test."""
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 60.0)


@pytest.mark.parametrize("said", [b"", HELLO[:-1], HELLO, HELLO + b"x" * 31], ids=["silent", "half", "asked", "almost"])
@pytest.mark.usefixtures("patient")
def test_a_stranger_costs_less_than_a_kibibyte(said: bytes) -> None:
    number = 500

    async def scene() -> float:
        async with opened() as (made, address, _):
            crowd = Crowd(address)
            await crowd.come(100, said)  # whatever is allocated once, is
            await settle(made, 100)
            others = [socket.socket() for _ in range(number)]  # sockets of the strangers' own side are not counted
            gc.collect()
            tracemalloc.start()
            for stranger in others:
                stranger.connect(address)
                stranger.send(said)
                await asyncio.sleep(0)
            await settle(made, 100 + number)
            gc.collect()
            traced, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            crowd.leave()
            for stranger in others:
                stranger.close()
            return traced / number

    assert asyncio.run(scene()) < 1024


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("said", [b"", HELLO], ids=["silent", "asked"])
def test_peers_get_in_and_are_heard_among_more_strangers_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(door, "STRANGERS", 200)

    async def scene() -> list[wire.Message]:
        async with opened() as (made, address, hellos):
            peers = [await wire.connect(address, TOKEN, lambda: {"worker": "early"})]
            crowd = Crowd(address)
            flood = asyncio.create_task(crowd.come(700, said))
            peers.append(await wire.connect(address, TOKEN, lambda: {"worker": "among them"}))
            await flood
            await settle(made, 200)
            peers.append(await wire.connect(address, TOKEN, lambda: {"worker": "late"}))
            for reader, writer in peers:
                writer.write(wire.encode({"said": 1}))
                assert wire.decode(await reader.readline()) == {"said": 1}
                writer.close()
            crowd.leave()
            return hellos

    hellos = asyncio.run(asyncio.wait_for(scene(), 60))
    assert [hello["worker"] for hello in hellos] == ["early", "among them", "late"]


@pytest.mark.usefixtures("patient")
def test_the_oldest_stranger_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "STRANGERS", 3)

    async def scene() -> list[bool]:
        async with opened() as (made, address, _):
            strangers = []
            for _ in range(5):
                strangers.append(await asyncio.open_connection(*address))
                await asyncio.sleep(0.05)
            await settle(made, 3)
            gone = [reader.at_eof() for reader, _ in strangers]
            for _, writer in strangers:
                writer.close()
            return gone

    assert asyncio.run(scene()) == [True, True, False, False, False]


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """A limit of 300 open files for this process, hard to raise."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("patient", "few_descriptors")
def test_peers_get_in_when_the_descriptors_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the script's own files, say: strangers give theirs back, and the gate goes on when there are some again."""
    monkeypatch.setattr(descriptors, "raise_limit", lambda: 300)

    async def scene() -> list[wire.Message]:
        async with opened() as (made, address, hellos):
            crowd = Crowd(address)
            await crowd.come(40)
            await settle(made, 40)
            peer = socket.socket()
            held = []
            try:
                while True:
                    held.append(socket.socket())
            except OSError:  # now there is none left
                pass
            peer.connect(address)  # it waits to be accepted
            await settle(made, 40)  # one has gone, this one has come
            for other in held:
                other.close()
            _, writer = await wire.connect(address, TOKEN, lambda: {"worker": "late"})
            while not hellos:  # the gate reads it a moment after it was sent
                await asyncio.sleep(0.01)
            writer.close()
            peer.close()
            crowd.leave()
            return hellos

    assert asyncio.run(asyncio.wait_for(scene(), 60)) == [{"worker": "late"}]


def test_the_limit_of_descriptors_is_raised(few_descriptors: None) -> None:
    limit = descriptors.raise_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limit == soft == min(hard, descriptors.MOST)
    assert descriptors.raise_limit() == limit
