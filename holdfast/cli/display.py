"""How far the training is, as ``holdfast run`` shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.bar import LINE_SECONDS, drawn, words
from holdfast.cli.printer import Printer


class Display:
    """Shows how far the training is: on a terminal as a bar below the workers' lines, else by lines now and then."""

    def __init__(self, say: Printer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._told = clock()  # what is over sooner than the first line needs none

    def show(self, facts: Mapping[str, Any]) -> None:
        """Show the facts of a report."""
        if self._say.columns:
            self._say.status(drawn(facts, self._say.columns))
        elif self._clock() - self._told >= LINE_SECONDS:
            self._told = self._clock()
            self._say(f"holdfast: {', '.join(words(facts))}")
