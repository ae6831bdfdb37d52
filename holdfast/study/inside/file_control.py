"""Control of files (remove, sync, drop from the cache), and counters of memory and of written bytes.

Every checkpoint has a folder of its own, in which a format may make a file or a folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from pathlib import Path

from holdfast.measuring import drop_from_cache as drop_from_cache
from holdfast.measuring import files_of as files_of
from holdfast.measuring import sync_files as sync_files

CACHESTAT = 451  # the number of the system call, the same on all processors; Python does not know it
MEMORY = Path("/dev/shm")  # a file system without a disk below it


def memory_of(pid: int) -> Path:
    """Return a process's own folder in memory."""
    return MEMORY / f"holdfast-study-{pid}"


def empty(folder: Path) -> None:
    """Make an empty folder, and wait until the disk has nothing else to do."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _names = ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    _fields_ = tuple((name, ctypes.c_uint64) for name in _names)


def unwritten(folder: Path) -> int | None:
    """Return the bytes that the kernel has not handed to the disk yet; None before Linux 6.5, which cannot tell."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for each in files_of(folder):
        fd, pages = os.open(each, os.O_RDONLY), _Pages()
        try:
            if libc.syscall(CACHESTAT, fd, ctypes.byref(_Range(0, 0)), ctypes.byref(pages), 0) != 0:
                return None
        finally:
            os.close(fd)
        total += (pages.dirty + pages.writeback) * os.sysconf("SC_PAGE_SIZE")
    return total


class Peak:
    """The rise of this process's memory since this object was made."""

    def __init__(self) -> None:
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used first, and not be seen
        except AttributeError:
            pass  # another C library, which keeps less
        self._before = _status("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        except OSError:
            self._before = None

    def bytes(self) -> int | None:
        """Return the rise in bytes; None if the kernel does not tell."""
        high = _status("VmHWM")
        return None if self._before is None or high is None else max(0, high - self._before)


def _status(name: str) -> int | None:
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def written() -> int:
    """Return the bytes that this process has handed to the kernel so far."""
    found = re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())
    if found is None:
        raise RuntimeError("the kernel does not count what is written")
    return int(found[1])
