"""Brings two processes together to measure the link between them (``round_trips.py``).

One side serves, the other one measures. Both prove first that they know the job's token (``cluster/wire.py``). Over
that connection they tell each other their ports; then they are linked as the workers of a generation are. For the link
inside a host, the side that serves is a process started for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

from holdfast.cluster import wire
from holdfast.cluster.gate import Gate
from holdfast.cluster.group import Group
from holdfast.cluster.links.hub import Hub
from holdfast.cluster.links.member_links import LinkSettings
from holdfast.cluster.membership import Generation, Member
from holdfast.engine.profile.round_trips import CLOCK, ECHO, MeasuredLink, clock, echo
from holdfast.errors import Broken, HoldfastError

LONGEST_SECONDS = 300.0  # for all trips of a link: a peer that hangs must not hold the command for ever
SILENT_SECONDS = 5.0  # without an answer of the other machine, after which it counts as gone
LEAVE_SECONDS = 5.0  # for the other side to hear the order to end, and to leave

T = TypeVar("T")


class _Pair:
    """One of two processes that form a group. An authenticated connection brings them together.

    Three things run at once here: the event loop listens to the connection, a thread works in the group, and a timer
    ends both if that takes too long. Whatever ends first ends the others through ``_give_up``.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rank: int, token: str) -> None:
        self._here, self._there = (str(writer.get_extra_info(name)[0]) for name in ("sockname", "peername"))
        self._reader, self._writer, self._rank = reader, writer, rank
        self._hub = Hub(self._here, LinkSettings(token=token, heartbeat=SILENT_SECONDS))
        self._group: Group | None = None

    async def do(self, work: Callable[[Group], T]) -> T:
        """Return the result of ``work`` in a group of the two.

        Raises ``Broken`` if the other side goes away, or if the work takes longer than ``LONGEST_SECONDS``.
        """
        self._group = group = await self._form()
        listening = asyncio.create_task(self._listen())
        late = asyncio.get_running_loop().call_later(
            LONGEST_SECONDS, self._give_up, f"no end after {LONGEST_SECONDS:g} s"
        )
        try:
            result = await asyncio.to_thread(work, group)
            if self._rank == CLOCK:  # stays until the other side has left: the order to end must arrive
                await asyncio.wait([listening], timeout=LEAVE_SECONDS)
            return result
        finally:
            late.cancel()
            listening.cancel()
            self._give_up("done")
            self._hub.close()

    async def _form(self) -> Group:
        """Tell the other side this one's port, hear its port, and make the group of the two. Raises ``Broken``."""
        self._writer.write(wire.encode({"port": self._hub.port}))
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                port = int(wire.decode(await self._reader.readline())["port"])
        except (ValueError, KeyError, TypeError, OSError, TimeoutError) as e:
            self._hub.close()
            raise Broken("the other side is gone") from e
        ends = [(self._here, self._hub.port), (self._there, port)]
        if self._rank != CLOCK:
            ends.reverse()
        members = tuple(Member(worker=f"0.{n}", address=host, port=port) for n, (host, port) in enumerate(ends))
        generation = Generation(number=1, members=members)
        return Group(generation, self._rank, self._hub.links(generation, f"0.{self._rank}"))

    async def _listen(self) -> None:
        """Wait for the end of the connection: nothing more is said on it."""
        try:
            await self._reader.read()
        except OSError:
            pass
        self._give_up("the other side is gone")

    def _give_up(self, reason: str) -> None:
        if self._group is not None:
            self._group.abort(reason)


async def _serve(listening: socket.socket, token: str) -> str:
    """Serve one peer that knows the token, and return its address. Others are refused, and the waiting goes on."""
    served: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    busy = asyncio.Lock()

    async def admitted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.Message) -> None:
        try:
            async with busy:
                if not served.done():
                    await _Pair(reader, writer, ECHO, token).do(echo)
                    served.set_result(str(writer.get_extra_info("peername")[0]))
        except (Broken, OSError):
            pass  # a peer that went away: the next one may do better

    async with Gate(listening, token=token, admitted=admitted):
        return await served


def address_text(host: str, port: int) -> str:
    """Return an address as the command line takes it.

    >>> address_text("head", 29800), address_text("::1", 29800)
    ('head:29800', '[::1]:29800')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(address: tuple[str, int], token: str, say: Callable[[str], None]) -> None:
    """Wait at ``address`` (host, port) until one peer that knows ``token`` has measured the link to this host.

    ``say`` is called with what the user must know: the command for the other machine, and who has measured.
    Raises ``HoldfastError`` if the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listening = socket.create_server(address, family=family)
    except OSError as e:
        raise HoldfastError(f"cannot listen on {address_text(*address)}: {e.strerror or e}") from e
    host, port = listening.getsockname()[:2]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    say(f"waiting; on the other machine: holdfast profile --peer {address_text(host, port)} train.py")
    say(f"measured with {asyncio.run(_serve(listening, token))}")


async def _measure(address: tuple[str, int], token: str) -> MeasuredLink:
    reader, writer = await wire.connect(address, token, lambda: {"profile": 1})
    try:
        return await _Pair(reader, writer, CLOCK, token).do(clock)
    finally:
        writer.close()


def measure_peer(address: tuple[str, int], token: str) -> MeasuredLink:
    """Measure the link to ``address`` (host, port), where ``serve`` waits with the same ``token``.

    Raises ``HoldfastError`` if nobody answers there, the token is another one, or the other side goes away.
    """
    where = address_text(*address[:2])
    try:
        return asyncio.run(_measure(address, token))
    except wire.Refused as e:
        raise HoldfastError(f"{where} and this machine do not fit: {e}", hint=e.hint) from e
    except (Broken, OSError) as e:
        hint = f"on the other machine: holdfast profile --serve {where}"
        raise HoldfastError(f"the link to {where} could not be measured: {e}", hint=hint) from e


def measure_inside() -> MeasuredLink:
    """Measure the link between two processes of this host. Raises ``HoldfastError`` if that fails."""
    token = wire.new_token()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = subprocess.Popen(
            [sys.executable, "-m", "holdfast.engine.profile.links", str(listening.fileno())],
            env={**os.environ, "HOLDFAST_TOKEN": token},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        address = listening.getsockname()
    with other:
        try:
            # It says a word when it has imported torch. On a busy machine that takes longer than a handshake may.
            assert other.stdout is not None
            other.stdout.readline()
            return measure_peer(address, token)
        finally:
            other.kill()  # it has ended by itself unless something went wrong


async def _serve_parent(listening: socket.socket, token: str) -> None:
    await asyncio.wait_for(_serve(listening, token), LONGEST_SECONDS)


if __name__ == "__main__":
    print("ready", flush=True)
    asyncio.run(_serve_parent(socket.socket(fileno=int(sys.argv[1])), os.environ["HOLDFAST_TOKEN"]))
