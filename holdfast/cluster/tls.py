"""Mutual TLS: both sides show a certificate, and check the other's against the same CA.

An agent also checks that the coordinator's certificate is for the name (or address) of the run's endpoint; where the
coordinator is elected, for the address that etcd tells. A client may have any name. TLS begins after the handshake of
``handshake.py``, so nobody without the token reaches OpenSSL.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cluster.handshake import PLAIN, TLS, Refused
from holdfast.errors import UsageError

OPTIONS = "--tls-cert, --tls-key and --tls-ca"
_CERTIFICATES = "check the certificates of both machines, and that --tls-ca is the same on all"
_VARIABLES = {field: f"HOLDFAST_TLS_{field.upper()}" for field in ("cert", "key", "ca", "name")}


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """The files of one machine, all PEM. They are read at each connection, so they can be renewed during a run."""

    cert: str  # path of this machine's certificate, with the chain to the CA if there is one
    key: str  # path of its private key, without a passphrase
    ca: str  # path of the certificates that the other side's must be signed by
    # What the server's certificate must be for: the host of the run's endpoint, a name or an address. "": the address
    # that is called, where any machine can have the coordinator.
    name: str

    @staticmethod
    def given(cert: Path | None, key: Path | None, ca: Path | None, *, endpoint: str | None) -> TlsSettings | None:
        """Return the settings of the three options; None if none is given. Raises ``UsageError`` on wrong ones.

        ``endpoint``: host:port of the coordinator; "" for a run on this machine alone; None if it is elected.
        """
        paths = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
        missing = [name for name, path in paths.items() if path is None]
        if len(missing) == len(paths):
            return None
        if cert is None or key is None or ca is None:
            raise UsageError(f"TLS needs {OPTIONS}", hint=f"{' and '.join(missing)} missing")
        name = "" if endpoint is None else endpoint.rpartition(":")[0].strip("[]") or "127.0.0.1"
        settings = TlsSettings(cert=str(cert.absolute()), key=str(key.absolute()), ca=str(ca.absolute()), name=name)
        settings._check()
        return settings

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> TlsSettings | None:
        """Read the settings that an agent hands to its workers; None without TLS."""
        if not environment.get(_VARIABLES["cert"]):
            return None
        return TlsSettings(**{field: environment[variable] for field, variable in _VARIABLES.items()})

    def client(self) -> ssl.SSLContext:
        """Return the context of a client. Raises OSError if a file does not do, as in the moment of its renewal."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def server(self) -> ssl.SSLContext:
        """Return the context of the server, which demands a certificate. Raises OSError if a file does not do."""
        context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslobject_class = _Explaining
        return context

    def among_workers(self, *, server: bool) -> ssl.SSLContext:
        """Return the context of one side of a link between two workers. Raises OSError if a file does not do.

        Both have to show a certificate of the CA. For which name is not asked: workers are on all machines.
        """
        if server:
            return self.server()
        context = self.client()
        context.check_hostname = False
        return context

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key, password=_no_passphrase)
        return context

    def _check(self) -> None:
        """Raise ``UsageError`` if a file does not do."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca)
        except OSError as e:
            raise UsageError(f"--tls-ca {self.ca} cannot be used: {_reason(e)}", hint="give a PEM file") from e
        try:
            self._load(context)
        except OSError as e:
            text = f"--tls-cert {self.cert} with --tls-key {self.key} cannot be used: {_reason(e)}"
            raise UsageError(text, hint="give PEM files that belong together, the key without a passphrase") from e


def mode(settings: TlsSettings | None) -> int:
    """Return the mode of the handshake."""
    return PLAIN if settings is None else TLS


def environment(settings: TlsSettings | None) -> dict[str, str]:
    """Return the variables that ``TlsSettings.from_environment`` reads.

    Without TLS they are empty: an agent may itself run in a worker of another run, whose variables it inherits.
    """
    return {variable: getattr(settings, field, "") for field, variable in _VARIABLES.items()}


def failure(error: ssl.SSLError) -> Refused | ConnectionError:
    """Return a failed TLS handshake in words: a refusal if a certificate is at fault, else a connection that broke."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refused(f"its certificate is not accepted: {error.verify_message}", hint=_CERTIFICATES)
    if "ALERT" in (error.reason or ""):
        return Refused(f"it does not accept this machine's certificate: {_reason(error)}", hint=_CERTIFICATES)
    return ConnectionError(f"TLS broke off: {_reason(error)}")


def _reason(error: OSError) -> str:
    """Return an error's reason as people say it: "unknown ca", "No such file or directory"."""
    if isinstance(error, ssl.SSLError) and error.reason:
        words = error.reason.lower().split("_")
        return " ".join(words[words.index("alert") + 1 :] if "alert" in words else words)
    return error.strerror or str(error) or "not PEM"


def _no_passphrase() -> str:
    """Stand in for OpenSSL's question on the terminal, which nobody would answer. Nothing is a wrong passphrase."""
    return ""


class _Explaining(ssl.SSLObject):
    """A server's TLS whose failed handshake carries the alert for the client, as ``error.alert``.

    asyncio closes a connection whose handshake has failed without sending it, and the client would never know why.
    """

    _unsent: ssl.MemoryBIO

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *arguments: Any, **named: Any) -> _Explaining:
        made = super()._create(incoming, outgoing, *arguments, **named)  # type: ignore[misc]
        made._unsent = outgoing
        return made

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as e:
            e.alert = self._unsent.read()  # type: ignore[attr-defined]
            raise
