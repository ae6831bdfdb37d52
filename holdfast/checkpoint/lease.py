"""The lease of a run's folder: which run, and which generation of it, may commit and remove checkpoints.

Two runs that save into one folder remove each other's files, and so does the old half of a run that was cut off and
comes back. So whoever commits must hold the folder's lease.

**The lease is a chain of small files**, ``.holdfast/lease-00000012.json`` and so on. Each is written once and never
changed. Whoever made the file with the highest number holds the lease. There is one operation: make the next
number. The holder does it to renew the lease, and before each commit and each removal to prove that it still holds
it. Others do it to take the lease over, when ``decide`` allows that.

**Why two cannot make the same number.** A file gets its name by ``link``, of a file that is written already. The
server of a network's file system does that, and only once: the second one gets ``EEXIST`` (NFS 3 and later; a file
system without links gets ``O_EXCL``, which is as exclusive). No client's cache has a part in it. If the server's
answer is lost and asked for again, ``EEXIST`` may come to the one who made the file: so the content decides.

**Why a paused holder cannot go on.** It makes the next number. If somebody has taken over, that number exists: the
first file of each holder stays, and a holder removes only its own later ones (and the oldest of more than
``KEEP``). Even where it has been removed, the listing after the ``link`` shows a higher number, and the lower one
counts for nothing. The listing is not old, although NFS clients keep attributes of folders for up to 60 s: the
client has just changed the folder itself, and then drops what it remembers of it. Names are never used again and
files never replaced, so there are no stale handles.

**Who may take over** (``decide``):

- The same run, with the same or a newer epoch (the number of its generation): at once. An older epoch is refused.
- Any run, if the lease was given back, or its holder is known to be dead: the same boot of the same machine, the same
  space of process numbers, and no such process (or one that started at another time) any more.
- Any run, if the lease has not changed for its whole duration, measured with the own monotonic clock of the one who
  waits. Wall clocks, which may jump, are only for people. The duration (90 s) is longer than the oldest view that
  an NFS client may have (60 s) and three renewals (10 s each), so a holder that renews it is never taken for one
  that does not.
- If it does change, its holder is alive, and the other run is refused.

**What remains.** A writer that is paused for long exactly between its last look at the lease and the moment at
which the index gets its name commits a checkpoint that nobody may commit any more. It does no harm:

- The index gets its name by ``link`` too, so it does not replace an index that the new holder has committed for the
  same step. (It may replace one that was there before, as of a damaged checkpoint that is saved once more.)
- If the new holder has removed its data files meanwhile, the checkpoint counts as damaged, and an older one is
  resumed from.
- Else it is a complete checkpoint of a known run. Its index has the run, the epoch and the *term*, which is the number
  of the first file of its holder. Terms only grow. A checkpoint of a later step with a smaller term than one of an
  earlier step comes from a holder that had lost the lease: a resume leaves it out (``superseded``).

Reading needs no lease. Where the lease cannot be written, no checkpoint can be written either.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.disk import NO_LINKS, discard, explained, make_folder
from holdfast.checkpoint.places import Place
from holdfast.errors import CheckpointError
from holdfast.processes import facts_of

SECONDS = 90.0  # duration: the oldest view of an NFS client (60 s) and three renewals
BEATS = 9  # renewals within one duration
KEEP = 32  # files of earlier holders that stay
FOLDER = ".holdfast"  # in the folder of a run: what belongs to the run and to no checkpoint
LONGEST_SECONDS = 3600.0  # of a lease: a foreign file cannot keep a folder for longer
_MOST_BYTES = 4096  # of a note; a longer file is none
_NAME = re.compile(r"lease-(\d{8,15})\.json")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that can be told from all others. Empty texts: this machine does not tell."""

    machine: str = ""  # its name, for people
    boot: str = ""  # random, of this start of the machine's kernel
    space: str = ""  # the space of process numbers that it lives in: containers have their own
    pid: int = 0
    start: str = ""  # when it started, in ticks since the boot

    @staticmethod
    def current() -> Process:
        """Return this process."""
        pid = os.getpid()
        seen = facts_of(pid)
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = os.readlink("/proc/self/ns/pid")
        except OSError:
            boot = space = ""
        return Process(machine=socket.gethostname(), boot=boot, space=space, pid=pid, start=seen.start if seen else "")

    def is_dead(self) -> bool:
        """Whether it is known to have ended. False: it lives, or nobody can tell from here."""
        here = Process.current()
        if not self.boot or not self.start or (self.boot, self.space) != (here.boot, here.space):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        seen = facts_of(self.pid)
        return seen is not None and (seen.is_over or seen.start != self.start)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who asks for the lease: a worker, in the name of a generation of its run."""

    run: str = field(default_factory=lambda: secrets.token_hex(8))  # random; the start of the run
    epoch: int = 0  # number of the generation: grows within a run
    life: str = ""  # random; tells generations of the same number apart
    worker: str = "0.0"


@dataclass(frozen=True, kw_only=True)
class Note:
    """The content of one file of the chain."""

    number: int
    claim: Claim
    term: int  # number of the first file of this holder
    process: Process = field(default_factory=Process)
    seconds: float = SECONDS  # duration: so long after its last renewal others may take over
    since: float = 0.0  # wall clock at the begin of the term, for people
    released: bool = False  # its holder has given it back
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # random; no two files are alike

    def to_text(self) -> bytes:
        """Return the note as JSON, for ``from_text``."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_text(number: int, text: bytes) -> Note:
        """Read what ``to_text`` gave. Anything else is a note of an unknown holder, the same for the same bytes.

        A folder may have been copied from a stranger, or a power cut may have left an empty file.
        """
        try:
            values = json.loads(text[:_MOST_BYTES])
            claim, process = Claim(**values.pop("claim")), Process(**values.pop("process"))
            note = replace(Note(**values, claim=claim, process=process), number=number)
            if all(_has_types(part) for part in (note, claim, process)) and note._is_sound():
                return replace(note, seconds=min(note.seconds, LONGEST_SECONDS))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        token = hashlib.sha256(text).hexdigest()
        return Note(number=number, claim=Claim(run="?", worker="?"), term=number, token=token)

    def _is_sound(self) -> bool:
        """Whether the numbers are such as a holder writes."""
        return self.seconds >= 0 and 0 <= self.process.pid < 2**31

    @property
    def holder(self) -> str:
        """The holder in words."""
        process = self.process
        known = 0 < self.since < 2**35  # else the clock was wrong
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since)) if known else "an unknown time"
        return f"worker {self.claim.worker} of run {self.claim.run} on {process.machine or '?'} " + (
            f"(process {process.pid}, since {since})"
        )


def _has_types(part: Note | Claim | Process) -> bool:
    """Whether each field of what was read has the type that its class says."""
    wanted: dict[str, Any] = {
        "str": str,
        "int": int,
        "float": (int, float),
        "bool": bool,
        "Claim": Claim,
        "Process": Process,
    }
    return all(isinstance(getattr(part, each.name), wanted[str(each.type)]) for each in fields(part))


class Taken(CheckpointError):
    """Error: the folder belongs to another run."""


class Superseded(CheckpointError):
    """Error: a newer generation of the same run has the folder. It concerns the old half only: the run goes on."""

    exit_code = 75  # as of a worker that was given up: its agent starts a new one
    refused = True


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether a lease may be taken now. Neither ``take`` nor ``refusal``: wait ``seconds`` and look again."""

    take: bool = False
    seconds: float = 0.0
    refusal: CheckpointError | None = None
    reason: str = ""


def decide(found: Note | None, claim: Claim, *, unchanged: float, renewed: bool, dead: bool) -> Decision:
    """Decide whether ``claim`` may take the lease that ``found`` is the newest note of.

    ``unchanged``: seconds for which it has not changed, on the clock of the one who asks. ``renewed``: it has
    changed while that one looked. ``dead``: its holder is known to be dead.

    >>> mine, other = Claim(run="a", epoch=2), Note(number=7, term=5, claim=Claim(run="b", epoch=9))
    >>> decide(other, mine, unchanged=10.0, renewed=False, dead=False).seconds
    80.0
    >>> decide(other, mine, unchanged=90.0, renewed=False, dead=False).take
    True
    """
    if found is None:
        return Decision(take=True, reason="nobody has held it before")
    theirs = found.claim
    if theirs.run == claim.run:
        if theirs.epoch > claim.epoch:
            return Decision(refusal=superseded_by(found, claim))
        return Decision(take=True, reason=f"generation {claim.epoch} comes after {theirs.epoch} of the same run")
    if found.released:
        return Decision(take=True, reason=f"{found.holder} has given it back")
    if dead:
        return Decision(take=True, reason=f"{found.holder} has ended")
    if renewed:
        return Decision(refusal=taken_by(found, "is at work there"))
    if unchanged >= found.seconds:
        return Decision(take=True, reason=f"{found.holder} has not been heard of for {unchanged:.0f} s")
    return Decision(seconds=found.seconds - unchanged, reason=f"{found.holder} has not given it back")


def taken_by(note: Note, why: str) -> Taken:
    """Return the error for a folder that another run has."""
    return Taken(
        f"the folder of checkpoints belongs to another run: {note.holder} {why}",
        hint="wait for its end, end it, or give this run another folder",
    )


def superseded_by(note: Note, claim: Claim) -> Superseded:
    """Return the error for an old half of a run."""
    return Superseded(
        f"worker {claim.worker} is of generation {claim.epoch}, and {note.holder} trains on in generation "
        f"{note.claim.epoch}: this worker was taken for lost, and must not save any more",
        hint="its agent starts a new one",
    )


def superseded(terms: Sequence[tuple[int, int | None]]) -> set[int]:
    """Return the steps of checkpoints whose writers had lost the lease. ``terms``: (step, term), None: not known.

    >>> superseded([(10, 3), (20, 3), (12, 5), (8, None)])
    {20}
    """
    known = [(step, term) for step, term in terms if term is not None]
    return {step for step, term in known if any(s < step and t > term for s, t in known)}


# --- the files ------------------------------------------------------------------------------------


class Chain:
    """The files of a lease in the folder of a run; ``lease_on_store`` has the one of an object store."""

    def __init__(self, root: Place) -> None:
        self.folder: Place = root.absolute() / FOLDER

    def newest(self) -> Note | None:
        """Return the note with the highest number, None if there is none. Raises ``CheckpointError``."""
        with self._fresh():
            for _ in range(10):  # its holder may remove it between the listing and the reading
                numbers = self._numbers()
                note = self._read(numbers[-1]) if numbers else None
                if note is not None or not numbers:
                    return note
        raise CheckpointError(f"the lease in {self.folder} changes faster than it can be read")

    def has(self, run: str) -> bool:
        """Whether there is a note of a run. Raises ``CheckpointError`` if that cannot be read."""
        with self._fresh():
            found = map(self._read, reversed(self._numbers()))
            return any(note is not None and note.claim.run == run for note in found)

    def prepare(self) -> None:
        """Make the folder of the chain if it is not there. Raises ``CheckpointError`` if it cannot be written."""
        with explained(self.folder, "write"):
            make_folder(self.folder)
            discard([self._write(b"")])

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        """Show the folder as the server has it: a client that changes a folder drops what it remembers of it."""
        try:
            scratch = [self._write(b"")]
        except OSError:
            scratch = []  # nobody may write here, or there is no lease yet
        try:
            yield
        finally:
            discard(scratch)

    def make(self, note: Note) -> bool:
        """Make the next file of the chain; return whether this worker has made it and no higher one exists.

        Raises ``CheckpointError`` if the folder cannot be written, or is not there (see ``prepare``).
        """
        with explained(self.folder, "write"):
            made = self._create(self._path(note.number), note.to_text())
        if made and max(self._numbers(), default=note.number) > note.number:
            discard([self._path(note.number)])  # the chain has gone on since this worker has looked
            return False
        return made

    def clean(self, note: Note) -> None:
        """Remove the holder's files before ``note`` but its first, and the oldest of many."""
        numbers = self._numbers()
        mine = [n for n in numbers if note.term < n < note.number]
        discard(self._path(number) for number in {*mine, *numbers[:-KEEP]})

    def _create(self, place: Place, text: bytes) -> bool:
        """Make a file of the chain with its content, unless its name is taken; return whether this worker has."""
        scratch = self._write(text)
        try:
            return self._name(scratch, Path(place), text)
        finally:
            discard([scratch])

    def _write(self, text: bytes) -> Path:
        path = Path(self.folder / f".making-{secrets.token_hex(8)}")
        with path.open("xb") as file:
            file.write(text)
            if text:  # a power cut must not leave a name without its content
                file.flush()
                os.fsync(file.fileno())
        return path

    def _name(self, scratch: Path, path: Path, text: bytes) -> bool:
        """Give a file its name, unless it is taken; return whether this worker has done it."""
        try:
            os.link(scratch, path)
            return True
        except FileExistsError:
            pass
        except OSError as e:
            if e.errno not in NO_LINKS:
                raise
            with suppress(FileExistsError), path.open("xb") as file:
                file.write(text)
        with suppress(FileNotFoundError):
            return path.read_bytes() == text  # it may be ours: the server's first answer was lost on its way
        return False

    def _read(self, number: int) -> Note | None:
        try:
            return Note.from_text(number, self._content(self._path(number)))
        except FileNotFoundError:
            return None
        except OSError as e:
            raise CheckpointError(f"cannot read {self._path(number)}: {e.strerror}") from e

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(match[1]) for name in self._names() if (match := _NAME.fullmatch(name)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            raise CheckpointError(f"cannot read {self.folder}: {e.strerror}") from e

    def _names(self) -> list[str]:
        return os.listdir(self.folder)

    def _content(self, place: Place) -> bytes:
        return _bytes_of(Path(place))

    def _path(self, number: int) -> Place:
        return self.folder / f"lease-{number:08d}.json"


def _bytes_of(path: Path) -> bytes:
    """Return the begin of a file, b"" if it is no ordinary one: a link or a pipe is never followed or waited for."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO):
            return b""
        raise
    with open(number, "rb") as file:
        return file.read(_MOST_BYTES + 1) if stat.S_ISREG(os.fstat(number).st_mode) else b""
