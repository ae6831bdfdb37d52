"""The tensor log of one worker: what it sent to other stages since the last checkpoint, in memory and on disk.

The training thread only ever appends to a dict. One thread beside it writes the oldest records to files when memory
gets short, frees them, and removes files that are not needed any more. When that thread cannot do its work, the log is
given up and training goes on: without it the run returns to its checkpoint.
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

from holdfast.errors import UsageError
from holdfast.log.record import Message
from holdfast.log.spill import Damaged as Damaged
from holdfast.log.spill import Files, Place, Unspilled, size_of
from holdfast.log.spill import clean as clean
from holdfast.plan.log_records import Direction as Direction
from holdfast.plan.log_records import HeldRecords, Key, holdings_of
from holdfast.words import parse_size, size_text

BATCH = 16 << 20  # bytes that are written at once, and that memory is freed by beyond what is needed
SOON = 4 << 20  # bytes that are worth a write
PAUSE = 0.05  # seconds in which so many may come together: each time the thread wakes up, training has to wait for it
BEHIND = 64 << 20  # bytes that may wait for the disk, however little memory is given
LONGEST = 10.0  # seconds that an end waits for the disk
_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        if self.budget is not None and (not isinstance(self.budget, int | float) or self.budget <= 0):
            raise UsageError(f"a log of {self.budget!r} bytes is none", hint="log=False, or a number of bytes")
        if not isinstance(self.memory, int | float) or self.memory < 0:
            raise UsageError(f"a log cannot have {self.memory!r} bytes of memory", hint="0 or more")
        if not isinstance(self.folder, str | os.PathLike | None):
            raise UsageError(f"folder={self.folder!r} is no folder for a log", hint="a path, or None")

    @classmethod
    def of(cls, given: Any) -> LogSettings | None:
        """Return the settings that a user means by ``log=given``: True, bytes, text such as "2GB", or all of them.

        None means no log.
        """
        if given is None or given is False:
            return None
        if isinstance(given, LogSettings):
            return given
        if not isinstance(given, bool | int | float | str):
            raise UsageError(f"log={given!r} is no log", hint="True, a number of bytes, or text as in '2GB'")
        budget = None if given is True else parse_size(given) if isinstance(given, str) else given
        return cls(budget=budget)  # type: ignore[arg-type]  # a float such as 2e9 will do


class _Record:
    """Its tensors, or the place that they were written to."""

    __slots__ = ("key", "number", "place", "size", "tensors", "text")

    def __init__(self, key: Key, number: int, message: Message, size: int) -> None:
        self.key, self.number, self.size = key, number, size
        self.text, self.tensors = message
        self.place: Place | None = None


@dataclass(kw_only=True)
class _Step:
    """The records of one attempt of a step: they are forgotten together."""

    records: dict[Key, _Record] = field(default_factory=dict)
    waiting: deque[_Record] = field(default_factory=deque)  # in memory, the oldest first
    bytes: int = 0
    spilled: int = 0


class Log:
    """One worker's records. ``keep``, ``begin``, ``drop`` and ``read`` may be called from any thread.

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
        self._work = threading.Condition(self._lock)  # something is to be done by the thread
        self._rest = threading.Condition(self._lock)  # nothing is
        self._thread: threading.Thread | None = None
        self._resting = True
        self._hurry = 0  # how many wait for the thread to rest
        self._closed = False
        self._number = 0
        self._files = Files(Path(settings.folder), name)  # the thread's own
        self._useless: str | None = None  # why
        self._epoch = 0  # how often everything was forgotten
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[int, _Step] = {}  # the oldest first
        self._terms: dict[int, Any] = {}
        self._trash: list[Iterable[_Record]] = []  # forgotten, but their memory and their files are not free yet
        self._bytes = self._spilled = 0
        self._held = 0  # bytes that are in memory, trash too

    # --- keeping ---------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step is attempted (again): what is there of it, or of later ones, is forgotten."""
        with self._lock:
            self._forget_steps([known for known in self._steps if known >= step])
            self._terms = {known: terms for known, terms in self._terms.items() if known < step}

    def drop(self, before: int) -> None:
        """A checkpoint of step ``before`` is durable: older steps will never be asked for again."""
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
        """Nobody may write into the tensors any more: they are not copied."""
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
        """Another record takes its place."""
        spilled = old.size if old.place is not None else 0
        step.bytes -= old.size
        step.spilled -= spilled
        self._bytes -= old.size
        self._spilled -= spilled
        self._trash.append([old])
        self._wake()

    def note(self, step: int, terms: Any) -> None:
        """Small values of a step, to be had as long as its records."""
        with self._lock:
            if self._useless is None:
                self._terms[step] = terms

    # --- what is there ---------------------------------------------------------------------------

    def read(self, key: Key) -> Message:
        """What was kept, or ``Damaged``. The tensors may be the very ones, not to be written into; else on the host."""
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
        """What was noted of the steps [first, stop), or None if one is missing."""
        with self._lock:
            found = [self._terms.get(step) for step in range(first, stop)]
        known = [terms for terms in found if terms is not None]
        return known if len(known) == len(found) else None

    def holdings(self, stop: int) -> list[HeldRecords]:
        """What is there of the steps before ``stop``, in few words."""
        with self._lock:
            keys = [key for number, step in self._steps.items() if number < stop for key in step.records]
        return holdings_of(keys)

    @property
    def usable(self) -> bool:
        """Whether all is here that was kept since the last ``renew``."""
        return self._useless is None

    @property
    def bytes(self) -> int:
        """Of all records that are there."""
        return self._bytes

    @property
    def spilled(self) -> int:
        """Of those of them that are on disk."""
        return self._spilled

    # --- trouble ---------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        """Forgets everything, and keeps nothing until the next ``renew``."""
        self._give_up(reason, self._epoch)

    def _give_up(self, reason: str, epoch: int) -> None:
        with self._lock:
            if self._useless is not None or epoch != self._epoch:
                return
            self._useless = reason
            forgotten = self._forget_all()
        del forgotten  # not under the lock: it is much
        try:
            self._say(reason)
        except OSError:
            pass  # the disk that is full may be the one that it would be told to

    def _forget_all(self) -> Any:
        """Returns what is to be freed."""
        forgotten = (self._steps, self._trash)
        self._epoch += 1
        self._forget()
        if self._thread is not None:
            self._wake()
        return forgotten

    def renew(self) -> None:
        """A later checkpoint is durable: the log begins again, empty."""
        with self._lock:
            forgotten = self._forget_all()
            self._useless = "it is closed" if self._closed else None
        del forgotten

    def close(self) -> None:
        """The end: files are removed and the thread ends, unless the disk makes it wait for too long."""
        with self._lock:
            self._useless = self._useless or "it is closed"
            self._closed = True
            forgotten = self._forget_all()
        del forgotten
        if self._thread is not None:
            self._thread.join(LONGEST)

    # --- the thread that spills ------------------------------------------------------------------

    def settle(self) -> None:
        """Returns when everything is done that the thread has to do."""
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
        """There is something to do for the thread."""
        if not self._resting:
            return
        self._resting = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"log of {self.name}", daemon=True)
            self._thread.start()
        self._work.notify()

    def _run(self) -> None:
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
        """Frees what was forgotten."""
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
        """Writes the oldest records, if there are too many in memory."""
        with self._lock:
            batch = self._choose() if epoch == self._epoch else []  # else the files go first
        if not batch:
            return
        try:
            places = self._files.write(
                [Unspilled(key=r.key, number=r.number, message=(r.text, r.tensors)) for r in batch]
            )
        except Exception as e:
            self._give_up(_words(e), epoch)
            return
        freed: list[list[Tensor]] = []  # not under the lock
        with self._lock:
            for record, place in zip(batch, places, strict=True):
                if self._is_live(record):
                    freed.append(record.tensors)
                    self._move(record, place)

    def _move(self, record: _Record, place: Place) -> None:
        record.place, record.text, record.tensors = place, "", []
        place.file.live += 1
        self._steps[record.key.step].spilled += record.size
        self._spilled += record.size
        self._held -= record.size

    def _is_live(self, record: _Record) -> bool:
        step = self._steps.get(record.key.step)
        return step is not None and step.records.get(record.key) is record

    def _choose(self) -> list[_Record]:
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
    if isinstance(error, OSError):
        where = f"cannot write {error.filename or 'its files'}"
        return f"the disk is full: {where}" if error.errno in _FULL else f"{where}: {error.strerror}"
    return f"a record cannot be written: {error}"
