"""Crashes: a process that is killed at a chosen call, and a disk that loses what was not synced."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.checkpoint.child import in_child

FOR_NAMES = ("mkdir", "rmdir", "unlink", "open", "replace")  # the first argument is a path
FOR_FILES = ("posix_fallocate", "pwrite", "write", "ftruncate", "fsync", "close")  # it is a descriptor


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that changes, or could change, what is on the disk below a folder."""

    name: str
    path: Path
    args: tuple[Any, ...]
    created: bool = False
    failed: bool = False

    @property
    def text(self) -> str:
        return f"{self.name} {self.path.name}"


@contextmanager
def watched(root: Path, around: Callable[[Call, Callable[[], Any]], Any]) -> Iterator[None]:
    """Every call of ``os`` that concerns something below the root goes through ``around(call, do_it)``."""
    real = {name: getattr(os, name) for name in (*FOR_NAMES, *FOR_FILES)}
    descriptors: dict[int, Path] = {}

    def for_name(name: str) -> Callable[..., Any]:
        def called(first: Any, *args: Any, **options: Any) -> Any:
            path = Path(os.fsdecode(first)) if not isinstance(first, int) else Path()
            if path != root and root not in path.parents:
                return real[name](first, *args, **options)
            created = name == "open" and bool(args[0] & os.O_CREAT)
            call = Call(name=name, path=path, args=args, created=created)
            result = around(call, lambda: real[name](first, *args, **options))
            if name == "open":
                descriptors[result] = path
            return result

        return called

    def for_file(name: str) -> Callable[..., Any]:
        def called(fd: int, *args: Any) -> Any:
            if fd not in descriptors:
                return real[name](fd, *args)
            path = descriptors.pop(fd) if name == "close" else descriptors[fd]
            return around(Call(name=name, path=path, args=args), lambda: real[name](fd, *args))

        return called

    try:
        for name in FOR_NAMES:
            setattr(os, name, for_name(name))
        for name in FOR_FILES:
            setattr(os, name, for_file(name))
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


# --- killed -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL at the ``at``-th call below the root: before it, after it, or when half of it is written."""

    root: Path
    at: int
    when: str

    def carry_out(self, work: Callable[[], None]) -> None:
        lock, count = threading.Lock(), itertools.count(1)

        def around(call: Call, do_it: Callable[[], Any]) -> Any:
            with lock:  # nobody else gets further while one is being killed
                mine = next(count) == self.at
                if mine and self.when == "before":
                    die()
                if mine and self.when == "half":
                    write_half(call)
                    die()
                try:
                    return do_it()
                finally:
                    if mine:
                        die()

        real_open, real_pwrite = os.open, os.pwrite  # the lock is held, and these do not count

        def write_half(call: Call) -> None:
            data, offset = call.args[0], call.args[1] if call.name == "pwrite" else 0
            fd = real_open(call.path, os.O_WRONLY)
            real_pwrite(fd, bytes(data[: len(data) // 2]), offset)

        with watched(self.root, around):
            work()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def calls_of(root: Path, work: Callable[[], None]) -> list[Call]:
    """What a piece of work does to the disk, in order."""
    lock = threading.Lock()
    calls: list[Call] = []

    def around(call: Call, do_it: Callable[[], Any]) -> Any:
        with lock:
            args = tuple(bytes(a) if isinstance(a, memoryview) else a for a in call.args)
            calls.append(replace(call, args=args, failed=True))
            result = do_it()
            calls[-1] = replace(calls[-1], failed=False)
            return result

    with watched(root, around):
        work()
    return calls


def kills_of(root: Path, calls: Sequence[Call]) -> Iterator[Kill]:
    """Every way to be killed during these calls; between two of them nothing on the disk changes."""
    for number, call in enumerate(calls, 1):
        for when in ("before", "half") if call.name in ("pwrite", "write") else ("before",):
            yield Kill(root=root, at=number, when=when)
    yield Kill(root=root, at=len(calls), when="after")


def sweep(
    tmp_path: Path, before: Callable[[Path], None], work: Callable[[Path], None], after: Callable[[Path], str]
) -> Iterator[str]:
    """The verdict after every kill, in the order of the calls; all is done to the folder ``here``."""
    origin, place = tmp_path / "origin", tmp_path / "place"
    origin.mkdir()
    before(origin / "here")
    shutil.copytree(origin, place)
    calls = calls_of(place, lambda: work(place / "here"))
    for kill in kills_of(place, calls):
        shutil.rmtree(place)
        shutil.copytree(origin, place)
        in_child(lambda kill=kill: kill.carry_out(lambda: work(place / "here")), killed=True)
        yield after(place / "here")


# --- without power ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    """A file: what of it is durable, and the changes that are not yet."""

    durable: bytes = b""
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)  # bytes at an offset, or a length

    def content(self, kept: str) -> bytes:
        chosen = {"none": [], "all": self.pending, "some": self.pending[::2]}[kept]
        data = bytearray(self.durable)
        for change in chosen:
            if isinstance(change, int):
                data = data[:change].ljust(change, b"\0")
            else:
                offset, new = change
                data = data.ljust(offset, b"\0")
                data[offset : offset + len(new)] = new
        return bytes(data)


FOLDER = Node()
Names = dict[Path, Node]


class Disk:
    """The worst disk that keeps to the rules: a file's fsync makes its bytes durable, a folder's its names.

    Everything else may be lost or kept in any combination when the power fails. A rename is whole or not.
    """

    def __init__(self, root: Path) -> None:
        self.names: Names = {
            path: FOLDER if path.is_dir() else Node(durable=path.read_bytes()) for path in [root, *root.rglob("*")]
        }
        self.root = root
        self.durable: Names = dict(self.names)
        self.pending: list[Call] = []
        self._nodes: dict[int, Node] = {}

    def apply(self, call: Call) -> None:
        if call.failed:
            return
        if call.name == "fsync":
            self._sync(call.path)
        elif call.name in ("mkdir", "rmdir", "unlink", "replace") or call.created:
            node = FOLDER if call.name == "mkdir" else Node() if call.created else self.names[call.path]
            self._nodes[id(call)] = node
            self._change(self.names, call)
            self.pending.append(call)
        elif call.name == "pwrite":
            self.names[call.path].pending.append((call.args[1], call.args[0]))
        elif call.name == "write":
            node = self.names[call.path]
            node.pending.append((len(node.content("all")), call.args[0]))
        elif call.name in ("ftruncate", "posix_fallocate"):
            self.names[call.path].pending.append(sum(call.args))

    def _change(self, names: Names, call: Call) -> None:
        if call.name in ("rmdir", "unlink", "replace"):
            names.pop(call.path, None)
        if call.name in ("mkdir", "open", "replace"):
            names[Path(call.args[0]) if call.name == "replace" else call.path] = self._nodes[id(call)]

    def _sync(self, path: Path) -> None:
        node = self.names[path]
        if node is not FOLDER:
            node.durable, node.pending = node.content("all"), []
            return
        for call in [call for call in self.pending if call.path.parent == path]:
            self._change(self.durable, call)
            self.pending.remove(call)

    def _is_inside(self, path: Path) -> bool:
        return path == self.root or self.root in path.parents

    def after_a_failure(self) -> Iterator[dict[Path, bytes | None]]:
        """Everything that may be found when the power is back; a folder has no bytes."""
        for count in range(len(self.pending) + 1):
            for kept in itertools.combinations(self.pending, count):
                names = dict(self.durable)
                for call in kept:
                    self._change(names, call)
                there = {path for path in names if all(p in names for p in path.parents if self._is_inside(p))}
                for content in ("none", "some", "all"):
                    yield {p: None if names[p] is FOLDER else names[p].content(content) for p in sorted(there)}


def put_back(found: dict[Path, bytes | None], root: Path, place: Path) -> None:
    """Makes a state real, in another place."""
    for path, content in found.items():
        target = place / path.relative_to(root)
        if content is None:
            target.mkdir()
        else:
            target.write_bytes(content)


def states(
    root: Path, place: Path, disk: Disk, calls: Sequence[Call], verdict: Callable[[Path], str]
) -> tuple[set[str], set[str]]:
    """The verdicts of all that a power failure may leave: at any moment, and when all is done."""
    known: dict[int, str] = {}

    def judge() -> set[str]:
        found = set()
        for state in disk.after_a_failure():
            key = hash(tuple(state.items()))
            if key not in known:
                shutil.rmtree(place, ignore_errors=True)
                put_back(state, root, place)
                known[key] = verdict(place)
            found.add(known[key])
        return found

    ever = judge()
    for call in calls:
        disk.apply(call)
        ever |= judge()
    return ever, judge()
