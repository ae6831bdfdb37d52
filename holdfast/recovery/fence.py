"""The fence of a run's folder: the first worker holds the folder's lease, in the name of its generation.

``checkpoint.lease`` says what the lease is and who may take it. Here is the one who holds it: a thread renews it,
and every commit and every removal of a checkpoint renews it once more, which fails if somebody else has taken it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from holdfast.checkpoint.lease import (
    BEATS,
    SECONDS,
    Claim,
    Note,
    Process,
    Superseded,
    Taken,
    decide,
    superseded_by,
    taken_by,
)
from holdfast.checkpoint.lease_on_store import chain_of
from holdfast.checkpoint.places import Place
from holdfast.cluster.membership import Generation
from holdfast.cluster.pulse import PULSE
from holdfast.errors import CheckpointError

LOOK_SECONDS = 0.5  # between two looks at the lease of another run
DISMISSED = 1 << 60  # epoch of a worker that has left: no generation is newer
TRIES = 5  # to make the next number, if others make numbers at the same time

logger = logging.getLogger(__name__)


def claim_of(generation: Generation, worker: str) -> Claim:
    """Return a worker's claim to the lease, in the name of its generation."""
    return Claim(run=generation.run, epoch=generation.number, life=generation.life, worker=worker)


class Fence:
    """This worker's part in holding the lease of a folder. ``seconds``: the duration of the lease."""

    def __init__(self, root: Place, seconds: float = SECONDS) -> None:
        self._root = root
        self._chain = chain_of(root)
        self._seconds = seconds
        self._lock = threading.Lock()  # the thread that renews it and the one that commits do so one at a time
        self._claim = Claim()  # of the current generation
        self._first = False  # this worker is the first of that generation
        self._note: Note | None = None  # the newest note of this worker; None: it does not hold the lease
        self._lost: CheckpointError | None = None  # why this worker must not save any more
        self._stop: threading.Event | None = None  # ends the thread that renews the lease

    @property
    def run(self) -> str:
        """The name of the run that this worker belongs to."""
        return self._claim.run

    # --- taking it -------------------------------------------------------------------------------

    def begin(self, claim: Claim) -> bool:
        """Take the lease before a run reads or writes checkpoints; return False if the folder cannot be written.

        Waits for the lease of another run whose holder may be dead, at most for the duration of that lease. Raises
        ``Taken`` if its holder lives, ``Superseded`` if a newer generation of the same run has it.
        """
        with self._lock:
            self._stop_thread()
            self._claim, self._first, self._note, self._lost = claim, True, None, None
        try:
            self._chain.prepare()
        except CheckpointError as e:
            logger.warning("no lease, so no checkpoint either, can be written in %s: %s", self._root, e)
            return False
        found = self._chain.newest()
        first, since, told = found, time.monotonic(), False
        while True:
            renewed = found is not None and found != first
            unchanged = time.monotonic() - since
            dead = found is not None and found.process.is_dead()
            decision = decide(found, claim, unchanged=unchanged, renewed=renewed, dead=dead)
            if decision.refusal is not None:
                raise decision.refusal
            if decision.take and self._make(found):
                logger.info("this run has taken the lease of %s: %s", self._root, decision.reason)
                return True
            if not decision.take:
                if not told:
                    words = "waiting for the folder %s: %s. If nothing is heard of it for %.0f s, this run takes it"
                    logger.warning(words, self._root, decision.reason, decision.seconds)
                    told = True
                time.sleep(min(decision.seconds, LOOK_SECONDS))
                PULSE.sign()  # it waits, and does not hang
            found = self._chain.newest()

    def enter(self, claim: Claim, *, first: bool) -> None:
        """Note the generation that this worker is in. Its first worker renews the lease from now on, in a thread."""
        with self._lock:
            self._claim, self._first = claim, first
            if isinstance(self._lost, Superseded):
                self._lost = None  # the generation that has taken the lease may be the one that this worker enters
            if first and self._stop is None:
                self._stop = threading.Event()
                threading.Thread(target=self._keep, args=(self._stop,), name="holdfast-lease", daemon=True).start()
            elif not first:
                self._note = None
                self._stop_thread()

    def dismiss(self) -> None:
        """Note that this worker leaves as it was asked to, and the run goes on without it.

        It may complete the checkpoint that it is writing: newer generations of this run know of it.
        """
        self.enter(replace(self._claim, epoch=DISMISSED), first=False)

    def _keep(self, stop: threading.Event) -> None:
        """Renew the lease until ``stop`` is set, or it is lost. Runs in a thread."""
        said = ""
        while not stop.is_set():
            try:
                with self._lock:
                    if not stop.is_set():
                        self._chain.prepare()  # where nobody can write, nobody has taken anything over
                        self._renew()
            except (Taken, Superseded):
                pass  # ``raise_if_lost`` tells it at the next boundary, unless this worker enters a newer generation
            except CheckpointError as e:  # the file system may be away for a while
                if str(e) != said:
                    logger.warning("the lease of %s cannot be renewed: %s", self._root, e)
                said = str(e)
            stop.wait(self._seconds / BEATS)

    # --- holding it ------------------------------------------------------------------------------

    def check(self) -> Note:
        """Return the newest note, if this worker may commit or remove checkpoints.

        The first worker of a generation renews the lease for that: nobody else can have it then. Another worker,
        which was the first when its checkpoint was taken, looks whether its generation has it. Raises ``Taken`` or
        ``Superseded`` if not, ``CheckpointError`` if the lease cannot be read or written.
        """
        with self._lock:
            self.raise_if_lost()
            if self._first:
                self._chain.prepare()  # as all of the folder, it is made anew if somebody has deleted it
                return self._renew()
            found = self._chain.newest()
            self._lose_to(found)
            if found is None:
                raise CheckpointError(f"nobody holds the lease of {self._root}", hint="was it deleted?")
            return found

    def raise_if_lost(self) -> None:
        """Raise ``Taken`` or ``Superseded`` if this worker has found out that the lease is somebody else's."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Give the lease back, if this worker holds it, because the run ends. It is not taken again."""
        with self._lock:
            self._stop_thread()
            held, self._note = self._note, None
            self._lost = self._lost or Taken(f"this run has given the folder {self._root} back")
            if held is None:
                return
            try:
                self._chain.make(replace(self._after(held, held.claim, held.term), released=True))
            except CheckpointError as e:
                logger.warning("the lease of %s cannot be given back: %s", self._root, e)

    def _renew(self) -> Note:
        """Make the next number; return its note. Raises ``Taken`` or ``Superseded`` if somebody else has made it."""
        for _ in range(TRIES):
            found = self._note
            if found is None or found.claim != self._claim:
                found = self._chain.newest()
                self._lose_to(found)
            if self._make(found):
                assert self._note is not None
                return self._note
            newest = self._chain.newest()
            self._lose_to(newest)
            if self._note is not None and newest is not None and newest.claim != self._note.claim:
                # A generation of the same number, of another life of the coordinator: one of the two must end.
                self._lose(superseded_by(newest, self._claim))
            self._note = None
        raise CheckpointError(f"the lease of {self._root} is fought for")

    def _lose_to(self, found: Note | None) -> None:
        """Raise if the newest note is of another run, or of a newer generation of this one."""
        if found is not None and found.claim.run != self._claim.run:
            self._lose(taken_by(found, "has taken it over"))
        if found is not None and found.claim.epoch > self._claim.epoch:
            self._lose(superseded_by(found, self._claim))

    def _lose(self, error: CheckpointError) -> None:
        self._lost, self._note = error, None
        raise error

    def _stop_thread(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _make(self, found: Note | None) -> bool:
        """Make the number after ``found``, and clean up; return whether this worker holds the lease now."""
        goes_on = found is not None and found is self._note
        note = self._after(found, self._claim, found.term if goes_on and found is not None else None)
        if not self._chain.make(note):
            return False
        self._note = note
        self._chain.clean(note)
        return True

    def _after(self, found: Note | None, claim: Claim, term: int | None) -> Note:
        number = 1 if found is None else found.number + 1
        since = found.since if term is not None and found is not None else time.time()
        return Note(
            number=number,
            claim=claim,
            term=number if term is None else term,
            process=Process.current(),
            seconds=self._seconds,
            since=since,
        )
