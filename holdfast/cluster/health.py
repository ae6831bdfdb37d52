"""Health of an agent over HTTP, as probes ask for it: ``/healthz`` and ``/readyz``.

It runs in the agent, which takes no part in a step. It reads one request of a connection and answers it; nothing that
is sent to it changes anything. It costs a bounded number of small connections: the oldest makes room for the newest,
so strangers who hold connections open do not keep a probe from its answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.errors import UsageError

MOST = 64  # connections at a time
REQUEST_BYTES = 4096  # of a request, at most
SECONDS = 5.0  # for a request to come, and for its answer to be taken
STATUS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Whether the workers of a machine train, and why."""

    ready: bool
    reason: str


def readiness(
    *, leaving: bool, has_run: bool, members: Collection[str] | None, workers: Collection[str], wanted: int
) -> Readiness:
    """Decide whether the workers of a machine train.

    ``members``: of the newest generation; None before the first. ``workers``: those that live on this machine, of which
    ``wanted`` should train.

    >>> readiness(leaving=False, has_run=True, members=["0.0", "1.0"], workers=["1.0"], wanted=1).reason
    '1 of 1 workers train'
    >>> readiness(leaving=False, has_run=True, members=None, workers=["1.0"], wanted=1).reason
    'training has not begun yet'
    """
    if leaving:
        return Readiness(ready=False, reason="the workers were asked to leave")
    if not has_run:
        return Readiness(ready=len(workers) >= wanted, reason=f"{len(workers)} of {wanted} workers run; none has a Run")
    if members is None:
        return Readiness(ready=False, reason="training has not begun yet")
    train = len(set(members) & set(workers))
    return Readiness(ready=train > 0, reason=f"{min(train, wanted)} of {wanted} workers train")


def parse_address(text: str, option: str = "--health") -> tuple[str, int]:
    """Return host and port; a port alone is that of loopback. ``option`` is for the message.

    >>> parse_address("8080"), parse_address("0.0.0.0:8080"), parse_address("[::]:80")
    (('127.0.0.1', 8080), ('0.0.0.0', 8080), ('::', 80))
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 2**16 or (":" in text and not host):
        raise UsageError(f"{option} {text} is not HOST:PORT or PORT", hint="as in 0.0.0.0:8080")
    return host.strip("[]") or "127.0.0.1", int(port)


class HealthServer:
    """Answers probes. ``ready`` is asked at each ``/readyz``."""

    def __init__(self, address: tuple[str, int], ready: Callable[[], Readiness]) -> None:
        self._address, self._ready = address, ready
        self._open: dict[asyncio.StreamWriter, None] = {}  # connections, oldest first

    async def serve(self) -> None:
        """Serve for ever. Raises ``UsageError`` if the address cannot be had."""
        host, port = self._address
        try:
            server = await asyncio.start_server(self._answer, host, port, limit=REQUEST_BYTES)
        except OSError as e:
            raise UsageError(f"--health cannot listen at {host}:{port}: {e}", hint="choose another port") from e
        async with server:
            try:
                await server.serve_forever()
            finally:
                for writer in list(self._open):  # the server ends when its connections do
                    self._drop(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(self._open) >= MOST:
            self._drop(next(iter(self._open)))
        self._open[writer] = None
        try:
            async with asyncio.timeout(SECONDS):
                writer.write(self.response(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self._drop(writer)  # a stranger
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._open.pop(writer, None)
        writer.transport.abort()

    def response(self, request: bytes) -> bytes:
        """Return the answer to a request."""
        asked = re.match(rb"(GET|HEAD) (/[a-z]*)(\?\S*)? HTTP/1\.[01]\r\n", request)
        if asked is None:
            return _response(405, "GET /healthz or /readyz")
        if asked[2] == b"/healthz":
            return _response(200, "alive", body=asked[1] == b"GET")
        if asked[2] == b"/readyz":
            found = self._ready()
            return _response(200 if found.ready else 503, found.reason, body=asked[1] == b"GET")
        return _response(404, "/healthz and /readyz are here", body=asked[1] == b"GET")


def _response(status: int, text: str, *, body: bool = True) -> bytes:
    content = f"{text}\n".encode()
    head = f"HTTP/1.1 {status} {STATUS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + (content if body else b"")
