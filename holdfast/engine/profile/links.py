"""How fast two workers reach each other: messages to and fro over the transport that a run uses.

One side serves, the other one measures. Both prove first that they know the job's token (``cluster/wire.py``); over
that connection they find each other's Gloo addresses, as the workers of a generation do. Inside a host, the one that
serves is a process started for it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast.cluster import wire
from holdfast.cluster.group import Group, form
from holdfast.cluster.membership import Generation, Member
from holdfast.cluster.store import GenerationStore
from holdfast.errors import Broken, HoldfastError
from holdfast.plan.profile import Link

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)  # bytes
ROUNDS = 7  # of all sizes, so that noise hits them alike
MANY, FEW = 20, 4  # trips of one size in a round, of small and of large messages; one more that does not count
LARGE = 1 << 20  # bytes
SLOW = 0.5  # seconds: where a message takes longer, none that is larger is tried
LONGEST = 300.0  # seconds, for everything
LINGER = 5.0  # seconds for the other side to leave
STRANGERS = 16  # connections at a time that have not proved themselves
CLOCK, ECHO = 0, 1  # ranks
MESSAGE, ORDER = 1, 2  # tags; 0 is for votes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A link, and what was seen of it."""

    link: Link
    seconds: dict[int, float]  # of one message one way, by bytes
    error: float  # the fit's largest, as a share of what was measured

    def notes(self) -> dict[str, Any]:
        return {"seconds_by_bytes": {str(size): t for size, t in self.seconds.items()}, "fit_error": self.error}


def fit(seconds: Mapping[int, float]) -> Link:
    """Latency and bandwidth that come closest to what was measured, each message's error as a share of its time.

    >>> link = fit({size: 1e-4 + size / 1e9 for size in SIZES})
    >>> round(link.latency, 9), round(link.bandwidth)
    (0.0001, 1000000000)
    """
    sizes, times = np.array([*seconds], dtype=float), np.array([*seconds.values()])
    columns = np.stack([1 / times, sizes / times], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    if latency < 0 or slope <= 0:  # noise: then each end of the range speaks for one of the two
        latency, slope = times[0], max(times[-1] - times[0], 0.5 * times[-1]) / sizes[-1]
    return Link(bandwidth=1 / float(slope), latency=float(latency))


def summary(rounds: Mapping[int, list[float]]) -> Measured:
    """Medians of the rounds, and the link that fits them.

    >>> summary({4: [2e-6, 1e-6, 9e-6], 10**9: [1.0, 1.0, 5.0]}).seconds
    {4: 2e-06, 1000000000: 1.0}
    """
    seconds = {size: median(times) for size, times in rounds.items()}
    link = fit(seconds)
    error = max(abs(link.seconds(size) - t) / t for size, t in seconds.items())
    return Measured(link=link, seconds=seconds, error=error)


# --- messages to and fro --------------------------------------------------------------------------


def clock(group: Group, sizes: tuple[int, ...] = SIZES) -> Measured:
    """The side that measures: says what comes, sends, and waits for the echo.

    A round's fastest trip counts. A slow one shows who else wanted the cores: a message then waits for the
    scheduler's next tick, milliseconds instead of microseconds.
    """
    rounds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size in list(rounds):
            count = FEW if size >= LARGE else MANY
            _order(group, size, count)
            rounds[size].append(min(_trips(group, size, count)))
            group.vote(torch.zeros(1))
            if rounds[size][-1] > SLOW:
                rounds = {smaller: times for smaller, times in rounds.items() if smaller <= size}
                break
    group.start([(ECHO, torch.tensor([0, 0]), ORDER)], [])  # no vote: what it would prove, nobody needs any more
    return summary(rounds)


def _trips(group: Group, size: int, count: int) -> list[float]:
    """Seconds of one way, half of a trip; the first trip does not count."""
    message, echo = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    seconds = []
    for _ in range(1 + count):
        begin = time.perf_counter()
        group.finish(group.start([(ECHO, message, MESSAGE)], [(ECHO, echo, MESSAGE)]))
        seconds.append((time.perf_counter() - begin) / 2)
    return seconds[1:]


def _order(group: Group, size: int, count: int) -> None:
    group.start([(ECHO, torch.tensor([size, count]), ORDER)], [])
    group.vote(torch.zeros(1))


def echo(group: Group) -> None:
    """The other side: sends back what comes until it is told that nothing more does."""
    order = torch.zeros(2, dtype=torch.int64)
    while True:
        group.finish(group.start([], [(CLOCK, order, ORDER)]))
        size, count = order.tolist()
        if not 0 < size <= max(SIZES):
            return
        group.vote(torch.zeros(1))
        message = torch.empty(size, dtype=torch.uint8)
        for _ in range(1 + count):
            group.finish(group.start([], [(CLOCK, message, MESSAGE)]))
            group.start([(CLOCK, message, MESSAGE)], [])
        group.vote(torch.zeros(1))


# --- the two sides ---------------------------------------------------------------------------------


class _Pair:
    """Two processes with an authenticated connection, over which they form a group."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rank: int) -> None:
        here, there = (str(writer.get_extra_info(name)[0]) for name in ("sockname", "peername"))
        addresses = (here, there) if rank == CLOCK else (there, here)
        members = tuple(Member(worker=f"0.{number}", address=address) for number, address in enumerate(addresses))
        self._generation = Generation(number=1, members=members)
        self._worker = f"0.{rank}"
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._store = GenerationStore(self._push)
        self._group: Group | None = None

    async def do(self, work: Callable[[Group], T]) -> T:
        """Does ``work`` in a group of the two. Raises ``Broken`` if the other side goes away, or stays too long."""
        listening = asyncio.create_task(self._listen())
        late = self._loop.call_later(LONGEST, self._give_up, f"no end after {LONGEST:g} s")
        try:
            result = await asyncio.to_thread(self._in_thread, work)
            if self._worker == f"0.{CLOCK}":  # its last order must arrive: the other side leaves first
                await asyncio.wait([listening], timeout=LINGER)
            return result
        finally:
            late.cancel()
            listening.cancel()
            self._give_up("done")

    def _in_thread(self, work: Callable[[Group], T]) -> T:
        self._group = form(self._generation, self._worker, self._store, torch.device("cpu"))
        if self._store.closed:  # given up before there was a group to abort
            self._group.abort("the other side is gone")
        return work(self._group)

    def _push(self, key: str, value: bytes) -> None:
        message = wire.encode({"key": key, "value": base64.b64encode(value).decode()})
        self._loop.call_soon_threadsafe(self._writer.write, message)

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                message = wire.decode(line)
                self._store.arrived(str(message["key"]), base64.b64decode(message["value"]))
        except (ValueError, KeyError, TypeError, OSError):
            pass  # as bad as a connection that is gone
        self._give_up("the other side is gone")

    def _give_up(self, reason: str) -> None:
        self._store.close()
        if self._group is not None:
            self._group.abort(reason)


async def _serve(listening: socket.socket, token: str) -> str:
    """Serves one peer that knows the token, then ends; returns the peer's address. Strangers change nothing."""
    served: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting: set[asyncio.StreamWriter] = set()
    busy = asyncio.Lock()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(waiting) >= STRANGERS:
                return
            waiting.add(writer)
            try:
                await wire.accept(reader, writer, token)
            finally:
                waiting.discard(writer)
            async with busy:
                if not served.done():
                    await _Pair(reader, writer, ECHO).do(echo)
                    served.set_result(str(writer.get_extra_info("peername")[0]))
        except (wire.Refused, Broken, OSError):
            pass  # a stranger, or a peer that went away: the next one may do better
        finally:
            writer.close()

    async with await asyncio.start_server(connected, sock=listening, limit=wire.SERVER_LIMIT):
        return await served


def address_text(host: str, port: int) -> str:
    """As a command line takes it.

    >>> address_text("head", 29800), address_text("::1", 29800)
    ('head:29800', '[::1]:29800')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(address: tuple[str, int], token: str, say: Callable[[str], None]) -> None:
    """Waits for one peer to measure the link to this host."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listening = socket.create_server(address, family=family)
    except OSError as e:
        raise HoldfastError(f"cannot listen on {address_text(*address)}: {e.strerror or e}") from e
    host, port = listening.getsockname()[:2]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    say(f"waiting; on the other machine: holdfast profile --peer {address_text(host, port)} train.py")
    say(f"measured with {asyncio.run(_serve(listening, token))}")


async def _measure(address: tuple[str, int], token: str) -> Measured:
    reader, writer = await wire.connect(address, token, {"profile": 1})
    try:
        return await _Pair(reader, writer, CLOCK).do(clock)
    finally:
        writer.close()


def measure_peer(address: tuple[str, int], token: str) -> Measured:
    """The link from here to a host where ``serve`` waits."""
    where = address_text(*address[:2])
    try:
        return asyncio.run(_measure(address, token))
    except wire.Refused as e:
        raise HoldfastError(f"{where} refuses: {e}", hint="the same HOLDFAST_TOKEN on both machines") from e
    except (Broken, OSError) as e:
        hint = f"on the other machine: holdfast profile --serve {where}"
        raise HoldfastError(f"the link to {where} could not be measured: {e}", hint=hint) from e


def measure_inside() -> Measured:
    """The link between two processes of this host."""
    token = wire.new_token()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = subprocess.Popen(
            [sys.executable, "-m", "holdfast.engine.profile.links", str(listening.fileno())],
            env={**os.environ, "HOLDFAST_TOKEN": token},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
        )
        address = listening.getsockname()
    try:
        return measure_peer(address, token)
    finally:
        other.kill()  # it has ended by itself unless something went wrong
        other.wait()


async def _serve_parent(listening: socket.socket, token: str) -> None:
    await asyncio.wait_for(_serve(listening, token), LONGEST)


if __name__ == "__main__":
    asyncio.run(_serve_parent(socket.socket(fileno=int(sys.argv[1])), os.environ["HOLDFAST_TOKEN"]))
