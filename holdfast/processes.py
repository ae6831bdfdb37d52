"""Facts that the kernel tells about any process of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """A process as ``/proc/<pid>/stat`` shows it."""

    state: str  # one letter, as in proc(5)
    start: str  # when it started, in ticks since the boot: tells it from a later process with the same number

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it: then it takes no other signal but SIGKILL."""
        return self.state in "Tt"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and only its entry is left: it does nothing any more."""
        return self.state in "ZX"


def facts_of(pid: int) -> KernelFacts | None:
    """Return what the kernel says of a process; None if there is none, or this machine does not tell.

    >>> import os
    >>> facts_of(os.getpid()).is_stopped
    False
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return KernelFacts(state=words[0], start=words[19])
    except (OSError, IndexError):
        return None


def is_stopped(pid: int) -> bool:
    """Whether a process is there, and stopped."""
    facts = facts_of(pid)
    return facts is not None and facts.is_stopped
