"""A progress bar for work that takes longer than a second, on terminals only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.checkpoint.disk import Progress, silent

PATIENCE = 1.0  # seconds; a bar for shorter work would only flicker


@contextmanager
def bar(title: str, total: int, *, show: bool = True) -> Iterator[Progress]:
    """Shows a bar of ``total`` bytes if the work lasts; gives a function to call with the bytes done.

    >>> with bar("copying", 10, show=False) as progress:
    ...     progress(10)
    """
    if not show or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console  # costs 50 ms: only where it is seen
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = RichProgress(*columns, console=Console(stderr=True), transient=True)
    task = shown.add_task(title, total=total)
    begin = time.monotonic()

    def advance(done: int) -> None:
        shown.advance(task, done)
        if not shown.live.is_started and time.monotonic() - begin > PATIENCE:
            shown.start()

    try:
        yield advance
    finally:
        shown.stop()
