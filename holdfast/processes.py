"""Facts that the kernel tells about any process of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EXITING = 0x4  # of the flags in proc(5): the kernel's PF_EXITING, set before a process loses its connections


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """A process as ``/proc/<pid>/stat`` shows it."""

    state: str  # one letter, as in proc(5)
    start: str  # when it started, in ticks since the boot: tells it from a later process with the same number
    flags: int = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it: then it takes no other signal but SIGKILL."""
        return self.state in "Tt"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and only its entry is left: it does nothing any more."""
        return self.state in "ZX"

    @property
    def is_ending(self) -> bool:
        """Whether it has ended, or the kernel takes it down already: a signal that is sent now is not the cause."""
        return self.is_over or bool(self.flags & EXITING)


def facts_of(pid: int) -> KernelFacts | None:
    """Return what the kernel says of a process; None if there is none, or this machine does not tell.

    >>> import os
    >>> facts_of(os.getpid()).is_stopped
    False
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return KernelFacts(state=words[0], start=words[19], flags=int(words[6]))
    except (OSError, IndexError, ValueError):
        return None


def is_stopped(pid: int) -> bool:
    """Whether a process is there, and stopped."""
    facts = facts_of(pid)
    return facts is not None and facts.is_stopped


LOADER = "hf-loader "  # begin of the names of processes that read data for a worker


def loaders_of(worker: int) -> list[int]:
    """Return the loaders of a worker: its grandchildren of that name. None are found where this machine does not tell.

    >>> import os
    >>> loaders_of(os.getpid())
    []
    """
    nurseries = _children_of(worker)
    return [pid for nursery in nurseries for pid in _children_of(nursery) if _name_of(pid).startswith(LOADER)]


def descendants_of(pid: int) -> list[int]:
    """Return a process's children, theirs, and so on, at this moment."""
    children = _children_of(pid)
    return [each for child in children for each in (child, *descendants_of(child))]


def parent_of(pid: int) -> int:
    """Return the process that has started this one. Raises ``OSError`` if there is none."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _children_of(pid: int) -> list[int]:
    try:
        found = [(thread / "children").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for line in found for child in line.split()]


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
