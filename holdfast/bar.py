"""How far a training is, for people: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.words import count

LINE_SECONDS = 30.0  # between two plain lines: a log of a day has some thousand of them
RECENT = 50  # reports that the pace is taken from: so it follows when workers come or go
WIDTH = 16  # characters of a bar: the words matter more
Facts = Mapping[
    str, Any
]  # "step", "total" (None: not known), "loss", "lr", "workers", and "rate" in steps per second or None


class Pace:
    """Steps per second, from the recent past.

    >>> pace = Pace()
    >>> [pace.at(step, now) for step, now in [(0, 10.0), (2, 11.0), (4, 12.0)]]
    [None, 2.0, 2.0]
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def at(self, step: int, now: float) -> float | None:
        """Note that so many steps are done at this time; return the pace, or None at the first call."""
        self._seen.append((step, now))
        (first, begin), (last, end) = self._seen[0], self._seen[-1]
        return (last - first) / (end - begin) if end > begin else None


def words(facts: Facts) -> list[str]:
    """Return what there is to say, part by part.

    >>> ", ".join(words({"step": 120, "total": 1000, "loss": 2.3, "lr": 3e-4, "workers": 4, "rate": 4.0}))
    'step 120/1,000, loss 2.3, lr 0.0003, 4 steps/s, 4 workers, 3:40 left'
    """
    step, total, rate = facts["step"], facts["total"], facts.get("rate")
    said = [f"step {step:,}" if total is None else f"step {step:,}/{total:,}", f"loss {facts['loss']:.5g}"]
    if facts.get("lr") is not None:
        said.append(f"lr {facts['lr']:.3g}")
    if rate:
        said.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s a step")
    said.append(count(facts["workers"], "worker"))
    if rate and total is not None and step < total:
        minutes, seconds = divmod(round((total - step) / rate), 60)
        hours, minutes = divmod(minutes, 60)
        said.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
    return said


def picture(facts: Facts) -> Table:
    """Return a bar with the words behind it, for rich."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="crop")
    bar = ProgressBar(total=facts["total"], completed=facts["step"], width=WIDTH)
    grid.add_row(bar, Text(", ".join(words(facts)), no_wrap=True, overflow="crop"))
    return grid


def drawn(facts: Facts, width: int) -> str:
    """Return the bar as one line of a terminal that has so many columns."""
    console = Console(
        file=io.StringIO(), force_terminal=True, width=max(20, width - 1), highlight=False, soft_wrap=False
    )
    with console.capture() as shown:
        console.print(picture(facts), no_wrap=True, overflow="crop", crop=True)
    return shown.get().split("\n")[0]


class Bar:
    """Shows how far a training is, on stderr: for a script of one process that asks for it.

    What the script prints comes above the bar.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._clock, self._told = clock, -LINE_SECONDS

    def show(self, facts: Facts) -> None:
        """Show these facts: at once on a terminal, elsewhere if the last line is long ago, or this is the end."""
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(picture(facts), refresh=True)
        elif self._clock() - self._told >= LINE_SECONDS or facts["step"] == facts["total"]:
            self._told = self._clock()
            print("holdfast:", ", ".join(words(facts)), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the last picture, and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
