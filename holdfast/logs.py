"""Logging: the library logs with the standard ``logging``, under the logger ``holdfast``.

Commands, and workers that ``holdfast run`` starts, call ``show``. In a script of one process, Python shows warnings by
itself, and ``logging.basicConfig(level="INFO")`` shows the rest.
"""

from __future__ import annotations

import logging
import sys


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the present ``sys.stderr``: forked workers and tests replace it."""

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
