"""Links between real processes, or threads that act as such."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from holdfast.cluster import wire
from holdfast.cluster.gate import Gate
from holdfast.engine.profile import links, round_trips
from holdfast.errors import HoldfastError

TOKEN = "the right token"


class Served:
    """A server in a thread of this process."""

    def __init__(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listening.getsockname()
        self.peers: list[str] = []
        self._thread = threading.Thread(
            target=lambda: self.peers.append(asyncio.run(links._serve(listening, TOKEN))), daemon=True
        )
        self._thread.start()

    def ended(self) -> bool:
        self._thread.join(10)
        return not self._thread.is_alive()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trips, "ROUNDS", 1)


def test_two_processes_of_this_host() -> None:
    measured = links.measure_inside()
    tried = list(measured.seconds)
    assert tried == list(round_trips.SIZES[: len(tried)]), "the largest are left out where a message takes long"
    assert len(tried) > 1
    assert 0 < measured.link.bandwidth < float("inf")


def test_who_does_not_know_the_token_is_refused_and_the_next_one_served() -> None:
    server = Served()
    with pytest.raises(HoldfastError, match="HOLDFAST_TOKEN"):
        links.measure_peer(server.address, "a wrong token")
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert server.peers == []
    assert links.measure_peer(server.address, TOKEN).link.bandwidth > 0
    assert server.ended()
    assert server.peers == ["127.0.0.1"]


def test_a_peer_that_goes_away_is_forgotten() -> None:
    server = Served()

    async def come_and_go() -> None:
        _, writer = await wire.connect(server.address, TOKEN, lambda: {"profile": 1})
        writer.close()

    asyncio.run(come_and_go())
    assert links.measure_peer(server.address, TOKEN).link.bandwidth > 0
    assert server.ended()


def test_a_server_that_goes_away_is_an_error_in_words() -> None:
    async def meet_and_leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.Message) -> None:
        await reader.readline()

    async def scene() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        async with Gate(listening, token=TOKEN, admitted=meet_and_leave):
            address = listening.getsockname()
            with pytest.raises(HoldfastError, match=r"127\.0\.0\.1"):
                await asyncio.to_thread(links.measure_peer, address, TOKEN)

    asyncio.run(scene())


def test_nobody_there_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    with pytest.raises(HoldfastError, match=r"holdfast profile --serve 127\.0\.0\.1"):
        links.measure_peer(address, TOKEN)
