"""The journal: what happened in each committed step, written once, by the first worker.

All workers call ``run.log`` alike, so each has the row of the step under way. It is *closed* when the script asks for
the next step, and then lies in the run's progress, which joiners and checkpoints get. The next commit makes it final,
since all have closed it by then, and the first worker writes it. If that worker is lost, the next first worker has the
same last rows. It looks up in the file which of them are missing there. A run that goes on from a checkpoint removes
the rows of the steps that it trains again.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.engine.progress import Progress
from holdfast.errors import HoldfastError, UsageError
from holdfast.journal import rows
from holdfast.journal.rows import Row
from holdfast.journal.sinks import Sink, forget

KEPT = 16  # closed rows that each worker keeps: more than can be unwritten when the first worker is lost
AGAIN = 50  # last rows that a new first worker writes into sinks again: they may not have written all that they got
FOLDER = Path("holdfast-logs")  # where a script that nobody started with ``holdfast run`` logs without a checkpoint
logger = logging.getLogger(__name__)


class Journal:
    """The rows of a run, on one of its workers.

    ``is_first``: whether this worker writes. ``folder``: where the file goes; None: there is no folder unless
    something is logged. ``check`` raises if another run has the folder. ``ends_at_exit``: the journal ends with the
    process, as that of a script without an agent does.

    >>> import tempfile
    >>> journal = Journal(Progress(), is_first=lambda: True, folder=Path(tempfile.mkdtemp()))
    >>> journal.begin(0)
    >>> journal.open(step=0, facts={"loss": 0.5}); journal.add({"accuracy": 0.9}); journal.close(); journal.write()
    >>> [(row["step"], row["loss"], row["accuracy"]) for row in rows.read(journal.path)]
    [(0, 0.5, 0.9)]
    """

    def __init__(
        self,
        progress: Progress,
        *,
        is_first: Callable[[], bool],
        folder: Path | None,
        check: Callable[[], object] = lambda: None,
        ends_at_exit: bool = False,
    ) -> None:
        self._progress, self._is_first, self._check = progress, is_first, check
        self._folder, self._ends_at_exit = folder, ends_at_exit
        self._row: Row | None = None  # of the step, or the place after a loop, that the script is in
        self._place: tuple[int, bool] | None = None  # where the script is; None: where nothing can be logged
        self._is_past = False  # the script runs through a place where others have logged long ago
        self._begins: int | None = None  # the step that the run begins at, until the file is opened
        self._file: int | None = None  # open while this worker writes
        self._last: tuple[int, bool] = (-1, False)  # the last row in the file
        self._tail: deque[Row] = deque(maxlen=AGAIN)  # the last rows in the file
        self._failed = False  # the file cannot be written
        self._is_over = False
        self._sinks: list[Sink] = []
        self._begun: list[Sink] = []  # those that have been told where to begin

    @property
    def path(self) -> Path:
        """The file."""
        return (self._folder or FOLDER).absolute() / rows.NAME

    def to(self, sink: Sink) -> None:
        """Write rows into a sink too, from now on."""
        self._sinks.append(sink)
        self._folder = self._folder or FOLDER

    # --- the script's side -----------------------------------------------------------------------

    def open(self, *, step: int, facts: Mapping[str, Any]) -> None:
        """Begin the row of a step that was committed just now."""
        self._place, self._is_past = (step, False), False
        self._row = {"step": step, **rows.plain(facts), "time": round(time.time(), 3)}

    def after(self, step: int, *, is_past: bool) -> None:
        """Note that the script is after a loop whose last step this was. ``is_past``: the run is further than that."""
        self.close()
        self._place, self._is_past = (step, True) if step >= 0 else None, is_past

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values to the row of the place where the script is. Raises ``UsageError`` if they cannot be logged."""
        found = rows.plain(values)
        if self._is_past:
            return  # the others have logged it, when they were here
        if self._place is None:
            raise UsageError(
                "there is no step yet to log for", hint="call run.log in the loop over run.steps(), or after it"
            )
        step, is_after = self._place
        row = self._row or {"step": step, **({"after": True} if is_after else {}), "time": round(time.time(), 3)}
        if found.get("step", step) != step:
            raise UsageError(f"step={found['step']!r} is not the step that is logged: {step}", hint="leave it out")
        if names := [name for name in rows.FACTS if name in found and (name, found[name]) not in row.items()]:
            raise UsageError(
                f"'{names[0]}' is what the journal itself notes of each step, and this is another value",
                hint=f"choose another name, as in {{'test/{names[0]}': …}}",
            )
        self._folder = self._folder or FOLDER
        self._row = row | found

    def close(self) -> None:
        """End the row of the place where the script was. The next commit makes it final."""
        if self._row is not None:
            self._progress.rows = [*self._progress.rows, self._row][-KEPT:]
            self._row = None

    # --- the writer's side -----------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin a run at a step, before its first commit. The first worker removes rows of this step and later ones."""
        self._drop_file()
        self._begins = step if self._is_first() else None
        if self._folder is not None and self._is_first():
            self._take_over()

    def write(self) -> None:
        """Write all closed rows that the file lacks, if this worker is the first. All of them must be final."""
        if not self._is_first():
            self._drop_file()
            return
        if self._folder is None:
            return
        if self._file is None and not self._failed:
            self._take_over()
        for row in self._progress.rows:
            if rows.key_of(row) > self._last:
                self._put(row)

    def end(self) -> None:
        """Write what is left, because the run ends, and close everything."""
        self.close()
        if self._progress.rows and not self._is_over:
            self.write()
        self._is_over = True
        self._drop_file()

    def _end_at_exit(self, process: int) -> None:
        if os.getpid() == process:  # no fork of it
            self.end()

    def _take_over(self) -> None:
        """Open the file, and find out what is in it."""
        begins, self._begins = self._begins, None
        try:
            self._check()
            found = rows.read(self.path)
            known = found if begins is None else rows.before(found, begins)
            if begins == 0:
                forget(self.path.parent)
            if found and not known:  # perhaps of another run: nothing is lost without a trace
                os.replace(self.path, self.path.with_name(f"{rows.NAME}.old"))
            self._file = rows.replace(self.path, known)
            self._last = rows.key_of(known[-1]) if known else (-1, False)
            self._tail = deque(known[-AGAIN:], maxlen=AGAIN)
        except (OSError, HoldfastError) as e:
            self._give_up(e)

    def _put(self, row: Row) -> None:
        """Write a row: into the sinks first. What the file lacks, the next first worker writes into them again."""
        for sink in [*self._sinks]:
            try:
                if sink not in self._begun:
                    self._begin_sink(sink, row)
                sink.write(row)
            except Exception as e:  # whatever it is, training goes on
                what = f"{type(e).__name__}: {e}"  # the text of a KeyError is a key alone
                logger.warning("nothing more is logged to %s: %s", type(sink).__name__, what)
                self._sinks.remove(sink)
        try:
            if self._file is not None:
                rows.append(self._file, row)
        except OSError as e:
            self._give_up(e)
        self._last = rows.key_of(row)
        self._tail.append(row)

    def _begin_sink(self, sink: Sink, row: Row) -> None:
        again = [*self._tail]
        sink.begin(self.path.parent, again[0]["step"] if again else row["step"])
        self._begun.append(sink)
        if self._ends_at_exit:  # what is registered last is called first: wandb closes itself there, too
            atexit.register(self._end_at_exit, os.getpid())
        for known in again:
            sink.write(known)

    def _give_up(self, error: Exception) -> None:
        logger.warning("nothing more is written to %s: %s", self.path, error)
        self._failed = True
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _drop_file(self) -> None:
        """Close the file and the sinks: another worker writes, or nobody does."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        for sink in self._begun:
            try:
                sink.end()
            except Exception as e:
                logger.warning("%s could not be closed: %s", type(sink).__name__, e)
        self._begun.clear()
        self._failed = False
