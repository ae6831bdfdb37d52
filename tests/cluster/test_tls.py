"""Mutual TLS on control connections: who gets in, what both sides say otherwise, and what crosses the wire."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster import gate, handshake, wire
from holdfast.cluster.gate import Gate
from holdfast.cluster.tls import TlsSettings, environment
from holdfast.errors import UsageError
from tests.certificates import Certificates, standard

TOKEN = "the right token of sixteen characters and more"
Address = tuple[str, int]
Client = Callable[[Address, TlsSettings | None], Awaitable[Any]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return standard(tmp_path_factory.mktemp("certificates"))


def serve(settings: TlsSettings | None, dialogue: Callable[[Address], Awaitable[Any]]) -> tuple[Any, list[Any]]:
    """Runs ``dialogue`` against a gate that sends every line back; returns its result and the admitted hellos."""
    hellos: list[Any] = []

    async def admitted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.Message) -> None:
        hellos.append(hello)
        while line := await reader.readline():
            writer.write(line)

    async def scene() -> Any:
        listener = socket.create_server(("127.0.0.1", 0))
        async with Gate(listener, token=TOKEN, admitted=admitted, settings=settings):
            return await dialogue(listener.getsockname())

    return asyncio.run(asyncio.wait_for(scene(), 60)), hellos


async def in_asyncio(address: Address, settings: TlsSettings | None) -> Any:
    reader, writer = await wire.connect(address, TOKEN, lambda: {"worker": "0.1"}, settings)
    try:
        writer.write(wire.encode({"said": "secret words"}))
        return wire.decode(await reader.readline())
    finally:
        writer.close()


clients = pytest.mark.parametrize("client", [in_asyncio])


@clients
def test_certificates_of_the_same_ca_get_in(client: Client, certificates: Certificates) -> None:
    server, other = certificates.settings("head", "ca"), certificates.settings("other", "ca")
    answer, hellos = serve(server, lambda address: client(address, other))
    assert answer == {"said": "secret words"}
    assert hellos == [{"worker": "0.1"}]


@clients
@pytest.mark.parametrize(
    ("server", "mine", "said"),
    [
        pytest.param(("head", "ca"), ("other", "their-ca"), "its certificate is not accepted: ", id="unknown server"),
        pytest.param(("head", "ca"), ("stranger", "ca"), "not accept this machine's certificate: unknown ca", id="ca"),
        pytest.param(("expired", "ca"), ("other", "ca"), "certificate has expired", id="expired server"),
        pytest.param(("head", "ca"), ("expired", "ca"), "certificate: certificate expired", id="expired client"),
        pytest.param(("elsewhere", "ca"), ("other", "ca"), "127.0.0.1", id="another name"),
        pytest.param(("head", "ca"), None, "it wants TLS, and this side has none", id="plain client"),
        pytest.param(None, ("other", "ca"), "it has no TLS, and this side wants it", id="plain server"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    client: Client,
    certificates: Certificates,
    server: tuple[str, str] | None,
    mine: tuple[str, str] | None,
    said: str,
) -> None:
    there = None if server is None else certificates.settings(*server)
    here = None if mine is None else certificates.settings(*mine)

    async def dialogue(address: Address) -> None:
        with pytest.raises(wire.Refused) as refused:
            await client(address, here)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)
        assert "on all" in refused.value.hint or "on every machine" in refused.value.hint

    assert serve(there, dialogue)[1] == []


@clients
def test_a_server_that_dies_in_the_middle_of_tls_is_no_refusal(
    client: Client, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent tries again then: a killed coordinator comes back."""

    async def die(made: Gate, connection: socket.socket, *others: Any) -> None:
        connection.close()
        raise ConnectionError

    monkeypatch.setattr(Gate, "_upgrade", die)

    async def dialogue(address: Address) -> None:
        with pytest.raises(ConnectionError):
            await client(address, certificates.settings("other", "ca"))

    assert serve(certificates.settings("head", "ca"), dialogue)[1] == []


def test_who_does_not_know_the_token_never_reaches_tls(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrades: list[Any] = []
    monkeypatch.setattr(Gate, "_upgrade", lambda *given: upgrades.append(given))

    async def dialogue(address: Address) -> None:
        for said in (b"\x16\x03\x01\x02\x00\x01" + bytes(200), handshake.hello(handshake.TLS, bytes(32)) + bytes(300)):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(said)
            try:
                assert len(await reader.read()) <= 74
            except ConnectionError:
                pass
            writer.close()

    assert serve(certificates.settings("head", "ca"), dialogue)[1] == []
    assert upgrades == []


def test_a_peer_that_never_finishes_its_tls_keeps_nobody_out(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the token, takes all places for TLS handshakes, and has a deadline."""
    monkeypatch.setattr(gate, "UPGRADES", 4)
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 1.0)

    async def stall(address: Address) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(*address)
        await wire._prove(reader, writer, TOKEN, handshake.TLS)
        return writer

    async def dialogue(address: Address) -> Any:
        stalled = [await stall(address) for _ in range(8)]
        while True:
            try:
                answer = await in_asyncio(address, certificates.settings("other", "ca"))
                break
            except OSError:  # its own second is over: agents and workers try again, too
                await asyncio.sleep(0.05)
        for writer in stalled:
            writer.close()
        return answer

    answer, hellos = serve(certificates.settings("head", "ca"), dialogue)
    assert answer == {"said": "secret words"}
    # One or more: on a busy machine an attempt's second may end after its hello was heard, and it is made again.
    assert hellos
    assert all(hello == {"worker": "0.1"} for hello in hellos)


def test_renewed_certificates_are_taken_and_half_renewed_ones_are_not(
    certificates: Certificates, tmp_path: Path
) -> None:
    """The server's is replaced in place: by one that has expired, so that it can be told from the first."""
    live = Certificates(tmp_path)
    for name in ("head.pem", "head.key", "ca.pem"):
        (tmp_path / name).write_bytes((certificates.folder / name).read_bytes())

    async def dialogue(address: Address) -> None:
        mine = certificates.settings("other", "ca")
        await in_asyncio(address, mine)
        (tmp_path / "head.pem").write_bytes((certificates.folder / "expired.pem").read_bytes())
        await in_asyncio(address, mine)  # the key does not belong to it yet: the old one is shown
        (tmp_path / "head.key").write_bytes((certificates.folder / "expired.key").read_bytes())
        with pytest.raises(wire.Refused, match="certificate has expired"):
            await in_asyncio(address, mine)

    assert len(serve(live.settings("head", "ca"), dialogue)[1]) == 2


def test_nothing_readable_crosses_the_wire(certificates: Certificates) -> None:
    """A relay between the two sees all bytes; without TLS it sees the words."""

    def relayed(settings: TlsSettings | None, mine: TlsSettings | None) -> bytes:
        seen = bytearray()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(4096):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def dialogue(address: Address) -> Any:
            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                onward = await asyncio.open_connection(*address)
                await asyncio.gather(pump(reader, onward[1]), pump(onward[0], writer))

            async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
                return await in_asyncio(between.sockets[0].getsockname(), mine)

        assert serve(settings, dialogue)[0] == {"said": "secret words"}
        return bytes(seen)

    assert b"secret words" in relayed(None, None)
    seen = relayed(certificates.settings("head", "ca"), certificates.settings("other", "ca"))
    assert b"secret words" not in seen
    assert b"0.1" not in seen


# --- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cert", "key", "ca", "said"),
    [
        ("head.pem", "head.key", None, "--tls-ca missing"),
        (None, "head.key", "ca.pem", "--tls-cert missing"),
        ("missing.pem", "head.key", "ca.pem", "No such file"),
        ("head.pem", "head.key", "missing.pem", "No such file"),
        ("head.pem", "other.key", "ca.pem", "key values mismatch"),
        ("head.pem", "head-locked.key", "ca.pem", "without a passphrase"),
        ("head.ext", "head.key", "ca.pem", "head.ext"),
        ("head.pem", "head.key", "head.ext", "--tls-ca"),
    ],
)
def test_wrong_files_are_refused(
    certificates: Certificates, cert: str | None, key: str | None, ca: str | None, said: str
) -> None:
    def path(name: str | None) -> Path | None:
        return None if name is None else certificates.folder / name

    with pytest.raises(UsageError, match=said) as refused:
        TlsSettings.given(path(cert), path(key), path(ca), endpoint="head:29700")
    assert "\n" not in str(refused.value)


def test_right_files_are_taken_with_the_name_of_the_endpoint(certificates: Certificates) -> None:
    paths = [certificates.folder / name for name in ("head.pem", "head.key", "ca.pem")]
    for endpoint, name in (("head:29700", "head"), ("[::1]:29700", "::1"), ("::1:29700", "::1"), ("", "127.0.0.1")):
        settings = TlsSettings.given(*paths, endpoint=endpoint)
        assert settings is not None
        assert settings.name == name
        assert TlsSettings.from_environment(environment(settings)) == settings
        assert TlsSettings.from_environment({**environment(settings), **environment(None)}) is None, "of an outer run"
    assert TlsSettings.given(None, None, None, endpoint="head:29700") is None
    assert TlsSettings.from_environment({}) is None
