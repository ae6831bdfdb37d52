"""``events.jsonl``: the events of a run, one JSON object a line.

Workers, agent and coordinator of a host append to the same file. One ``write`` in append mode is atomic for lines this
short, so no lock is needed, and a process that dies does not damage the lines of others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Events:
    """Appends events; with no path, does nothing.

    >>> Events(None).write("commit", step=3)
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = None if path is None else os.open(path, flags, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """Append an event with the time and these fields, which must be JSON values."""
        if self._file is not None:
            line = json.dumps({"t": time.time(), "event": event, **fields})
            os.write(self._file, line.encode() + b"\n")


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the events in a file, in the order they were written. A last line that is incomplete is left out."""
    with Path(path).open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
