"""Objects in S3, Google Cloud Storage and Azure, by obstore: the requests behind a :class:`~.places.Remote`.

Every error of obstore becomes an ``OSError`` with one sentence, so that whoever reads and writes files need not know
where they are. Credentials come from the environment and nowhere else: no metadata address is asked, unless
``HOLDFAST_STORE_METADATA=1`` says so. They are in no message and no log.

Two clients: *quick* gives up after seconds, for small requests that training or a lease may wait for; *patient* tries
again for minutes, for data that is written in the background.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from holdfast.checkpoint.places import Bytes, Facts, Remote, sent
from holdfast.errors import CheckpointError, UsageError

METADATA = "HOLDFAST_STORE_METADATA"  # a variable of the environment: 1 has the machine's own credentials asked for
PART = 8 << 20  # bytes of one part of an upload: S3 wants 5 MiB at least; two of our blocks
PARTS = 9000  # at most; S3 allows 10,000, so objects of more than 72 GB have larger parts
UPLOADS = 4  # parts that are on their way at the same time, at most
AHEAD = 1  # parts that are filled and hashed meanwhile
PROBES = 3  # objects that a store must have created twice before it is refused
QUICK = (10, 15, 5)  # seconds for an answer, seconds in which a request is made again, and how often
PATIENT = (120, 120, 10)
_FULL = ("507", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "StorageQuotaExceeded")
_ELSEWHERE = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraint",
    "edirect without LOCATION",
)
_SIGNS = {  # of credentials in the environment; others than these are looked for on a metadata address
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
    ),
}
_memory: dict[str, MemoryStore] = {}  # what was written to memory:// in this process, by bucket
_stores: dict[tuple[int, str, str], ObjectStore] = {}  # by process: a client does not survive a fork
_lock = threading.Lock()


def store_of(scheme: str, bucket: str) -> ObjectStore:
    """The client of a bucket in this process, made at the first use."""
    key = (os.getpid(), scheme, bucket)
    with _lock:
        if key not in _stores:
            _stores[key] = ObjectStore(scheme, bucket)
        return _stores[key]


class ObjectStore:
    """One bucket. Every method raises ``OSError`` if the store refuses, or cannot be reached."""

    def __init__(self, scheme: str, bucket: str) -> None:
        self.scheme, self.bucket = scheme, bucket
        _refuse_without_credentials(scheme, bucket)
        self._ready = False

    @cached_property
    def _quick(self) -> Any:
        return _client(self.scheme, self.bucket, *QUICK)

    @cached_property
    def _patient(self) -> Any:
        return _client(self.scheme, self.bucket, *PATIENT, signs_content=False)

    # --- looking ---

    def head(self, place: Remote) -> Facts:
        """The facts of an object. Raises ``FileNotFoundError``."""
        if not place.key:
            raise FileNotFoundError(errno.ENOENT, "a bucket is no object", str(place))
        with _explained(place):
            return _facts(obstore.head(self._quick, place.key))

    def children(self, folder: Remote) -> list[Remote]:
        """The objects and folders in a folder, by name."""
        with _explained(folder):
            found = obstore.list_with_delimiter(self._quick, folder.key or None)
        keys = [*(one["path"] for one in found["objects"]), *found["common_prefixes"]]
        # A key that ends with a slash is a placeholder of some tool for the folder itself.
        return sorted({Remote(self.scheme, self.bucket, key.strip("/")) for key in keys} - {folder})

    def walk(self, folder: Remote) -> Iterator[tuple[Remote, Facts]]:
        """All objects below a folder."""
        with _explained(folder):
            for page in obstore.list(self._quick, folder.key or None, chunk_size=1000):
                for one in page:
                    yield Remote(self.scheme, self.bucket, one["path"]), _facts(one)

    # --- reading ---

    def read(self, place: Remote) -> bytes:
        """The content of an object."""
        with _explained(place):
            return bytes(obstore.get(self._patient, place.key).bytes())

    def read_range(self, place: Remote, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of an object."""
        with _explained(place):
            found = obstore.get_range(self._patient, place.key, start=start, end=stop)
        return np.frombuffer(memoryview(found), dtype=np.uint8)

    # --- writing ---

    def write(self, place: Remote, content: bytes) -> None:
        """Make or replace a small object."""
        with _explained(place):
            obstore.put(self._quick, place.key, content, use_multipart=False)
        sent.bytes += len(content)

    def create(self, place: Remote, content: bytes) -> bool:
        """Make an object under the condition that there is none; return whether this call has made it."""
        return self._conditional(place, content, "create")

    def replace(self, place: Remote, content: bytes, version: str) -> bool:
        """Replace an object under the condition that it is of a version; return whether this call has done it."""
        tag, _, number = version.partition("\n")
        known = {"e_tag": tag, "version": number}
        return self._conditional(place, content, {name: value for name, value in known.items() if value})

    def _conditional(self, place: Remote, content: bytes, mode: Any) -> bool:
        self.refuse_if_unfit(place.parent)
        try:
            with _explained(place):
                obstore.put(self._quick, place.key, content, mode=mode)
        except FileExistsError:
            # It may be ours: the answer to the first request was lost, and the request was made again.
            return self.read(place) == content
        except FileNotFoundError:  # what was to be replaced has been removed
            return False
        return True

    def write_blocks(self, place: Remote, size: int, block: Callable[[int, int], Bytes], threads: int) -> None:
        """Write a large object in parts, of which several are on their way at the same time.

        It appears when all of them are there. After an error the store is told to forget the parts.
        """
        part = part_size(size)

        def parts(pool: ThreadPoolExecutor) -> Iterator[memoryview]:
            # obstore asks for parts on a thread of its own, on which nothing can be read from a store.
            ahead: deque[Future[Bytes]] = deque()
            for start in range(0, size, part):
                ahead.append(pool.submit(block, start, min(start + part, size)))
                if len(ahead) > AHEAD:
                    yield ahead.popleft().result().data
                sent.bytes += part
            yield from (each.result().data for each in ahead)

        at_once = max(1, min(2 * threads, UPLOADS * PART // part))
        with _explained(place), ThreadPoolExecutor(AHEAD, "holdfast-parts") as pool:
            obstore.put(self._patient, place.key, parts(pool), chunk_size=part, max_concurrency=at_once)

    def delete(self, place: Remote) -> None:
        """Remove an object, if it is there."""
        with _explained(place):
            obstore.delete(self._quick, place.key)

    # --- whether it is fit ---

    def refuse_if_unfit(self, folder: Remote) -> None:
        """Make sure, once, that the store keeps conditions: an object that is there must not be created again.

        Raises ``CheckpointError`` if it does not: two writers could both commit there. Raises ``OSError`` if there is
        no such bucket, or no right to write.
        """
        if self._ready:
            return
        # More than once: another process may take a probe for litter, and remove it between the two requests.
        self._ready = any(self._keeps_conditions(folder) for _ in range(PROBES))
        if not self._ready:
            raise CheckpointError(
                f"the store of {folder} ignores conditions: it has created the same object twice (If-None-Match)",
                hint="two writers could both win there; take a store with conditional writes, as S3, GCS, Azure or "
                "SeaweedFS",
            )

    def _keeps_conditions(self, folder: Remote) -> bool:
        """Whether the store refuses to create one small object twice."""
        probe = folder / f".probe-{secrets.token_hex(6)}"
        with _explained(probe):
            obstore.put(self._quick, probe.key, b"1", mode="create")
            try:
                obstore.put(self._quick, probe.key, b"2", mode="create")
                return False
            except AlreadyExistsError:
                return True
            finally:
                obstore.delete(self._quick, probe.key)


def part_size(size: int) -> int:
    """The size of the parts in which an object is uploaded, a multiple of ``PART``.

    >>> part_size(1 << 30) >> 20, part_size(100 << 30) >> 20
    (8, 16)
    """
    return PART * max(1, -(-size // (PARTS * PART)))


def _facts(meta: Any) -> Facts:
    # Google's store tells versions by numbers, the others by tags.
    version = "\n".join([meta["e_tag"] or "", meta["version"] or ""])
    return Facts(st_size=meta["size"], st_mtime=meta["last_modified"].timestamp(), version=version)


# --- the client -----------------------------------------------------------------------------------


def _refuse_without_credentials(scheme: str, bucket: str) -> None:
    known = _SIGNS.get(scheme, ())
    if known and os.environ.get(METADATA) != "1" and not any(os.environ.get(name) for name in known):
        pair = " and AWS_SECRET_ACCESS_KEY" if scheme == "s3" else ""
        raise UsageError(
            f"no credentials for {scheme}://{bucket}: set {known[0]}{pair}",
            hint=f"or {METADATA}=1, to ask this machine's metadata address for them",
        )


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _client(scheme: str, bucket: str, timeout: int, again: int, tries: int, *, signs_content: bool = True) -> Any:
    if scheme == "memory":
        return _memory.setdefault(bucket, MemoryStore())
    endpoint = {
        "s3": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "az": os.environ.get("AZURE_STORAGE_ENDPOINT"),
    }.get(scheme)
    options = {
        "client_options": {
            "timeout": timedelta(seconds=timeout),
            "connect_timeout": timedelta(seconds=5),
            "allow_http": (endpoint or "").startswith("http:"),
        },
        "retry_config": {"max_retries": tries, "retry_timeout": timedelta(seconds=again)},
        **({"endpoint": endpoint} if endpoint else {}),
    }
    if scheme == "s3":
        region = _region()
        named = {name: os.environ.get(f"AWS_{name}".upper()) for name in ("access_key_id", "secret_access_key")}
        named["session_token"] = os.environ.get("AWS_SESSION_TOKEN")
        given = {name: value for name, value in named.items() if value}
        unsigned = not signs_content and may_leave_unsigned(endpoint or "", os.environ.get("AWS_UNSIGNED_PAYLOAD"))
        return S3Store(bucket, region=region, unsigned_payload=unsigned, **given, **options)  # type: ignore[arg-type]
    return (GCSStore if scheme == "gs" else AzureStore)(bucket, **options)  # type: ignore[arg-type]


def may_leave_unsigned(endpoint: str, wish: str | None) -> bool:
    """Whether requests may leave the bytes of data unsigned, which saves a quarter of an upload's time.

    They may where nobody can change them on the way: under TLS, and on loopback. ``wish``: of the user, who decides.

    >>> may_leave_unsigned("", None), may_leave_unsigned("http://127.0.0.1:8333", None)
    (True, True)
    >>> may_leave_unsigned("http://store:8333", None), may_leave_unsigned("http://store:8333", "true")
    (False, True)
    """
    if wish:
        return wish.lower() != "false"
    address = urlsplit(endpoint)
    return address.scheme != "http" or address.hostname in ("localhost", "127.0.0.1", "::1")


# --- errors ---------------------------------------------------------------------------------------


@contextmanager
def _explained(place: Remote) -> Iterator[None]:
    """Turns errors of obstore into an ``OSError`` of one sentence."""
    try:
        yield
    except FileNotFoundError as e:
        if "NoSuchBucket" in str(e):
            raise _other(str(e), place) from e
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(place)) from e
    except (AlreadyExistsError, PreconditionError) as e:
        raise FileExistsError(errno.EEXIST, "somebody else has made it", str(place)) from e
    except (PermissionDeniedError, UnauthenticatedError) as e:
        raise PermissionError(errno.EACCES, f"the store says {said(str(e))}", str(place)) from e
    except (GenericError, BaseError) as e:
        raise _other(str(e), place) from e


def _other(text: str, place: Remote) -> OSError:
    answer = said(text)
    if any(sign in answer for sign in _FULL):
        return OSError(errno.ENOSPC, f"the store says {answer}", str(place))
    if "NoSuchBucket" in answer or "InvalidBucketName" in answer:
        return OSError(errno.ENXIO, f"there is no bucket {place.bucket}", str(place))
    if any(sign in answer for sign in _ELSEWHERE):
        words = f"the bucket is in another region than AWS_REGION, {_region()}: {answer.removeprefix('nothing: ')}"
        return OSError(errno.ENXIO, words, str(place))
    return OSError(errno.EIO, f"the store says {answer}", str(place))


def said(text: str) -> str:
    """What a store has answered, from the text of an error.

    >>> said("S3 error: … - Server returned non-2xx status code: 503 Slow: <Error><Code>SlowDown</Code></Error>")
    '503 Slow, SlowDown'
    >>> said("Generic S3 error: Error performing PUT http://host/b in 5 ms, after 2 retries - HTTP error: refused")
    'nothing: HTTP error: refused'
    """
    status = re.search(r"status code: ([0-9]{3}[^:<\n]*)", text)
    code = re.search(r"<Code>([^<]{1,80})</Code>", text)
    if status is not None:
        return status[1].strip() + (f", {code[1]}" if code else "")
    return "nothing: " + text.partition("\n")[0].rpartition(" - ")[2][:200]
