"""Links: what is computed from trips, on a clock of the test's own, and a real pair of processes."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster import wire
from holdfast.engine.profile import links
from holdfast.errors import HoldfastError
from holdfast.plan.profile import Link

TOKEN = "the right token"


@given(latency=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e12))
def test_a_link_that_keeps_to_the_formula_is_found(latency: float, bandwidth: float) -> None:
    link = links.fit({size: latency + size / bandwidth for size in links.SIZES})
    assert link.latency == pytest.approx(latency, rel=1e-3)
    assert link.seconds(32 << 20) == pytest.approx(latency + (32 << 20) / bandwidth, rel=1e-3)


@given(st.lists(st.floats(1e-6, 10.0), min_size=len(links.SIZES), max_size=len(links.SIZES)))
def test_whatever_was_measured_gives_a_link_that_can_be_planned_with(times: list[float]) -> None:
    link = links.fit(dict(zip(links.SIZES, times, strict=True)))
    assert 0 < link.bandwidth < float("inf")
    assert 0 <= link.latency < float("inf")


class Pretended:
    """A group whose messages take as long as a formula says, on a clock that nobody waits for."""

    def __init__(self, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link = link
        self.now = 0.0
        self.sizes: list[int] = []
        monkeypatch.setattr(links.time, "perf_counter", lambda: self.now)

    def start(self, sends: Any, receives: Any) -> list[int]:
        self.sizes += [tensor.nbytes for _, tensor, tag in sends if tag == links.MESSAGE]
        return [tensor.nbytes for _, tensor, _ in receives]

    def finish(self, receives: list[int]) -> None:
        self.now += sum(2 * self.link.seconds(size) for size in receives)

    def vote(self, ballot: torch.Tensor) -> None: ...


def test_the_clock_measures_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = links.clock(Pretended(Link(bandwidth=1e9, latency=1e-3), monkeypatch))  # type: ignore[arg-type]
    assert measured.link.latency == pytest.approx(1e-3)
    assert measured.link.bandwidth == pytest.approx(1e9)
    assert measured.error < 1e-6


def test_one_slow_trip_in_a_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disturbed(Pretended):
        trips = 0

        def finish(self, receives: list[int]) -> None:
            super().finish(receives)
            self.trips += 1
            self.now += 4e-3 if self.trips % 2 else 0.0  # half of all trips wait for the scheduler

    measured = links.clock(Disturbed(Link(bandwidth=1e9, latency=1e-4), monkeypatch))  # type: ignore[arg-type]
    assert measured.link.latency == pytest.approx(1e-4)


def test_over_a_slow_link_large_messages_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Pretended(Link(bandwidth=1.25e6, latency=0.02), monkeypatch)  # 10 Mbit/s
    measured = links.clock(group)  # type: ignore[arg-type]
    assert max(group.sizes) == 1 << 20  # 0.86 s
    assert measured.link.bandwidth == pytest.approx(1.25e6)


# --- for real -----------------------------------------------------------------------------------------


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


def test_two_processes_of_this_host() -> None:
    measured = links.measure_inside()
    assert measured.seconds.keys() == set(links.SIZES)
    assert measured.link.bandwidth > 10e6  # a loopback of less would be a mistake in the units
    assert measured.link.latency < 0.05
    assert measured.seconds[32 << 20] > measured.seconds[4]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ROUNDS", 1)


@pytest.mark.usefixtures("quick")
def test_who_does_not_know_the_token_is_refused_and_the_next_one_served() -> None:
    server = Served()
    with pytest.raises(HoldfastError, match=r"refuses: wrong token \(the same HOLDFAST_TOKEN on both"):
        links.measure_peer(server.address, "a wrong token")
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert server.peers == []
    assert links.measure_peer(server.address, TOKEN).link.bandwidth > 10e6
    assert server.ended()
    assert server.peers == ["127.0.0.1"]


@pytest.mark.usefixtures("quick")
def test_a_peer_that_goes_away_is_forgotten() -> None:
    server = Served()
    line = wire.Line(server.address, TOKEN, {"profile": 1})
    line.close()
    assert links.measure_peer(server.address, TOKEN).link.bandwidth > 10e6
    assert server.ended()


def test_a_server_that_goes_away_is_an_error_in_words() -> None:
    async def meet_and_leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.accept(reader, writer, TOKEN)
        await reader.readline()
        writer.close()

    async def scene() -> None:
        async with await asyncio.start_server(meet_and_leave, "127.0.0.1", 0) as server:
            address = server.sockets[0].getsockname()
            with pytest.raises(HoldfastError, match="could not be measured: the generation"):
                await asyncio.to_thread(links.measure_peer, address, TOKEN)

    asyncio.run(scene())


def test_nobody_there_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    with pytest.raises(HoldfastError, match=r"holdfast profile --serve 127\.0\.0\.1"):
        links.measure_peer(address, TOKEN)
