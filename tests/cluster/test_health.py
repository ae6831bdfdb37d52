"""Probes of an agent: what they are told, and that strangers cost little and keep nobody from an answer."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.cluster.health import MOST, HealthServer, Readiness, parse_address, readiness
from holdfast.errors import UsageError
from holdfast.measuring import free_port
from tests.harness import TRAIN, wait_until
from tests.warm import Command


@pytest.mark.parametrize(
    ("leaving", "has_run", "members", "workers", "ready"),
    [
        (False, True, ["0.0", "1.0"], ["1.0", "1.1"], True),
        (False, True, ["0.0"], ["1.0", "1.1"], False),  # a replacement that has not joined yet
        (False, True, None, ["1.0", "1.1"], False),
        (True, True, ["1.0"], ["1.0", "1.1"], False),
        (False, False, None, ["1.0", "1.1"], True),  # a script without a Run
        (False, False, None, ["1.0"], False),
    ],
)
def test_ready_is_who_trains(
    leaving: bool, has_run: bool, members: list[str] | None, workers: list[str], ready: bool
) -> None:
    found = readiness(leaving=leaving, has_run=has_run, members=members, workers=workers, wanted=2)
    assert found.ready is ready


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "0.0.0.0:0", "0.0.0.0:65536", "a:b", "\u0661"])
def test_a_bad_address_is_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="--health"):
        parse_address(text)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /healthz HTTP/1.1", 200),
        (b"HEAD /healthz HTTP/1.0", 200),
        (b"GET /readyz?verbose HTTP/1.1", 503),
        (b"GET / HTTP/1.1", 404),
        (b"POST /healthz HTTP/1.1", 405),
        (b"GET /healthz", 405),
        (b"\x16\x03\x01\xff", 405),
    ],
)
def test_what_is_answered(request_line: bytes, status: int) -> None:
    server = HealthServer(("127.0.0.1", 1), lambda: Readiness(ready=False, reason="not yet"))
    answer = server.response(request_line + b"\r\nHost: a\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert (body == b"") is request_line.startswith(b"HEAD")


def with_server(check: Callable[[int], Awaitable[None]]) -> None:
    async def main() -> None:
        port = free_port()
        server = HealthServer(("127.0.0.1", port), lambda: Readiness(ready=True, reason="trains"))
        serving = asyncio.create_task(server.serve())
        try:
            await asyncio.wait_for(check(port), 30)
        finally:
            serving.cancel()

    asyncio.run(main())


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            await asyncio.sleep(0.01)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed, or reset."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def probe(port: int) -> bytes:
    reader, writer = await connect(port)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


def test_strangers_who_hold_connections_open_keep_nobody_out() -> None:
    async def check(port: int) -> None:
        strangers = [await connect(port) for _ in range(2 * MOST)]
        for _, writer in strangers:
            writer.write(b"GET /healthz HTTP/1.1\r\n")  # and never an end
        assert (await probe(port)).startswith(b"HTTP/1.1 200 OK")
        first, last = strangers[0][0], strangers[-1][0]
        assert await rest_of(first) == b""  # the oldest was sent away to make room
        assert not last.at_eof()
        for _, writer in strangers:
            writer.transport.abort()

    with_server(check)


def test_a_request_without_end_is_cut_off() -> None:
    async def check(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(b"GET /healthz HTTP/1.1\r\n" + 100_000 * b"a")
        assert await rest_of(reader) == b""
        assert (await probe(port)).endswith(b"trains\n")

    with_server(check)


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except ConnectionError:
        return 0, ""
    finally:
        connection.close()


def test_a_run_is_alive_then_ready_and_no_longer_when_it_leaves(tmp_path: Path) -> None:
    """With a grace that only the variable tells, as in a pod."""
    port = free_port()
    settings = {"STEPS": "100000", "WANTED": "99", "RESULTS": str(tmp_path / "results.jsonl")}
    variables = {"HOLDFAST_HEALTH": str(port), "HOLDFAST_GRACE": "55"}
    process = Command("run", "-n", "2", str(TRAIN), folder=tmp_path, **settings, **variables)
    wait_until("it is alive", lambda: ask(port, "/healthz") == (200, "alive\n"))
    wait_until("it is ready", lambda: ask(port, "/readyz") == (200, "2 of 2 workers train\n"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "55 s of grace" in process.stdout


def test_a_port_that_is_taken_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import signal; signal.pause()")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = Command("run", "--health", str(port), "script.py", folder=tmp_path)
        assert process.wait(60) == 2
    assert process.stderr.startswith(f"holdfast: --health cannot listen at 127.0.0.1:{port}")
    assert process.stderr.count("\n") == 1
