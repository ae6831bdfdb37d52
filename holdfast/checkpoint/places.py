"""Where checkpoints may be: a folder of this machine, or one in an object store, as in ``s3://bucket/run``.

``place_of`` is the one function that reads such texts. A folder in a store is a :class:`Remote`. It has those methods
of ``pathlib.Path`` that reading and listing need, and raises ``OSError`` as a path does. It has no ``__fspath__``, so
that whatever can only work with a real file fails at once, instead of writing into a folder named ``s3:``.

Three things differ, and callers ask ``isinstance(place, Remote)`` for them:

- An object appears at once and whole. Nothing is written under another name first, and there is nothing to sync.
- A name is made exclusive by a condition of the request (:meth:`Remote.create`, :meth:`Remote.replace`), not by
  ``link`` or ``O_EXCL``.
- A folder is nothing but a common begin of names: it is there when something is in it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

import numpy as np

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.checkpoint.object_store import ObjectStore

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SCHEMES = ("s3", "gs", "az", "memory")  # memory is of this process alone, for tests
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://?(.*)", re.DOTALL)


@dataclass(frozen=True, order=True)
class Remote:
    """An object of a store, or a folder of objects. ``key`` is its name in the bucket, without slashes around it.

    >>> run = Remote("s3", "bucket", "runs/gpt")
    >>> str(run / "step-00000012" / "../frozen"), run.name, str(run.parent)
    ('s3://bucket/runs/gpt/frozen', 'gpt', 's3://bucket/runs')
    """

    scheme: str
    bucket: str
    key: str = ""

    # --- names, as of a pathlib.Path ---

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + f"/{self.key}" * bool(self.key)

    def __truediv__(self, name: str | PurePosixPath) -> Remote:
        parts = self.key.split("/") if self.key else []
        for part in str(name).split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        return Remote(self.scheme, self.bucket, "/".join(parts))

    @property
    def name(self) -> str:
        """The last part of its name; of a whole bucket, the bucket's."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> Remote:
        """The folder that it is in; of a whole bucket, itself."""
        return self / ".."

    def absolute(self) -> Remote:
        """Itself: there is no current folder in a store."""
        return self

    def resolve(self) -> Remote:
        """Itself: there are no links in a store."""
        return self

    @property
    def parents(self) -> list[Remote]:
        """The folders that it is in, from the nearest on."""
        return [self.parent, *self.parent.parents] if self.key else []

    def is_relative_to(self, other: object) -> bool:
        """Whether it is another place, or below it."""
        return other == self or other in self.parents

    def relative_to(self, other: Path | Remote) -> PurePosixPath:
        """Its name, as seen from a folder that it is in."""
        assert isinstance(other, Remote)
        assert self.is_relative_to(other)
        return PurePosixPath(self.key[len(other.key) :].strip("/"))

    # --- what is there ---

    @property
    def store(self) -> ObjectStore:
        """The client of its bucket in this process. Raises ``UsageError`` where credentials are missing."""
        from holdfast.checkpoint.object_store import store_of

        return store_of(self.scheme, self.bucket)

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        try:
            self.store.head(self)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether there are objects below this name."""
        return next(self.store.walk(self), None) is not None

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """False: there are no links in a store."""
        return False

    def iterdir(self) -> Iterator[Remote]:
        """The objects and the folders in a folder; none if it is not there."""
        return iter(self.store.children(self))

    def stat(self) -> Facts:
        """The size of an object and the time at which it was made; of a folder, the newest time of what is in it."""
        try:
            return self.store.head(self)
        except FileNotFoundError:
            inside = [facts for _, facts in self.store.walk(self)]
            if not inside:
                raise
            return Facts(st_size=0, st_mtime=max(facts.st_mtime for facts in inside))

    # --- content ---

    def read_bytes(self) -> bytes:
        """The content of an object."""
        return self.store.read(self)

    def read_range(self, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of an object, or fewer where it ends."""
        return self.store.read_range(self, start, stop)

    def write_bytes(self, content: bytes) -> None:
        """Make an object, or replace it; it appears at once and whole."""
        self.store.write(self, content)

    def create(self, content: bytes) -> bool:
        """Make an object unless one of this name is there; return whether this call has made it."""
        return self.store.create(self, content)

    def replace(self, content: bytes, version: str) -> bool:
        """Replace an object if it still is of a version (``Facts.version``); return whether this call has done it."""
        return self.store.replace(self, content, version)

    def write_blocks(self, size: int, block: Callable[[int, int], Bytes], threads: int) -> None:
        """Write a large object in parallel parts. ``block(start, stop)`` gives its bytes, in order."""
        self.store.write_blocks(self, size, block, threads)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object. That there is none is no error in a store, whatever ``missing_ok`` says."""
        self.store.delete(self)

    def rmdir(self) -> None:
        """Nothing: a folder is gone when nothing is in it."""

    def __fspath__(self) -> NoReturn:
        raise OSError(errno.ENOTSUP, f"{self} is in an object store, and a file or folder is needed here")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a store knows of an object, by the names of ``os.stat_result``. ``version``: changes with its content."""

    st_size: int
    st_mtime: float
    version: str = ""

    @property
    def st_mtime_ns(self) -> int:
        """The time at which it was made, in nanoseconds since 1970."""
        return int(self.st_mtime * 1e9)


Place = Path | Remote


class Sent:
    """How many bytes this process has given to stores so far: a sign of life of a save."""

    bytes = 0  # counted by several threads at times: it only has to change


sent = Sent()


def place_of(given: str | os.PathLike[str] | Remote) -> Place:
    """The place that a user means: ``s3://``, ``gs://``, ``az://`` and ``memory://`` lead to a store.

    ``file://`` and everything else is a path of this machine. Raises ``UsageError`` for a store without a bucket, of an
    unknown kind, and if the extra is not installed.

    >>> place_of("s3://bucket/runs/gpt")
    Remote(scheme='s3', bucket='bucket', key='runs/gpt')
    >>> place_of("file:///data/gpt"), place_of("runs/gpt")
    (PosixPath('/data/gpt'), PosixPath('runs/gpt'))
    """
    if isinstance(given, Remote):
        return given
    text = os.fspath(given)
    found = _URL.fullmatch(text)
    # A Path makes one slash of two: "s3:/bucket" is one that was meant as a URL. Other names may have a colon in them.
    if found is None or (found[1] not in (*SCHEMES, "file") and "://" not in text):
        return Path(given)
    scheme, rest = found[1], found[2].rstrip("/")
    if scheme == "file":
        return Path("/", unquote(rest).lstrip("/"))
    if scheme not in SCHEMES:
        raise UsageError(f"{text} is in no store that is known", hint=f"known are {', '.join(SCHEMES)} and file")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise UsageError(f"{text} names no bucket", hint=f"as in {scheme}://bucket/run")
    if find_spec("obstore") is None:
        raise UsageError(f"{text} needs the package obstore", hint="pip install 'holdfast[s3]'")
    return Remote(scheme, bucket) / key


def on_disk(place: Place | None) -> Path | None:
    """A place if it is a folder of this machine; None for one in a store, and for None."""
    return None if isinstance(place, Remote) else place
