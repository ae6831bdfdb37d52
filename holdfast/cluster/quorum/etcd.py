"""A client of etcd: the few calls that an election needs, over etcd's own HTTP gateway for JSON.

Any member of an etcd cluster serves any call. One that does not answer is passed over for the next. Keys and values are
text here; etcd wants them in base64.
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    import httpx

CALL_SECONDS = 1.0  # for one call to one member: they take milliseconds, and a lease of 2 s must not pass meanwhile
LOGIN_SECONDS = 5.0  # etcd hashes a password for long on purpose: a busy one would begin anew with each further try
PORT = 2379  # etcd's own default
_UNAVAILABLE = (1, 4, 8, 14)  # gRPC codes: cancelled, too late, overloaded, no leader
_FORBIDDEN = 7  # gRPC code
_LOGIN = "auth/authenticate"  # the path of the call that gives a token for a password
_BAD_TOKEN = 16  # gRPC code: the password's token is too old, or its member was restarted


class EtcdUnreachable(HoldfastError):
    """Error: no member of etcd has answered, or etcd has lost its quorum. It may be back later."""


class EtcdRefused(UsageError):
    """Error: etcd has understood the call and refused it, because of a wrong password for example."""


FAILURES = (EtcdUnreachable, EtcdRefused)  # after a good start, both may pass: a password may be changed, too


@dataclass(frozen=True, kw_only=True)
class EtcdSettings:
    """Where etcd is, and how its clients prove who they are.

    >>> EtcdSettings.given("a:2379,https://b").endpoints
    ('http://a:2379', 'https://b:2379')
    """

    endpoints: tuple[str, ...]
    ca: str = ""  # PEM file of the CA that signed etcd's certificates; "": the system's
    cert: str = ""  # PEM file of this client's certificate; "": none
    key: str = ""  # PEM file of its private key
    user: str = ""
    password: str = field(default="", repr=False)

    @staticmethod
    def given(text: str, environment: Mapping[str, str] = os.environ) -> EtcdSettings:
        """Read ``--rdzv-endpoint`` and the environment variables of ``etcdctl``, etcd's own client.

        Raises ``UsageError`` for an endpoint that is none, and for files that are not there.
        """
        user, _, password = environment.get("ETCDCTL_USER", "").partition(":")
        files = {name: environment.get(f"ETCDCTL_{variable}", "") for name, variable in _FILES.items()}
        for name, path in files.items():
            if path and not os.path.isfile(path):
                raise UsageError(f"there is no file {path}", hint=f"ETCDCTL_{_FILES[name]} names it")
        secure = any(files.values())
        endpoints = tuple(_endpoint(part.strip(), secure=secure) for part in text.split(",") if part.strip())
        if not endpoints:
            raise UsageError("--rdzv-backend etcd needs etcd's addresses", hint="--rdzv-endpoint a:2379,b:2379,c:2379")
        password = environment.get("ETCDCTL_PASSWORD", password)
        return EtcdSettings(endpoints=endpoints, user=user, password=password, **files)

    def context(self) -> ssl.SSLContext | bool:
        """Return what TLS needs. Raises ``UsageError`` for files that are no certificates."""
        if not self.endpoints[0].startswith("https"):
            return False
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except (OSError, ssl.SSLError) as e:
            raise UsageError(f"etcd's certificates cannot be used: {e}", hint="ETCDCTL_CACERT, _CERT and _KEY") from e
        return context


_FILES = {"ca": "CACERT", "cert": "CERT", "key": "KEY"}


def _endpoint(text: str, *, secure: bool) -> str:
    found = re.fullmatch(r"(?:(https?)://)?(\[[0-9A-Fa-f:]+\]|[\w.-]+)(?::(\d{1,5}))?", text, re.ASCII)
    if found is None or int(found[3] or PORT) not in range(1, 2**16):
        raise UsageError(f"'{text}' is no address of etcd", hint="--rdzv-endpoint a:2379,b:2379,c:2379")
    return f"{found[1] or ('https' if secure else 'http')}://{found[2]}:{found[3] or PORT}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A key's value, and the revisions of the store at which it was created and last changed."""

    value: str
    created: int
    changed: int


Compare = dict[str, Any]
Operation = dict[str, Any]


def created_at(key: str, revision: int) -> Compare:
    """Return the condition that a key was created at a revision; 0: that it is not there."""
    return {"key": _code(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def changed_at(key: str, revision: int) -> Compare:
    """Return the condition that a key was last changed at a revision; 0: that it is not there."""
    return {"key": _code(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: str, value: str, *, lease: int = 0) -> Operation:
    """Return the operation that sets a key. It goes when its lease does; 0: it stays."""
    return {"request_put": {"key": _code(key), "value": _code(value), "lease": str(lease)}}


def delete(key: str) -> Operation:
    """Return the operation that removes a key."""
    return {"request_delete_range": {"key": _code(key)}}


class Etcd:
    """A client, to be used as ``async with Etcd(settings) as etcd``. All methods raise ``EtcdUnreachable``."""

    def __init__(self, settings: EtcdSettings) -> None:
        try:
            import httpx  # an extra: only runs with etcd need it
        except ImportError as e:
            raise UsageError("--rdzv-backend etcd needs httpx", hint="pip install 'holdfast[etcd]'") from e
        self._settings = settings
        self._failures = (httpx.TransportError, OSError)
        verify = settings.context()
        self._http: httpx.AsyncClient = httpx.AsyncClient(verify=verify, timeout=CALL_SECONDS, trust_env=False)
        self._token = ""  # that stands for user and password
        self.member = 0  # the member that is asked first: the last one that has answered

    async def __aenter__(self) -> Etcd:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    @property
    def address(self) -> str:
        """The address of the member that is asked first."""
        return self._settings.endpoints[self.member]

    # --- keys ------------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        """Return a key's entry; None if it is not there."""
        return (await self._range({"key": _code(key)})).get(key)

    async def get_all(self, prefix: str) -> dict[str, Entry]:
        """Return the entries of all keys that begin with a prefix."""
        last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return await self._range({"key": _code(prefix), "range_end": _code(last)})

    async def _range(self, request: Mapping[str, str]) -> dict[str, Entry]:
        return _entries((await self._call("kv/range", request)).get("kvs", []))

    async def transact(self, compare: Sequence[Compare], then: Sequence[Operation]) -> bool:
        """Do all operations at once if all conditions hold; return whether they did.

        If the connection is lost in the middle, it may have been done or not: so ask only for what may be done twice.
        """
        found = await self._call("kv/txn", {"compare": [*compare], "success": [*then]})
        return bool(found.get("succeeded"))

    async def watch(self, key: str) -> AsyncIterator[Entry | None]:
        """Yield a key's entry (None: it is not there), and again whenever it changes. Raises if the member is lost."""
        import httpx

        found = await self._call("kv/range", {"key": _code(key)})
        yield _entries(found.get("kvs", [])).get(key)
        request = {"create_request": {"key": _code(key), "start_revision": str(int(found["header"]["revision"]) + 1)}}
        patience = httpx.Timeout(CALL_SECONDS, read=None)
        try:
            async with self._http.stream(
                "POST", f"{self.address}/v3/watch", json=request, headers=self._headers, timeout=patience
            ) as answer:
                async for line in answer.aiter_lines():
                    told = json.loads(line).get("result", {}) if line else {}
                    if told.get("canceled"):  # the connection stays open, and nothing would ever come
                        raise EtcdUnreachable(f"{self.address} has ended the watch: {told.get('cancel_reason', '')}")
                    for event in told.get("events", []):
                        gone = event.get("type") == "DELETE"
                        yield None if gone else _entries([event["kv"]])[key]
        except self._failures as e:
            raise EtcdUnreachable(f"the watch at {self.address} has ended: {e}") from e

    # --- leases ----------------------------------------------------------------------------------

    async def grant(self, seconds: int) -> int:
        """Return a new lease. Keys under it go when it was not kept alive for so long."""
        return int((await self._call("lease/grant", {"TTL": str(seconds)}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Begin a lease's time anew; return False if it is gone."""
        found = await self._call("lease/keepalive", {"ID": str(lease)})
        return int(found.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it its keys. One that is gone does no harm."""
        try:
            await self._call("lease/revoke", {"ID": str(lease)})
        except EtcdRefused as e:
            if "not found" not in str(e):
                raise

    # --- calls -----------------------------------------------------------------------------------

    async def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask one member after the other until one answers."""
        if self._settings.user and not self._token:
            await self._authenticate()
        try:
            return await self._ask(path, body)
        except _TokenExpired:
            await self._authenticate()
        try:
            return await self._ask(path, body)
        except _TokenExpired as e:  # the next member was asked, which was just started and has not heard of it
            raise EtcdUnreachable(f"etcd does not know the token that it has given: {e}") from e

    async def _authenticate(self) -> None:
        """Get a token. Other calls go on with the old one: without any they would be refused."""
        who = {"name": self._settings.user, "password": self._settings.password}
        self._token = (await self._ask(_LOGIN, who))["token"]

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    async def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        said = ""
        for _ in self._settings.endpoints:
            found = await self._post(path, body)
            error = found.get("error")
            if error is None:
                return found
            found = error if isinstance(error, dict) else found  # of a stream
            said, code = str(found.get("message", error)), found.get("code", found.get("grpc_code"))
            if code not in _UNAVAILABLE:
                raise _refusal(said, code)
            self.member = (self.member + 1) % len(self._settings.endpoints)
        where = ", ".join(self._settings.endpoints)
        raise EtcdUnreachable(f"etcd does not answer at {where}: {said}", hint="is it up, and has it a quorum?")

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the first member answers, as JSON. If it does not, that is an error of the kind "unavailable"."""
        import httpx

        headers, patience = self._headers, self._http.timeout
        if path == _LOGIN:  # with an old token it would be refused
            headers, patience = {}, httpx.Timeout(CALL_SECONDS, read=LOGIN_SECONDS)
        try:
            answer = await self._http.post(f"{self.address}/v3/{path}", json=body, headers=headers, timeout=patience)
        except self._failures as e:
            return {"error": str(e) or type(e).__name__, "code": _UNAVAILABLE[-1]}
        try:
            return dict(answer.json())
        except (TypeError, ValueError):
            if "CommonName" in answer.text:  # its gateway wants passwords or names in certificates, never both
                return {"error": _NAMED, "code": _FORBIDDEN}
            return {"error": f"what answers at {self.address} is no etcd", "code": _UNAVAILABLE[-1]}


_NAMED = "with passwords its gateway takes no client certificate that has a CommonName"


_HINTS = {  # by what etcd has said
    _NAMED: "ETCDCTL_CERT should be one without it",
    "permission denied": "the user needs to read and write keys below /holdfast/",
    "auth": "ETCDCTL_USER and ETCDCTL_PASSWORD say who asks",
    "user": "ETCDCTL_USER and ETCDCTL_PASSWORD say who asks",
}


class _TokenExpired(Exception):
    """etcd wants the password again."""


def _refusal(said: str, code: int | None) -> Exception:
    if code == _BAD_TOKEN or "invalid auth token" in said:
        return _TokenExpired(said)
    hint = next((each for word, each in _HINTS.items() if word in said), "see etcd's own log")
    return EtcdRefused(f"etcd refuses: {said.removeprefix('etcdserver: ')}", hint=hint)


def _entries(found: Sequence[Mapping[str, str]]) -> dict[str, Entry]:
    return {
        _text(each["key"]): Entry(
            value=_text(each.get("value", "")),
            created=int(each["create_revision"]),
            changed=int(each["mod_revision"]),
        )
        for each in found
    }


def _code(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(code: str) -> str:
    return base64.b64decode(code).decode()
