"""A save by several ranks: this one's part of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from holdfast.study.inside import disk
from holdfast.study.inside.session import Session


def join(session: Session, *, rank: int, ranks: int, address: str) -> dict[str, Any]:
    """Meets the other ranks."""
    session.adapter.join(rank, ranks, address)
    return {}


def save_ranked(
    session: Session, *, strategy: str, folder: str, rank: int, ranks: int, at: float = 0.0
) -> dict[str, Any]:
    """Begins at the moment ``at`` of the machine's clock, as all ranks do; ends when all of it is on the disk."""
    time.sleep(max(0.0, at - time.monotonic()))
    before, begin = disk.written(), time.monotonic()
    session.training.save_ranked(strategy, Path(folder), rank, ranks)
    disk.sync_files(Path(folder))
    return {"seconds": time.monotonic() - begin, "written": disk.written() - before}
