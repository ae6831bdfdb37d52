"""Runs a function in a process of its own, which may be killed, starved or stripped of its rights."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

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


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as e:
        raise CannotTry(f"the peak cannot be reset: {e}") from e
