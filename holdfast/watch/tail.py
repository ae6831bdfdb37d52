"""Reading of a file of JSON lines that grows, a bounded part at a time."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PART = 2**20  # bytes of one read: a thousand lines and more, a few milliseconds
LONGEST = 2**18  # bytes of a line: events of a generation with 1,000 workers take 30 kB. Longer ones are left out


@dataclass(frozen=True, kw_only=True)
class Read:
    """What one look at the file has brought.

    ``again``: the file is another one than before, or was cut: what was read of it does not count any more.
    ``more``: there is more to read at once. ``unread``: lines that are no JSON objects.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    again: bool = False
    more: bool = False
    unread: int = 0


class Tail:
    """Reads the lines that were appended to a file since the last ``read``. Half a line waits for its end.

    A file that is not there yet is an empty one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> tail = Tail(path)
    >>> _ = path.write_text('{"event": "run"}\\n{"event": "fin')
    >>> tail.read().records
    [{'event': 'run'}]
    """

    def __init__(self, path: Path, *, part: int = PART, longest: int = LONGEST) -> None:
        self.path = path
        self._part, self._longest = part, max(longest, 1)
        self._file: tuple[int, int] | None = None  # device and number of the file that was read
        self._offset = 0
        self._skips = False  # in the middle of a line that is too long
        self.size = 0  # bytes of the file at the last read

    @property
    def share(self) -> float:
        """How much of the file is read, from 0 to 1."""
        return min(1.0, self._offset / self.size) if self.size else 1.0

    def read(self) -> Read:
        """Return the next lines. A file that cannot be read has none."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                known, self._file = self._file, (facts.st_dev, facts.st_ino)
                again = known is not None and (known != self._file or facts.st_size < self._offset)
                if again:
                    self._offset, self._skips = 0, False
                self.size = facts.st_size
                file.seek(self._offset)
                data = file.read(self._part)
        except OSError:
            return Read()
        return self._take(data, again)

    def _take(self, data: bytes, again: bool) -> Read:
        unread = 0
        whole, newline, _ = data.rpartition(b"\n")
        if not newline and len(data) >= min(self._longest, self._part):  # a line that is longer than any of ours
            unread, self._skips = int(not self._skips), True
            self._offset += len(data)
            return Read(again=again, more=self._offset < self.size, unread=unread)
        self._offset += len(whole) + len(newline)
        lines = whole.split(b"\n") if newline else []
        if lines and self._skips:
            lines, self._skips = lines[1:], False
        records = []
        for line in lines:
            record = _record(line) if len(line) <= self._longest else None
            if record is not None:
                records.append(record)
            elif line.strip():
                unread += 1
        return Read(records=records, again=again, more=bool(newline) and self._offset < self.size, unread=unread)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
