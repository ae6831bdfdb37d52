"""The handshake over real sockets: only who knows the token gets in, on either side."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster import wire

TOKEN = "the right token"
Address = tuple[str, int]
Dialogue = Callable[[Address], Awaitable[Any]]


def with_server(dialogue: Dialogue, token: str = TOKEN) -> tuple[Any, list[Any]]:
    """Runs ``dialogue`` against a server that accepts; returns its result and what the server made of each client."""
    seen: list[Any] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            seen.append(await wire.accept(reader, writer, token))
        except BaseException as e:
            seen.append(e)
        finally:
            writer.close()

    return asyncio.run(_serve(connected, dialogue)), seen


async def _serve(connected: Any, dialogue: Dialogue) -> Any:
    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=wire.SERVER_LIMIT)
    async with server:
        result = await asyncio.wait_for(dialogue(server.sockets[0].getsockname()), 20)
        for _ in range(1000):  # lets the server come to its verdict
            if len(asyncio.all_tasks()) == 1:
                break
            await asyncio.sleep(0.005)
        return result


def refusals(seen: list[Any]) -> list[str]:
    assert all(isinstance(s, wire.Refused) for s in seen), seen
    return [str(s) for s in seen]


async def send_raw(address: Address, data: bytes) -> bytes:
    """What a stranger gets back for these bytes."""
    reader, writer = await asyncio.open_connection(*address)
    await reader.readline()
    try:
        writer.write(data)
        await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


# --- who gets in ----------------------------------------------------------------------------------


def in_asyncio(token: str) -> Dialogue:
    async def dialogue(address: Address) -> None:
        _, writer = await wire.connect(address, token, {"worker": "0.1"})
        writer.close()

    return dialogue


def in_a_thread(token: str) -> Dialogue:
    async def dialogue(address: Address) -> None:
        (await asyncio.to_thread(wire.Line, address, token, {"worker": "0.1"})).close()

    return dialogue


clients = pytest.mark.parametrize("client", [in_asyncio, in_a_thread])


@clients
def test_the_right_token_gets_in_and_the_hello_arrives(client: Callable[[str], Dialogue]) -> None:
    _, seen = with_server(client(TOKEN))
    assert seen == [{"worker": "0.1"}]


@clients
@pytest.mark.parametrize("token", ["", "another token", TOKEN + " "])
def test_a_wrong_token_is_refused_and_told_so(client: Callable[[str], Dialogue], token: str) -> None:
    async def dialogue(address: Address) -> None:
        with pytest.raises(wire.Refused, match="wrong token"):
            await client(token)(address)

    _, seen = with_server(dialogue)
    assert refusals(seen) == ["wrong token"]


def impostor(proof: Callable[[dict[str, Any], str], dict[str, Any]]) -> Any:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.encode({"holdfast": 1, "nonce": "00"}))
        answer = wire.decode(await reader.readline())
        writer.write(wire.encode(proof(answer, "00")))
        writer.close()

    return connected


@clients
@pytest.mark.parametrize(
    "shown",
    [
        lambda answer, nonce: {"proof": "0" * 64},
        lambda answer, nonce: {"proof": answer["proof"]},  # the client's own, reflected
        lambda answer, nonce: {"proof": wire.proof("guess", "server", nonce, answer["nonce"])},
        lambda answer, nonce: {"proof": None},
        lambda answer, nonce: {},
    ],
)
def test_a_server_that_does_not_know_the_token_is_refused_by_the_client(
    client: Callable[[str], Dialogue], shown: Callable[[dict[str, Any], str], dict[str, Any]]
) -> None:
    async def dialogue(address: Address) -> None:
        with pytest.raises(wire.Refused, match="does not know the token"):
            await client(TOKEN)(address)

    asyncio.run(_serve(impostor(shown), dialogue))


@clients
@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[]\n", b"\xff\xfe\n", b"\n"])
def test_a_server_that_is_no_coordinator_is_a_connection_error(client: Any, greeting: bytes) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read(1)
        writer.close()

    async def dialogue(address: Address) -> None:
        with pytest.raises(ConnectionError):
            await client(TOKEN)(address)

    asyncio.run(_serve(connected, dialogue))


# --- strangers ------------------------------------------------------------------------------------

GARBAGE = {
    "no json": b"GET / HTTP/1.1\r\n\r\n",
    "no text": bytes(range(256)) + b"\n",
    "no object": b"[1, 2]\n",
    "no hello": b'{"nonce": "a", "proof": "b"}\n',
    "wrong types": b'{"nonce": 1, "proof": 2, "hello": 3}\n',
    "hello is no object": b'{"nonce": "a", "proof": "b", "hello": []}\n',
    "an enormous number": b'{"nonce": ' + b"9" * 20000 + b"}\n",
    "a huge line": b"x" * (4 * wire.SERVER_LIMIT) + b"\n",
    "a huge line without end": b"x" * (4 * wire.SERVER_LIMIT),
    "an empty line": b"\n",
}
ESCAPING = {
    "deep nesting": b"[" * 50000 + b"\n",
    "half a character in the nonce": b'{"nonce": "\\ud800", "proof": "b", "hello": {}}\n',
    "half a character in the proof": b'{"nonce": "a", "proof": "\\ud800", "hello": {}}\n',
}
garbage = [pytest.param(data, id=name) for name, data in GARBAGE.items()]
garbage += [pytest.param(data, id=name) for name, data in ESCAPING.items()]


@pytest.mark.parametrize("data", garbage)
def test_garbage_is_refused_and_answered_with_nothing_of_use(data: bytes) -> None:
    answer, seen = with_server(lambda address: send_raw(address, data))
    assert len(refusals(seen)) == 1
    assert b"proof" not in answer


def test_a_stranger_that_leaves_at_once_is_refused() -> None:
    async def dialogue(address: Address) -> None:
        _, writer = await asyncio.open_connection(*address)
        writer.close()

    assert refusals(with_server(dialogue)[1]) == ["no handshake"]


def test_silence_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.1)

    async def dialogue(address: Address) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        await reader.readline()
        writer.write(b'{"nonce": ')  # and no more
        rest = await reader.read()
        writer.close()
        return rest

    rest, seen = with_server(dialogue)
    assert rest == b""
    assert refusals(seen) == ["no handshake"]


def test_a_silent_server_does_not_hold_a_client_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(TimeoutError):
            wire.Line(silent.getsockname(), TOKEN, {})
        with pytest.raises(ConnectionError, match="no holdfast coordinator"):
            asyncio.run(wire.connect(silent.getsockname(), TOKEN, {}))


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    async def dialogue(address: Address) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        greeting = wire.decode(await reader.readline())
        recorded = wire.encode(wire.greet(greeting, TOKEN, {"worker": "0.1"})[0])
        writer.write(recorded)
        assert "proof" in wire.decode(await reader.readline())
        writer.close()
        return await send_raw(address, recorded)

    answer, (first, second) = with_server(dialogue)
    assert first == {"worker": "0.1"}
    assert refusals([second]) == ["wrong token"]
    assert b"proof" not in answer


def test_the_token_never_crosses_the_wire() -> None:
    answer, _ = wire.greet({"nonce": "n"}, TOKEN, {"worker": "0.1"})
    assert TOKEN.encode() not in wire.encode(answer)


# --- messages -------------------------------------------------------------------------------------

messages = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=4)


@given(messages)
def test_a_message_is_one_line_and_comes_out_as_it_went_in(message: dict[str, Any]) -> None:
    line = wire.encode(message)
    assert line.count(b"\n") == 1
    assert wire.decode(line) == message


@given(st.binary(max_size=40))
def test_any_bytes_give_a_message_or_a_value_error(data: bytes) -> None:
    try:
        assert isinstance(wire.decode(data), dict)
    except ValueError:
        pass


def test_a_proof_holds_for_its_side_and_its_nonces_alone() -> None:
    shown = {"proof": wire.proof(TOKEN, "client", "s", "c")}
    assert wire.proves(TOKEN, shown, "client", "s", "c")
    others = [("server", "s", "c"), ("client", "x", "c"), ("client", "s", "x")]
    assert not any(wire.proves(TOKEN, shown, *other) for other in others)
    assert not wire.proves("another", shown, "client", "s", "c")


def test_tokens_are_long_and_new() -> None:
    assert len({wire.new_token() for _ in range(100)}) == 100
    assert len(wire.new_token()) == 64


def test_what_comes_with_the_last_line_of_the_handshake_is_not_lost() -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.encode({"holdfast": 1, "nonce": "n"}))
        answer = json.loads(await reader.readline())
        proof = wire.encode({"proof": wire.proof(TOKEN, "server", "n", answer["nonce"])})
        writer.write(proof + wire.encode({"first": 1}) + wire.encode({"second": 2}) + b'{"thi')
        await writer.drain()
        await reader.readline()
        writer.write(b'rd": 3}\n')
        writer.close()

    def talk(address: Address) -> list[Any]:
        line = wire.Line(address, TOKEN, {})
        found = line.waiting()
        line.send({"go": "on"})
        while len(found) < 3:
            found += line.receive()
        line.close()
        return found

    found = asyncio.run(_serve(connected, lambda address: asyncio.to_thread(talk, address)))
    assert found == [{"first": 1}, {"second": 2}, {"third": 3}]
