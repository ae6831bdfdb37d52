"""Runs a function in a process of its own, which may be killed, starved or stripped of its rights."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SKIPPED = 77
_CLONE_NEWNS, _CLONE_NEWUSER, _MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x20000, 0x10000000, 1, 32, 16384, 1 << 18


class CannotTry(Exception):
    """This machine does not let us make the fault."""


def in_child(work: Callable[[], None], *, killed: bool = False) -> str:
    """Forks, does the work and returns what it said (see :func:`say`); fails as the work fails."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        os.dup2(write, _VOICE)
        code = 1
        try:
            work()
            code = 0
        except CannotTry as e:
            say(str(e))
            code = SKIPPED
        except BaseException:
            say(traceback.format_exc())
        os._exit(code)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == SKIPPED:
        pytest.skip(said)
    expected = -signal.SIGKILL if killed else 0
    assert os.waitstatus_to_exitcode(status) == expected, said or f"status {status}"
    return said


_VOICE = 200  # a number that nothing else uses


def say(text: str) -> None:
    """From within the child, to the parent."""
    os.write(_VOICE, text.encode())


def mount_tmpfs(place: Path, megabytes: int) -> None:
    """Puts a small file system over a folder, for this process alone; it goes with the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = _CLONE_NEWNS if os.getuid() == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    done = (
        libc.unshare(spaces) == 0
        and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and libc.mount(b"none", bytes(place), b"tmpfs", 0, f"size={megabytes}m".encode()) == 0
    )
    if not done:
        raise CannotTry(f"no tmpfs here: {os.strerror(ctypes.get_errno())}")


def make_read_only(place: Path) -> None:
    """Of a file system that :func:`mount_tmpfs` has mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", bytes(place), None, _MS_REMOUNT | _MS_RDONLY, None) != 0:
        raise CannotTry(f"no remount here: {os.strerror(ctypes.get_errno())}")


def become_nobody() -> None:
    """Root may do everything, whatever the modes say."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def memory(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise CannotTry(f"/proc has no {key}")


_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_taken: list[Any] = []  # what the heap had free


def cap(kind: int, key: str, more: int) -> None:
    """From here on, this process gets so many bytes more and no more; ``key`` is how /proc counts what ``kind`` limits.

    Memory that tests before this one have freed is in the heap of a fork too, hundreds of megabytes at times, and no
    limit counts it as more. So it is taken first, without touching it. And what malloc would hoard is not what is
    tested: it reserves 64 MB for each new thread, and keeps large blocks that are freed once it has seen some.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_ARENA_MAX, 1)
    assert libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (memory(key), hard))
    size = 1 << 30
    while size >= 1 << 20:
        try:
            _taken.append(np.empty(size, dtype=np.uint8))
        except MemoryError:
            size >>= 1
    resource.setrlimit(kind, (memory(key) + more, hard))


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as e:
        raise CannotTry(f"the peak cannot be reset: {e}") from e
