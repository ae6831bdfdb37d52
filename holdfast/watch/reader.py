"""The reader: follows the files of a run in its log directory."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import UsageError
from holdfast.journal import NAME as JOURNAL
from holdfast.watch.fold import Fold
from holdfast.watch.tail import Tail

EVENTS = "events.jsonl"
TAIL = 16_384  # bytes of the end of a worker's log


class Reader:
    """A run, read from the files in its log directory. It opens them to read only, and keeps none of them open.

    ``journal``: where the metrics are; None: where the run's events say, or else in the same folder. Raises
    ``UsageError`` if the folder does not exist and ``must_exist``.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> line = '{"t": 1.0, "event": "run", "command": ["train.py"], "pid": 7}'
    >>> _ = (folder / "events.jsonl").write_text(line + chr(10))
    >>> reader = Reader(folder)
    >>> reader.read(), reader.fold.view().phase
    (True, 'starting')
    """

    def __init__(self, folder: Path, *, journal: Path | None = None, must_exist: bool = True) -> None:
        if must_exist and not folder.is_dir():
            raise UsageError(
                f"there is no folder {folder}", hint="the --log-dir of holdfast run; default: holdfast-logs"
            )
        self.folder = folder
        self.fold = Fold()
        self._given = journal
        self._events = Tail(folder / EVENTS)
        self._rows = Tail(journal or folder / JOURNAL)
        self.more = False  # there is more to read at once
        self.changes = 0  # reads that have brought something

    @property
    def share(self) -> float:
        """How much of the events is read, from 0 to 1."""
        return self._events.share

    def read(self) -> bool:
        """Read a bounded part of what is new; return whether there was anything."""
        events = self._events.read()
        if events.again:
            self.fold = Fold()
            self._rows = Tail(self._rows.path)
        for event in events.records:
            self.fold.hear(event)
        self.fold.unread += events.unread
        self._follow_journal()
        rows = self._rows.read()
        if rows.again:
            self.fold.forget_rows()
        for row in rows.records:
            self.fold.row(row)
        self.fold.unread += rows.unread
        self.more = events.more or rows.more
        news = bool(events.records or rows.records or events.again or rows.again or events.unread or rows.unread)
        self.changes += news
        return news

    def read_all(self) -> Fold:
        """Read all that is there."""
        self.read()
        while self.more:
            self.read()
        return self.fold

    def _follow_journal(self) -> None:
        """Read the journal where the run says that it is, once it does; a path that is not ours is passed over."""
        named = self.fold.journal
        if self._given is None and named is not None and named != str(self._rows.path):
            path = Path(named)
            if path.name == JOURNAL and path.is_file():
                self._rows = Tail(path)
                self.fold.forget_rows()

    def log_tail(self, worker: str) -> str | None:
        """Return the end of a worker's output; None if there is none. Only names that the events have are known."""
        view = self.fold.view()
        if worker not in {each.name for each in (*view.workers, *view.gone)}:
            return None
        path = self.folder / f"worker-{worker}.log"
        if path.parent != self.folder or path.is_symlink():  # a name from a file must not lead elsewhere
            return None
        try:
            with path.open("rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - TAIL))
                data = file.read(TAIL)
        except OSError:
            return None
        return data.decode(errors="replace")
