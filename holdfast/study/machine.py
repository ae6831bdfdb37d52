"""Facts about this machine and the disk that checkpoints are written to."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.words import size_text


def facts(folder: Path) -> dict[str, Any]:
    """Return cores, memory, versions and the file system of ``folder``."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(pages / 1e9, 1),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "folder_filesystem": filesystem(folder),
    }


def filesystem(folder: Path) -> str:
    """Return the kind of file system that a folder is on, as the kernel names it."""
    place = folder.absolute()
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        if place.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def check_room(folder: Path, nbytes: int) -> None:
    """Raise ``UsageError`` if the disk has less than ``nbytes`` left: better now than after an hour."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise UsageError(
            f"{folder} has {size_text(free)} left, the study needs {size_text(nbytes)}",
            hint="another --out, or a smaller --model",
        )
