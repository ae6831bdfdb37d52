"""The handshake over real sockets: only who knows the token gets in, on either side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster import handshake, wire
from holdfast.cluster.gate import Gate

TOKEN = "the right token of sixteen characters and more"
Address = tuple[str, int]
Dialogue = Callable[[Address], Awaitable[Any]]


def with_server(dialogue: Dialogue) -> tuple[Any, list[Any]]:
    """Runs ``dialogue`` against a gate; returns its result and the hellos of those who were let in."""
    seen: list[Any] = []

    async def admitted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.Message) -> None:
        seen.append(hello)
        await reader.read()

    async def scene() -> Any:
        listener = socket.create_server(("127.0.0.1", 0))
        async with Gate(listener, token=TOKEN, admitted=admitted) as gate:
            result = await asyncio.wait_for(dialogue(listener.getsockname()), 20)
            while gate.door.strangers or gate._tasks:  # lets the server come to its verdict
                await asyncio.sleep(0.005)
            return result

    return asyncio.run(asyncio.wait_for(scene(), 30)), seen


async def with_impostor(connected: Any, dialogue: Dialogue) -> Any:
    """Runs ``dialogue`` against a server that is no gate."""
    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        return await asyncio.wait_for(dialogue(server.sockets[0].getsockname()), 20)


async def send_raw(address: Address, data: bytes) -> bytes:
    """What a stranger gets back for these bytes."""
    reader, writer = await asyncio.open_connection(*address)
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
        _, writer = await wire.connect(address, token, lambda: {"worker": "0.1"})
        writer.close()

    return dialogue


clients = pytest.mark.parametrize("client", [in_asyncio])


@clients
def test_the_right_token_gets_in_and_the_hello_arrives(client: Callable[[str], Dialogue]) -> None:
    _, seen = with_server(client(TOKEN))
    assert seen == [{"worker": "0.1"}]


@clients
@pytest.mark.parametrize("token", ["", "another token of sixteen characters", TOKEN + " "])
def test_a_wrong_token_gets_nobody_in_and_the_client_says_why(client: Callable[[str], Dialogue], token: str) -> None:
    async def dialogue(address: Address) -> None:
        with pytest.raises(wire.Refused, match="does not know the token") as refused:
            await client(token)(address)
        assert "HOLDFAST_TOKEN" in refused.value.hint

    _, seen = with_server(dialogue)
    assert seen == []


def impostor(answer: Callable[[bytes], bytes], said: list[bytes]) -> Any:
    """A server that answers a hello in its own way, and notes what else the client tells it."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(await reader.readexactly(handshake.HELLO_BYTES)))
        said.append(await reader.read())
        writer.close()

    return connected


NONCE = b"n" * handshake.NONCE_BYTES
HEADER = handshake.hello(handshake.PLAIN, b"")


@clients
@pytest.mark.parametrize(
    "shown",
    [
        lambda hello: bytes(32),
        lambda hello: handshake.proof("a guess of a token", "server", 0, NONCE, hello[10:]),
        lambda hello: handshake.proof(TOKEN, "client", 0, NONCE, hello[10:]),
        lambda hello: handshake.proof(TOKEN, "server", 1, NONCE, hello[10:]),
        lambda hello: handshake.proof(TOKEN, "server", 0, NONCE, NONCE),
    ],
)
def test_a_server_that_does_not_know_the_token_is_told_nothing(
    client: Callable[[str], Dialogue], shown: Callable[[bytes], bytes]
) -> None:
    said: list[bytes] = []

    async def dialogue(address: Address) -> None:
        with pytest.raises(wire.Refused, match="does not know the token"):
            await client(TOKEN)(address)
        while not said:
            await asyncio.sleep(0.005)

    asyncio.run(with_impostor(impostor(lambda hello: HEADER + NONCE + shown(hello), said), dialogue))
    assert said == [b""], "not even the client's proof"


@clients
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HOLDFAST\x01\x00", "version 1 of the protocol, and this side version 2"),
        (b"HOLDFAST\x03\x00", "version 3 of the protocol, and this side version 2"),
        (b'{"holdfast":1,"nonce":"00"}\n', "version 1 of the protocol, and this side version 2"),
        (b"HOLDFAST\x02\x01", "wants TLS"),
    ],
)
def test_another_version_or_mode_is_a_sentence(client: Any, answer: bytes, reason: str) -> None:
    async def dialogue(address: Address) -> None:
        with pytest.raises(wire.Refused, match=reason) as refused:
            await client(TOKEN)(address)
        assert "on every machine" in refused.value.hint

    asyncio.run(with_impostor(impostor(lambda hello: answer, []), dialogue))


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

    asyncio.run(with_impostor(connected, dialogue))


def test_a_silent_server_does_not_hold_a_client_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConnectionError, match="no holdfast coordinator"),
    ):
        asyncio.run(wire.connect(silent.getsockname(), TOKEN, dict))


def test_a_server_that_drips_does_not_hold_a_client_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, but the handshake has one deadline for all of them."""
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.3)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(100):
            writer.write(HEADER[number % 8 : number % 8 + 1] if number else b"")
            await asyncio.sleep(0.1)

    async def dialogue(address: Address) -> None:
        with pytest.raises(ConnectionError, match="no holdfast coordinator"):
            await wire.connect(address, TOKEN, dict)

    asyncio.run(with_impostor(connected, dialogue))


# --- strangers ------------------------------------------------------------------------------------

HELLO = handshake.hello(handshake.PLAIN, NONCE)
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: head\r\nAccept: everything\r\n\r\n",
    "every byte": bytes(range(256)),
    "json as version 1 took it": b'{"nonce": "a", "proof": "b", "hello": {"role": "worker"}}\n',
    "deep nesting": b"[" * 50000,
    "a huge line": b"x" * 2**22,
    "another version": HEADER[:8] + b"\x01" + HELLO[9:],
    "another mode": HEADER[:9] + b"\x01" + HELLO[10:],
    "a proof of nothing": HELLO + bytes(32),
    "a proof of nothing and a hello": HELLO + bytes(32) + b'{"role": "worker"}\n',
    "the server's proof, reflected": HELLO + handshake.proof(TOKEN, "server", 0, NONCE, NONCE),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_gets_nobody_in_and_is_never_parsed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(line: bytes) -> wire.Message:
        raise AssertionError("a stranger's bytes are parsed")

    monkeypatch.setattr(wire, "decode", parse)
    answer, seen = with_server(lambda address: send_raw(address, data))
    assert seen == []
    assert len(answer) <= 74


def test_a_stranger_that_leaves_at_once_is_forgotten() -> None:
    async def dialogue(address: Address) -> None:
        _, writer = await asyncio.open_connection(*address)
        writer.close()

    assert with_server(dialogue)[1] == []


@pytest.mark.parametrize("said", [b"", HELLO[:20], HELLO, HELLO + b"and a part of the proof"])
def test_silence_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.1)
    answer, seen = with_server(lambda address: send_raw(address, said))
    assert len(answer) in (0, 74)
    assert seen == []


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    async def dialogue(address: Address) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HELLO)
        handshake.check_header(await reader.readexactly(handshake.HEADER_BYTES), handshake.PLAIN)
        proof = handshake.prove(TOKEN, handshake.PLAIN, NONCE, await reader.readexactly(handshake.ANSWER_BYTES))
        recorded = proof + wire.encode({"worker": "0.1"})
        writer.write(recorded)
        assert await reader.readexactly(1) == wire.ADMITTED
        writer.close()
        return await send_raw(address, HELLO + recorded)

    answer, seen = with_server(dialogue)
    assert seen == [{"worker": "0.1"}], "the first, and not the second"
    assert len(answer) in (0, 74), "a challenge, and no word of admission"


def test_a_peer_whose_hello_is_no_message_is_not_admitted() -> None:
    async def dialogue(address: Address) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HELLO)
        await reader.readexactly(handshake.HEADER_BYTES)
        answered = await reader.readexactly(handshake.ANSWER_BYTES)
        writer.write(handshake.prove(TOKEN, handshake.PLAIN, NONCE, answered) + b"[" * 50000 + b"\n")
        await reader.read()
        writer.close()

    assert with_server(dialogue)[1] == []


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


def test_a_proof_holds_for_its_side_its_mode_and_its_nonces_alone() -> None:
    shown = handshake.proof(TOKEN, "client", 0, b"s", b"c")
    others = [
        ("server", 0, b"s", b"c"),
        ("client", 1, b"s", b"c"),
        ("client", 0, b"x", b"c"),
        ("client", 0, b"s", b"x"),
    ]
    assert handshake.proves(shown, handshake.proof(TOKEN, "client", 0, b"s", b"c"))
    assert not any(handshake.proves(shown, handshake.proof(TOKEN, *other)) for other in others)
    assert not handshake.proves(shown, handshake.proof("another", "client", 0, b"s", b"c"))


def test_tokens_are_long_and_new() -> None:
    assert len({wire.new_token() for _ in range(100)}) == 100
    assert len(wire.new_token()) == 64


def test_what_comes_with_the_last_byte_of_the_handshake_is_not_lost() -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(handshake.HELLO_BYTES)
        answer, proof = handshake.answer(TOKEN, handshake.PLAIN, hello, NONCE)
        writer.write(answer)
        assert await reader.readexactly(handshake.PROOF_BYTES) == proof
        writer.write(wire.ADMITTED + wire.encode({"first": 1}) + wire.encode({"second": 2}) + b'{"thi')
        await reader.readline()
        await reader.readline()
        writer.write(b'rd": 3}\n')
        writer.close()

    async def talk(address: Address) -> list[Any]:
        reader, writer = await wire.connect(address, TOKEN, dict)
        writer.write(wire.encode({"go": "on"}))
        found = [wire.decode(await reader.readline()) for _ in range(3)]
        writer.close()
        return found

    found = asyncio.run(with_impostor(connected, talk))
    assert found == [{"first": 1}, {"second": 2}, {"third": 3}]
