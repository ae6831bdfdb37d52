"""What the library has to say: standard ``logging``, under the logger ``holdfast``.

The library only logs. Commands, and workers that ``holdfast run`` starts, show it: ``show`` is called there. In a
script of one process, Python shows warnings by itself, and ``logging.basicConfig(level="INFO")`` the rest.
"""

from __future__ import annotations

import logging
import sys


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stderr`` is at the time: forked workers and tests exchange it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("holdfast: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def show() -> None:
    """Show INFO and above on stderr, each line with "holdfast: " before it. A second call changes nothing."""
    logger = logging.getLogger("holdfast")
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        logger.addHandler(_Handler())
        logger.setLevel(logging.INFO)
        logger.propagate = False
