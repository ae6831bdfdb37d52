"""The tensor log of one worker: the tensors it sent to other stages since the last checkpoint, in memory and on disk.

The training thread only appends to a dict, so logging costs it almost nothing. A second thread writes the oldest
records to files when memory gets short, frees them, and removes files that are not needed any more. If that thread
cannot do its work (a full disk, say), the log is given up and training goes on. After a loss, a run without a log
returns to its last checkpoint.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.checks import by_name
from holdfast.errors import UsageError
from holdfast.log.record import Message
from holdfast.log.spill import Damaged as Damaged
from holdfast.log.spill import RecordPlace, SpillFiles, Unspilled, size_of
from holdfast.log.spill import clean as clean
from holdfast.plan.log_records import Direction as Direction
from holdfast.plan.log_records import HeldRecords, Key, holdings_of
from holdfast.words import parse_size, size_text

BATCH = 16 << 20  # bytes of one write: few large writes are faster than many small ones
SOON = 4 << 20  # bytes above the allowed memory that start a write at once
PAUSE = 0.05  # seconds to collect fewer bytes than that: each wake-up of the thread takes the interpreter from training
BEHIND = 64 << 20  # bytes that may always wait for the disk, so that a small memory limit does not end the log at once
LONGEST = 10.0  # seconds that ``close`` waits for the disk: a hung disk must not hang the end of a run
_FULL = (errno.ENOSPC, errno.EDQUOT)  # the errors of a full disk, and of a used-up quota


@by_name
@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Settings of a run's log: how much of what stages send each other is kept for a replay.

    - ``budget``: bytes of records of all workers together, in memory and on disk. Beyond it, fewer boundaries are
      logged. None: no limit.
    - ``memory``: bytes of a worker's records that may stay in memory. Older records are written to files.
    - ``folder``: where those files are. None: "log" in the folder of the run's checkpoints.

    Raises ``UsageError`` for values that are none of these.

    >>> LogSettings(budget=2_000_000_000).memory
    268435456
    """

    budget: int | None = None
    memory: int = 256 << 20
    folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not _is_bytes(self.budget, least=1):
            raise UsageError(f"a log of {self.budget!r} bytes is none", hint="log=False, or a number of bytes")
        if not _is_bytes(self.memory, least=0):
            raise UsageError(f"a log cannot have {self.memory!r} bytes of memory", hint="0 or more")
        if not isinstance(self.folder, str | os.PathLike | None):
            raise UsageError(f"folder={self.folder!r} is no folder for a log", hint="a path, or None")

    @classmethod
    def of(cls, given: Any) -> LogSettings | None:
        """Return the settings that a user means by ``log=given``: True, bytes, text such as "2GB", or all of them.

        Returns None for False: no log. Raises ``UsageError`` for anything else.
        """
        if given is False:
            return None
        if isinstance(given, LogSettings):
            return given
        if not isinstance(given, bool | int | float | str):
            raise UsageError(f"log={given!r} is no log", hint="True, False, a number of bytes, or text as in '2GB'")
        budget = None if given is True else parse_size(given) if isinstance(given, str) else given
        return cls(budget=budget)  # type: ignore[arg-type]  # a float such as 2e9 will do


def _is_bytes(value: object, *, least: int) -> bool:
    """Whether a value is a whole number from ``least`` on. A float such as 2e9 is; True, NaN and infinity are not."""
    return type(value) in (int, float) and value >= least and value % 1 == 0  # type: ignore[operator]


class _Record:
    """One record: its tensors, or after it was spilled the place in a file."""

    __slots__ = ("key", "number", "place", "size", "tensors", "text")

    def __init__(self, key: Key, number: int, message: Message, size: int) -> None:
        self.key, self.number, self.size = key, number, size
        self.text, self.tensors = message
        self.place: RecordPlace | None = None


@dataclass(kw_only=True)
class _Step:
    """The records of one attempt of a step. They are forgotten together."""

    records: dict[Key, _Record] = field(default_factory=dict)
    waiting: deque[_Record] = field(default_factory=deque)  # in memory, the oldest first
    bytes: int = 0  # of all its records
    spilled: int = 0  # bytes of those that are on disk


class Log:
    """One worker's records. ``keep``, ``begin``, ``drop`` and ``read`` may be called from any thread.

    ``name`` names the worker in messages and files. ``say`` is called with the reason when the log is given up.

    >>> log = Log(LogSettings(folder=Path("unused")), name="w0", say=print)
    >>> key = Key(step=0, boundary=1, micro_batch=0, direction=Direction.FORWARD)
    >>> log.keep(key, ("[7, []]", []))
    >>> log.read(key), log.bytes
    (('[7, []]', []), 63)
    """

    def __init__(self, settings: LogSettings, *, name: str, say: Callable[[str], None]) -> None:
        assert settings.folder is not None
        self.name, self.settings = name, settings
        self._say = say
        self._limit = max(2 * settings.memory, BEHIND)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # notified when the thread has something to do
        self._rest = threading.Condition(self._lock)  # notified when the thread has nothing left to do
        self._thread: threading.Thread | None = None
        self._resting = True
        self._hurry = 0  # callers of ``settle`` that wait for the thread to rest
        self._closed = False
        self._number = 0
        self._files = SpillFiles(Path(settings.folder), name)  # the thread's own
        self._useless: str | None = None  # the reason why the log was given up; None while it is complete
        # Counts how often everything was forgotten. The thread compares it, to notice that its work is out of date.
        self._epoch = 0
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[int, _Step] = {}  # the oldest first
        self._terms: dict[int, Any] = {}
        self._trash: list[Iterable[_Record]] = []  # forgotten, but their memory and their files are not free yet
        self._bytes = self._spilled = 0
        self._held = 0  # bytes in memory, with those of the trash

    # --- keeping ---------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin an attempt of ``step``: forget the records of it and of later steps that an earlier attempt left."""
        with self._lock:
            self._forget_steps([known for known in self._steps if known >= step])
            self._terms = {known: terms for known, terms in self._terms.items() if known < step}

    def drop(self, before: int) -> None:
        """Forget the steps before ``before``: a checkpoint of that step is durable, so nobody will ask for them."""
        with self._lock:
            self._forget_steps([known for known in self._steps if known < before])
            self._terms = {known: terms for known, terms in self._terms.items() if known >= before}

    def _forget_steps(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            step = self._steps.pop(number)
            self._bytes -= step.bytes
            self._spilled -= step.spilled
            self._trash.append(step.records.values())
        if numbers:
            self._wake()

    def keep(self, key: Key, message: Message) -> None:
        """Keep a record. Its tensors are not copied, so nobody may write into them any more.

        If there is no room for it, the whole log is given up. Nothing is raised.
        """
        size = size_of(message)
        with self._lock:
            if self._useless is not None:
                return
            trouble = self._no_room(size)
            if trouble is None:
                self._add(key, message, size)
                if self._held > self.settings.memory:
                    self._wake()
                if self._held > self.settings.memory + SOON:
                    self._work.notify()
                return
            epoch = self._epoch
        self._give_up(trouble, epoch)

    def _no_room(self, size: int) -> str | None:
        """Return why ``size`` more bytes cannot be kept, or None if they can."""
        budget = self.settings.budget
        if budget is not None and self._bytes + size > budget:
            return f"it would hold {size_text(self._bytes + size)}, and its budget is {size_text(budget)}"
        if self._held + size > self._limit and self._held:
            waiting, allowed = size_text(self._held + size), size_text(self.settings.memory)
            return f"the disk is too slow: {waiting} are in memory, where {allowed} may stay"
        return None

    def _add(self, key: Key, message: Message, size: int) -> None:
        step = self._steps.get(key.step)
        if step is None:
            step = self._steps[key.step] = _Step()
        elif key in step.records:
            self._take_out(step, step.records[key])
        record = step.records[key] = _Record(key, self._number, message, size)
        step.waiting.append(record)
        step.bytes += size
        self._number += 1
        self._bytes += size
        self._held += size

    def _take_out(self, step: _Step, old: _Record) -> None:
        """Take a record out, because another one of the same key replaces it."""
        spilled = old.size if old.place is not None else 0
        step.bytes -= old.size
        step.spilled -= spilled
        self._bytes -= old.size
        self._spilled -= spilled
        self._trash.append([old])
        self._wake()

    def note(self, step: int, terms: Any) -> None:
        """Keep small values of a step, for as long as its records."""
        with self._lock:
            if self._useless is None:
                self._terms[step] = terms

    # --- reading ---------------------------------------------------------------------------------

    def read(self, key: Key) -> Message:
        """Return the record of ``key``. Raises ``Damaged`` if it is missing, or its file is not what was written.

        Do not write into the tensors: they may be the kept ones. Tensors that come from a file are on the CPU.
        """
        with self._lock:
            step = self._steps.get(key.step)
            record = None if step is None else step.records.get(key)
            if record is None:
                raise Damaged(key, f"the log of {self.name}", self._useless or "it is not there")
            if record.place is None:
                return record.text, list(record.tensors)
            place = record.place
        return place.read(key)

    def terms(self, first: int, stop: int) -> list[Any] | None:
        """Return what was noted of the steps [first, stop), or None if one is missing."""
        with self._lock:
            found = [self._terms.get(step) for step in range(first, stop)]
        known = [terms for terms in found if terms is not None]
        return known if len(known) == len(found) else None

    def holdings(self, stop: int) -> list[HeldRecords]:
        """Return a short description of the records of the steps before ``stop``."""
        with self._lock:
            keys = [key for number, step in self._steps.items() if number < stop for key in step.records]
        return holdings_of(keys)

    @property
    def usable(self) -> bool:
        """Whether every record kept since the last ``renew`` is still here."""
        return self._useless is None

    @property
    def bytes(self) -> int:
        """Bytes of all records, in memory and on disk."""
        return self._bytes

    @property
    def spilled(self) -> int:
        """Bytes of the records that are on disk."""
        return self._spilled

    # --- giving up, beginning again, and the end -------------------------------------------------

    def give_up(self, reason: str) -> None:
        """Forget everything, say why, and keep nothing until the next ``renew``."""
        self._give_up(reason, self._epoch)

    def _give_up(self, reason: str, epoch: int) -> None:
        with self._lock:
            if self._useless is not None or epoch != self._epoch:
                return
            self._useless = reason
            forgotten = self._forget_all()
        del forgotten  # outside the lock: freeing gigabytes takes long, and training waits for the lock
        try:
            self._say(reason)
        except OSError:
            pass  # the full disk may be the one that the message goes to

    def _forget_all(self) -> Any:
        """Begin a new epoch. Return the forgotten records: the caller frees them after it has left the lock."""
        forgotten = (self._steps, self._trash)
        self._epoch += 1
        self._forget()
        if self._thread is not None:
            self._wake()
        return forgotten

    def renew(self) -> None:
        """Begin again with an empty log, because a later checkpoint is durable."""
        with self._lock:
            forgotten = self._forget_all()
            self._useless = "it is closed" if self._closed else None
        del forgotten

    def close(self) -> None:
        """End the thread and remove all files. Wait at most ``LONGEST`` seconds for a slow disk."""
        with self._lock:
            self._useless = self._useless or "it is closed"
            self._closed = True
            forgotten = self._forget_all()
        del forgotten
        if self._thread is not None:
            self._thread.join(LONGEST)

    # --- the thread that spills ------------------------------------------------------------------

    def settle(self) -> None:
        """Return when the thread has done all its work. For tests and benches."""
        with self._lock:
            self._hurry += 1
            self._work.notify()
            while not self._resting:
                self._rest.wait()
            self._hurry -= 1

    def _is_worth_it(self) -> bool:
        """Whether the thread should begin at once."""
        return bool(self._hurry or self._closed) or self._held > self.settings.memory + SOON

    def _wake(self) -> None:
        """Wake the thread, because there is work for it. The caller holds the lock."""
        if not self._resting:
            return
        self._resting = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"log of {self.name}", daemon=True)
            self._thread.start()
        self._work.notify()

    def _run(self) -> None:
        """Run the spilling thread: remove, free, tidy and spill, in this order, until the log is closed."""
        epoch = self._epoch
        while True:
            with self._lock:
                if not (self._trash or self._held > self.settings.memory or self._epoch != epoch):
                    self._resting = True
                    self._rest.notify_all()
                    self._work.wait_for(lambda: not self._resting)
                self._work.wait_for(self._is_worth_it, timeout=PAUSE)
                closed, is_new, epoch = self._closed, self._epoch != epoch, self._epoch
                trash, self._trash = self._trash, []
            if is_new:
                self._files.remove()
            if closed:
                break
            self._sweep(trash, epoch)
            del trash
            self._files.tidy()
            self._spill(epoch)
        with self._lock:
            self._resting = True
            self._rest.notify_all()

    def _sweep(self, trash: list[Iterable[_Record]], epoch: int) -> None:
        """Free the memory of forgotten records, and count down the records that their files still serve."""
        freed = 0
        for record in (record for records in trash for record in records):
            if record.place is not None:
                record.place.file.live -= 1
            else:
                freed += record.size
                record.tensors = []
        with self._lock:
            if epoch == self._epoch:
                self._held -= freed

    def _spill(self, epoch: int) -> None:
        """Write the oldest records to files if more than the allowed bytes are in memory."""
        with self._lock:
            # In a new epoch all files are removed first: a record written now would be lost with them.
            batch = self._choose() if epoch == self._epoch else []
        if not batch:
            return
        try:
            places = self._files.write(
                [Unspilled(key=r.key, number=r.number, message=(r.text, r.tensors)) for r in batch]
            )
        except Exception as e:
            self._give_up(_words(e), epoch)
            return
        freed: list[list[Tensor]] = []  # keeps the tensors alive until the lock is left: freeing them takes time
        with self._lock:
            for record, place in zip(batch, places, strict=True):
                if self._is_live(record):
                    freed.append(record.tensors)
                    self._move(record, place)

    def _move(self, record: _Record, place: RecordPlace) -> None:
        """Note that a record is now in a file and no longer in memory."""
        record.place, record.text, record.tensors = place, "", []
        place.file.live += 1
        self._steps[record.key.step].spilled += record.size
        self._spilled += record.size
        self._held -= record.size

    def _is_live(self, record: _Record) -> bool:
        """Whether a record was neither forgotten nor replaced."""
        step = self._steps.get(record.key.step)
        return step is not None and step.records.get(record.key) is record

    def _choose(self) -> list[_Record]:
        """Take the oldest records out of the waiting lines, as many as one write should have."""
        memory = self.settings.memory
        surplus = self._held - memory
        if surplus <= 0:
            return []
        wanted = min(surplus + min(BATCH, memory // 4), BATCH)  # more than needed: few large writes
        chosen: list[_Record] = []
        taken = 0
        for step in self._steps.values():
            while step.waiting and taken < wanted:
                record = step.waiting.popleft()
                if self._is_live(record):
                    chosen.append(record)
                    taken += record.size
            if taken >= wanted:
                break
        return chosen


def _words(error: Exception) -> str:
    """Return why the thread could not write, for the user."""
    if isinstance(error, OSError):
        where = f"cannot write {error.filename or 'its files'}"
        return f"the disk is full: {where}" if error.errno in _FULL else f"{where}: {error.strerror}"
    return f"a record cannot be written: {error}"
