"""The course of a training along a trace: what a system does from moment to moment, by its rules.

A boundary is a moment from which the system can go on when nodes are lost: the end of a step, or of a checkpoint. The
work since the last boundary is lost with the nodes and done again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.simulate.trace import NodeChange, Trace

TINY = 1e-9  # seconds: a shorter rest of a step is rounding


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of time (seconds) in which the system did one thing.

    ``used + idle + lost`` is the number of nodes that exist then. ``used`` nodes do work that is kept, ``idle`` ones
    wait, ``lost`` ones do work that is thrown away later, save, or stand still in a reconfiguration or restart.
    """

    start: float
    end: float
    samples_per_s: float  # of work that is kept
    used: float  # nodes; not whole where several courses are averaged
    idle: float
    lost: float
    why: str

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class NodeArrangement:
    """The nodes as a system has arranged them: how fast they train, and how many of them do."""

    samples_per_s: float
    used: int  # nodes that train
    moving: float = 0.0  # seconds to move layers to where this arrangement has them
    memory: Any = None  # whatever the system's rules want to know at the next change


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment at which nodes are lost or come up, as the rules see it."""

    live: Collection[str]  # nodes that are up, in the order in which they came; a live view: copy it to keep it
    lost: tuple[str, ...] = ()  # nodes that are lost at this moment
    draws: tuple[float, ...] = ()  # for each lost node a random number in [0, 1) that decides its place
    paused: bool = False  # the system is in a pause
    started: bool = True  # the system has trained before


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """A system's reaction to a moment.

    Without ``at_boundary`` the system stops at once, and the work since the last boundary is lost. With it, the system
    trains on as ``meanwhile`` until the next boundary. Then it pauses and goes on as ``then``. ``then=None`` means
    that it just goes on, without a pause.
    """

    then: NodeArrangement | None
    pause: float = 0.0  # seconds
    at_boundary: bool = False
    meanwhile: NodeArrangement | None = None
    why: str = ""


class SystemRules(Protocol):
    """Rules of a system: pure decisions. The course keeps the time and calls them."""

    @property
    def boundary_samples(self) -> float:
        """Samples from one boundary to the next; 0: every moment is a boundary, so no work is ever lost."""

    @property
    def boundary_seconds(self) -> float:
        """Seconds that a boundary itself takes: those of a checkpoint."""

    @property
    def creation(self) -> float:
        """Seconds until a node that is added is up."""

    def begin(self, moment: Moment) -> NodeArrangement:
        """Return the arrangement at the start of the trace."""

    def lose(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        """Return the reaction to the loss of ``moment.lost``; ``arrangement`` is the arrangement until now."""

    def join(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        """Return the reaction to nodes that have come up; they are in ``moment.live`` already."""


def follow(trace: Trace, rules: SystemRules, draws: Sequence[float] = ()) -> list[Segment]:
    """Return what a system does along a trace, as segments without gaps from its start to its end.

    ``draws`` are random numbers in [0, 1), one per lost node, for rules that depend on who stands where.

    >>> from holdfast.simulate.systems.rearranging import oobleck
    >>> from holdfast.simulate.measured_tables import example
    >>> from holdfast.simulate.trace import parse_trace
    >>> lines = [f"0,add,n{i}" for i in range(4)] + ["98000,remove,n0", "200000,remove,n1"]
    >>> for segment in follow(parse_trace("\\n".join(lines), name="t"), oobleck(example())):
    ...     print(segment.start, segment.end, segment.samples_per_s, segment.used, segment.lost, segment.why)
    0.0 95.0 20.0 4 0 training
    95.0 98.0 0.0 0 4 done again
    98.0 103.0 0.0 0 3 reconfiguring
    103.0 186.33333333333334 6.0 3 0 training
    186.33333333333334 200.0 6.0 3 0 training
    """
    course = _Course(trace, rules, draws)
    for time, change in _times(trace, rules.creation).items():
        course.advance(time)
        course.apply(change)
    course.advance(trace.end)
    course.keep()
    return course.segments


def _times(trace: Trace, creation: float) -> dict[float, NodeChange]:
    """Return the moments at which the trace changes, or nodes that it added are up, with the trace's changes."""
    changes = {change.time: change for change in trace.changes}
    up = {change.time + creation for change in trace.changes if change.added}
    times = sorted(time for time in changes.keys() | up if time < trace.end)
    return {time: changes.get(time, NodeChange(time=time)) for time in times}


class _Course:
    """The state of a system while it follows a trace."""

    def __init__(self, trace: Trace, rules: SystemRules, draws: Sequence[float]) -> None:
        self.rules = rules
        self.now = trace.start
        self.there = len(trace.nodes)  # nodes that are up or coming up
        self.live = dict.fromkeys(trace.nodes)
        self.coming: dict[str, float] = {}  # nodes that are not up yet: when they will be
        self.draws = iter(draws)
        self.segments: list[Segment] = []
        self.since: list[Segment] = []  # work since the last boundary, which a loss would undo
        self.phase = 0.0  # seconds since the last boundary
        self.pending: Reaction | None = None  # carried out at the next boundary
        self.paused = 0.0  # when the pause began
        self.resumes: float | None = None  # when the pause ends; None: there is none
        self.why = ""
        self.arrangement = rules.begin(Moment(live=self.live.keys(), started=False))
        self.started = False

    # --- time passes ---

    def advance(self, to: float) -> None:
        """Let time pass until ``to``, in which nothing happens to the nodes."""
        while self.now < to:
            if self.resumes is not None:
                self._pause(to)
            elif self.pending is not None and (not self.phase or not self.arrangement.samples_per_s):
                self._stop(self.pending)
            elif not self.arrangement.samples_per_s:
                self._add(to, why="too few nodes")
            else:
                self._work(to)
        if self.resumes is not None and self.resumes <= to:
            self._pause(to)

    def _pause(self, to: float) -> None:
        assert self.resumes is not None
        self._add(min(to, self.resumes), lost=self.arrangement.used, why=self.why)
        if self.now >= self.resumes:
            self.resumes = None

    def _work(self, to: float) -> None:
        """Train until ``to`` at most: at a boundary as many whole rounds as fit, else on to the next boundary.

        A round is the work from one boundary to the next, and the boundary's own seconds.
        """
        self.started = True
        work, whole = self._round()
        rounds = int((to - self.now) / whole + TINY) if whole else 0
        if not whole:
            self._train(to)
        elif not self.phase and rounds:
            share = work / whole
            used = self.arrangement.used
            end = self.now + rounds * whole
            if to - end < TINY:
                end = to
            self._add(
                end,
                samples_per_s=share * self.arrangement.samples_per_s,
                used=share * used if share < 1 else used,
                lost=used - share * used if share < 1 else 0,
                why="training" if share == 1 else "training and saving",
            )
        else:
            self._part(to, work, whole)

    def _part(self, to: float, work: float, whole: float) -> None:
        """Train, then save, until the next boundary or ``to``, whichever is first."""
        begun = self.now - self.phase
        boundary = begun + whole
        if self.phase < work:
            self._train(min(to, begun + work))
        if self.now < to and self.now < boundary:
            self._add(min(to, boundary), lost=self.arrangement.used, why="saving", kept=False)
        self.phase = self.now - begun
        if boundary - self.now < TINY:
            self.keep()

    def _train(self, to: float) -> None:
        arrangement = self.arrangement
        kept = not self.rules.boundary_samples
        self._add(to, samples_per_s=arrangement.samples_per_s, used=arrangement.used, why="training", kept=kept)

    def _round(self) -> tuple[float, float]:
        """Return the seconds of work from one boundary to the next, without and with the boundary's own seconds."""
        work = self.rules.boundary_samples / self.arrangement.samples_per_s if self.arrangement.samples_per_s else 0.0
        return work, work + self.rules.boundary_seconds if work else 0.0

    def _add(
        self,
        to: float,
        *,
        samples_per_s: float = 0.0,
        used: float = 0,
        lost: float = 0,
        why: str,
        kept: bool = True,
    ) -> None:
        """Add a segment from now until ``to``; ``kept=False``: a loss before the next boundary undoes it."""
        if to > self.now:
            idle = max(self.there - (used + lost), 0)  # rounding may make it slightly negative
            segment = Segment(
                start=self.now, end=to, samples_per_s=samples_per_s, used=used, idle=idle, lost=lost, why=why
            )
            (self.segments if kept else self.since).append(segment)
        self.now = max(self.now, to)

    # --- boundaries and changes ---

    def keep(self) -> None:
        """Mark a boundary: the work since the last one cannot be lost any more."""
        self.segments += self.since
        self.since, self.phase = [], 0.0

    def _drop(self) -> None:
        """Turn the work since the last boundary into lost time: it has to be done again."""
        for part in self.since:
            why = part.why if part.why == "saving" else "done again"
            self.segments.append(replace(part, samples_per_s=0.0, used=0, lost=part.lost + part.used, why=why))
        self.since, self.phase = [], 0.0

    def apply(self, change: NodeChange) -> None:
        """Apply a change of the trace: nodes are lost, others are ordered; those ordered before may be up now."""
        self.there += len(change.added) - len(change.lost)
        lost = tuple(node for node in change.lost if node in self.live)
        for node in change.lost:  # a node that is lost before it is up never trained
            self.coming.pop(node, None)
            self.live.pop(node, None)
        if lost:
            draws = tuple(next(self.draws, 0.0) for _ in lost)
            self._react(self.rules.lose(self.arrangement, self._moment(lost=lost, draws=draws)))
        self.coming.update(dict.fromkeys(change.added, change.time + self.rules.creation))
        ready = [node for node, time in self.coming.items() if time <= change.time]
        if ready:
            self._join(ready)

    def _join(self, ready: list[str]) -> None:
        """Let nodes that are up join: at once, or with the pause that is under way."""
        for node in ready:
            del self.coming[node]
            self.live[node] = None
        reaction = self.rules.join(self.arrangement, self._moment())
        if self.resumes is None:
            self._react(reaction)
        else:
            # Nodes that come during a pause are part of what follows it. Their own pause counts from its beginning.
            self.arrangement = reaction.then or reaction.meanwhile or self.arrangement
            if reaction.then is not None:
                self.resumes = max(self.resumes, self.paused + reaction.pause)

    def _moment(self, lost: tuple[str, ...] = (), draws: tuple[float, ...] = ()) -> Moment:
        paused = self.resumes is not None
        return Moment(live=self.live.keys(), lost=lost, draws=draws, paused=paused, started=self.started)

    def _react(self, reaction: Reaction) -> None:
        """Carry out a reaction at once, or keep it for the next boundary."""
        if not reaction.at_boundary:
            self._drop()
            self._stop(reaction)
            return
        if reaction.meanwhile is not None:
            before = self._round()[1]
            self.arrangement = reaction.meanwhile
            # The share of the round that is done stays the same; at another speed it stands for other seconds.
            self.phase *= self._round()[1] / before if before else 0.0
        self.pending = reaction if reaction.then is not None else None

    def _stop(self, reaction: Reaction) -> None:
        """Begin the reaction's pause, if it has one, and its arrangement."""
        assert reaction.then is not None
        self.pending, self.arrangement, self.why = None, reaction.then, reaction.why
        if not reaction.pause:
            self.resumes = None
            return
        # A loss during a pause may make it longer, never shorter.
        self.resumes = max(self.now + reaction.pause, self.resumes or self.now)
        self.paused = self.now
