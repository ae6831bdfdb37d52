"""The ledger of a stream: one line of JSON for each committed step, with the samples that it has used.

The first worker writes it. It may be lost between the vote and the writing; all workers know the last record, so the
next first worker writes what is missing. A run that goes on from a checkpoint trains some steps again: the records of
its start replace the former ones from there on. ``audit.py`` reads the file and proves that nothing is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "data-ledger.jsonl"
TAIL = 1 << 20  # bytes at the end of a ledger in which its last record lies: a record has far fewer


class Ledger:
    """This worker's part in writing a ledger.

    ``path``: the file; None: there is nowhere to write it. ``facts``: about the stream, the same on all workers.

    >>> Ledger(None, {}).note({"step": 0}, start="a", workers=["0.0"], first=True)
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path, self._facts = path, facts
        self._file: int | None = None  # open as long as this worker is the first one
        self._written: tuple[str, int] | None = None  # start and step of the last record in the file
        self._before: Mapping[str, Any] | None = None  # the record before the present one
        self._workers: list[str] = []  # as the file says it

    def hold(self, record: Mapping[str, Any] | None) -> None:
        """Keep the record of the last committed step, in case nobody has written it."""
        self._before = record

    def note(self, record: Mapping[str, Any], *, start: str, workers: Sequence[str], first: bool) -> None:
        """Note the record of a step that was just committed. Only the first worker writes.

        ``start``: the name of this start of the run. Raises ``OSError`` if the file cannot be written.
        """
        if self._path is None:
            return
        if not first:
            self.close()
        else:
            if self._file is None:
                self._open(self._path, start)
            for each in (self._before, record):
                if each is not None and self._is_missing(each, start):
                    self._write({"start": start, **self._news(workers), **each})
                    self._written = (start, each["step"])
        self._before = record

    def _is_missing(self, record: Mapping[str, Any], start: str) -> bool:
        if self._written is None:
            return True
        written_by, step = self._written
        # Records of another start are of a run before this one; the one that it resumed from is among them.
        return record["step"] > step if written_by == start else record is not self._before or step < record["step"]

    def _news(self, workers: Sequence[str]) -> dict[str, Any]:
        """Return the workers, if the file does not say them yet."""
        if list(workers) == self._workers:
            return {}
        self._workers = list(workers)
        return {"workers": self._workers}

    def _open(self, path: Path, start: str) -> None:
        """Open the file, and look up what was written last."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, TAIL, max(0, size - TAIL))
        if tail and not tail.endswith(b"\n"):
            os.write(self._file, b"\n")  # its writer was killed in the middle of a line
        self._written, self._workers = None, []
        found = [line for line in map(read_line, tail.split(b"\n")[:-1]) if line is not None]
        records = [line for line in found if "step" in line]
        if records:
            self._written = (records[-1]["start"], records[-1]["step"])
        if not records or records[-1]["start"] != start:
            self._write({"ledger": 1, "start": start, **self._facts})

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def sync(self) -> None:
        """Bring the records to the disk, before a checkpoint that a run may go on from."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file: another worker writes from now on, or nobody."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_line(line: bytes) -> dict[str, Any] | None:
    """Return a line of a ledger; None if it is incomplete or none.

    >>> read_line(b'{"step": 3}'), read_line(b'{"step": 3, "us')
    ({'step': 3}, None)
    """
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
