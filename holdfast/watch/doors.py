"""Who may ask the page's server for what: hosts, origins, the one-time code. Pure decisions."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable, Mapping

SESSIONS = 16  # browsers that have come in with a code; an older one makes room
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether a server at this address is for this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("127.0.0.1.evil.example")
    (True, False, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """Return the name in a Host header, without its port.

    >>> host_of("localhost:8642"), host_of("[::1]:80"), host_of("evil.example")
    ('localhost', '::1', 'evil.example')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def refusal_of_host(header: str, *, bound: str) -> str:
    """Return why a request is refused by the name that it asks for; "" if it is not.

    A page of a stranger can have its own name point to 127.0.0.1, and would then read what only this machine may.

    >>> refusal_of_host("evil.example:8642", bound="127.0.0.1")
    'this server answers to localhost and 127.0.0.1 alone'
    >>> refusal_of_host("head.cluster:8642", bound="0.0.0.0")
    ''
    """
    if is_loopback(bound) and not is_loopback(host_of(header)):
        return "this server answers to localhost and 127.0.0.1 alone"
    return ""


def refusal_of_origin(headers: Mapping[str, str]) -> str:
    """Return why a request that changes something is refused by where it comes from; "" if it is not.

    >>> refusal_of_origin({"origin": "http://localhost:1", "host": "localhost:1", "content-type": "application/json"})
    ''
    >>> refusal_of_origin({"origin": "http://evil.example", "host": "localhost:1", "content-type": "application/json"})
    'the request comes from another page'
    """
    if headers.get("origin") not in {f"{scheme}://{headers.get('host', '')}" for scheme in ("http", "https")}:
        return "the request comes from another page"
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return "the request comes from another page"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return "the request is no JSON"
    return ""


class Doorman:
    """Lets browsers in that show the one-time code, and knows them afterwards by a secret that they keep.

    A code opens once. The secret is sent in a header that no other page can make a browser send.

    >>> doorman = Doorman()
    >>> code = doorman.new_code()
    >>> secret = doorman.enter(code)
    >>> doorman.knows(f"Bearer {secret}"), doorman.enter(code), doorman.knows("Bearer x")
    (True, None, False)
    """

    WAIT_SECONDS = 0.5  # between two wrong codes that are looked at: guessing is hopeless, and costs nothing

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._code = ""
        self._secrets: list[str] = []
        self._clock, self._wrong = clock, -self.WAIT_SECONDS

    def new_code(self) -> str:
        """Return a code that opens once; the one before does not open any more."""
        self._code = secrets.token_urlsafe(24)
        return self._code

    def enter(self, code: str) -> str | None:
        """Return a secret for whoever shows the code; None if it is wrong, used, or right after a wrong one."""
        if not self._code or self._clock() - self._wrong < self.WAIT_SECONDS:
            return None
        if not hmac.compare_digest(code.encode(), self._code.encode()):
            self._wrong = self._clock()
            return None
        self._code = ""
        self._secrets = [*self._secrets, secrets.token_urlsafe(24)][-SESSIONS:]
        return self._secrets[-1]

    def knows(self, authorization: str) -> bool:
        """Whether a header ``Authorization`` shows a secret."""
        kind, _, shown = authorization.partition(" ")
        return kind == "Bearer" and any(hmac.compare_digest(shown.encode(), known.encode()) for known in self._secrets)
