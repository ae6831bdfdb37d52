"""The course of a training along a trace: what a system does from moment to moment, by its rules.

Work counts from boundary to boundary: a boundary is where a system can go on from when nodes are lost (the
end of a step; of a checkpoint). What was done since the last boundary is lost with them and done again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.simulate.trace import NodeChange, Trace

TINY = 1e-9  # seconds: what rounding may leave of a step


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of time in which one thing went on. ``used + idle + lost`` is the number of nodes there.

    ``lost`` nodes work on what is done again later, save, or wait for a reconfiguration or restart.
    """

    start: float
    end: float
    samples_per_s: float  # of work that is kept
    used: float
    idle: float
    lost: float
    why: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class NodeArrangement:
    """What runs on the nodes: how fast, on how many of them, and what its system has to remember."""

    samples_per_s: float
    used: int
    moving: float = 0.0  # seconds in which layers get here from where the layout before had them
    memory: Any = None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When something happens: the nodes that are up now, and what the system was doing."""

    live: Collection[str]  # in the order in which they came; as of now: copy it to keep it
    lost: tuple[str, ...] = ()
    draws: tuple[float, ...] = ()  # for each lost node a number in [0, 1): where it stood
    paused: bool = False
    started: bool = True  # has anything ever been trained?


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """What a system does about it.

    Without ``at_boundary`` it stops where it is, and what was done since the last boundary is lost. With it,
    it goes on as ``meanwhile`` to the next boundary. Then it pauses, and goes on as ``then``; None: no pause.
    """

    then: NodeArrangement | None
    pause: float = 0.0
    at_boundary: bool = False
    meanwhile: NodeArrangement | None = None
    why: str = ""


class SystemRules(Protocol):
    """A system: pure decisions, no clock. The course keeps the time."""

    @property
    def boundary_samples(self) -> float:
        """Samples from one boundary to the next; 0: everywhere is one, nothing is ever lost."""

    @property
    def boundary_seconds(self) -> float:
        """What a boundary itself costs: the checkpoint."""

    @property
    def creation(self) -> float:
        """Seconds until a node that is added is up."""

    def begin(self, moment: Moment) -> NodeArrangement: ...
    def lose(self, layout: NodeArrangement, moment: Moment) -> Reaction: ...
    def join(self, layout: NodeArrangement, moment: Moment) -> Reaction: ...


def follow(trace: Trace, rules: SystemRules, draws: Sequence[float] = ()) -> list[Segment]:
    """The segments of a system along a trace, without a gap from its start to its end.

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
    """When the trace changes, or nodes that it added are up."""
    changes = {change.time: change for change in trace.changes}
    up = {change.time + creation for change in trace.changes if change.added}
    times = sorted(time for time in changes.keys() | up if time < trace.end)
    return {time: changes.get(time, NodeChange(time=time)) for time in times}


class _Course:
    def __init__(self, trace: Trace, rules: SystemRules, draws: Sequence[float]) -> None:
        self.rules = rules
        self.now = trace.start
        self.there = len(trace.nodes)  # up or coming up
        self.live = dict.fromkeys(trace.nodes)
        self.coming: dict[str, float] = {}  # when it will be up
        self.draws = iter(draws)
        self.segments: list[Segment] = []
        self.since: list[Segment] = []  # since the last boundary
        self.phase = 0.0  # seconds since the last boundary
        self.pending: Reaction | None = None  # for the next boundary
        self.paused = 0.0  # when the pause began
        self.resumes: float | None = None  # when it ends
        self.why = ""
        self.layout = rules.begin(Moment(live=self.live.keys(), started=False))
        self.started = False

    # --- time passes ---

    def advance(self, to: float) -> None:
        """Lets time pass in which nothing happens to the nodes."""
        while self.now < to:
            if self.resumes is not None:
                self._pause(to)
            elif self.pending is not None and (not self.phase or not self.layout.samples_per_s):
                self._stop(self.pending)
            elif not self.layout.samples_per_s:
                self._add(to, why="too few nodes")
            else:
                self._work(to)
        if self.resumes is not None and self.resumes <= to:
            self._pause(to)

    def _pause(self, to: float) -> None:
        assert self.resumes is not None
        self._add(min(to, self.resumes), lost=self.layout.used, why=self.why)
        if self.now >= self.resumes:
            self.resumes = None

    def _work(self, to: float) -> None:
        """From a boundary as many whole rounds at once as there is time for; else on to the next boundary."""
        self.started = True
        work, whole = self._round()
        rounds = int((to - self.now) / whole + TINY) if whole else 0
        if not whole:
            self._train(to)
        elif not self.phase and rounds:
            share = work / whole
            used = self.layout.used
            end = self.now + rounds * whole
            if to - end < TINY:
                end = to
            self._add(
                end,
                samples_per_s=share * self.layout.samples_per_s,
                used=share * used if share < 1 else used,
                lost=used - share * used if share < 1 else 0,
                why="training" if share == 1 else "training and saving",
            )
        else:
            self._part(to, work, whole)

    def _part(self, to: float, work: float, whole: float) -> None:
        """On to the next boundary, or as far as time goes."""
        begun = self.now - self.phase
        boundary = begun + whole
        if self.phase < work:
            self._train(min(to, begun + work))
        if self.now < to and self.now < boundary:
            self._add(min(to, boundary), lost=self.layout.used, why="saving", kept=False)
        self.phase = self.now - begun
        if boundary - self.now < TINY:
            self.keep()

    def _train(self, to: float) -> None:
        layout = self.layout
        kept = not self.rules.boundary_samples
        self._add(to, samples_per_s=layout.samples_per_s, used=layout.used, why="training", kept=kept)

    def _round(self) -> tuple[float, float]:
        """Seconds of work from one boundary to the next, and of the boundary with it."""
        work = self.rules.boundary_samples / self.layout.samples_per_s if self.layout.samples_per_s else 0.0
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
        if to > self.now:
            idle = max(self.there - (used + lost), 0)  # rounding may leave a little less than nothing
            segment = Segment(
                start=self.now, end=to, samples_per_s=samples_per_s, used=used, idle=idle, lost=lost, why=why
            )
            (self.segments if kept else self.since).append(segment)
        self.now = max(self.now, to)

    # --- boundaries and changes ---

    def keep(self) -> None:
        """A boundary: what was done since the last one cannot be lost any more."""
        self.segments += self.since
        self.since, self.phase = [], 0.0

    def _drop(self) -> None:
        for part in self.since:
            why = part.why if part.why == "saving" else "done again"
            self.segments.append(replace(part, samples_per_s=0.0, used=0, lost=part.lost + part.used, why=why))
        self.since, self.phase = [], 0.0

    def apply(self, change: NodeChange) -> None:
        """Nodes are lost, ordered, up."""
        self.there += len(change.added) - len(change.lost)
        lost = tuple(node for node in change.lost if node in self.live)
        for node in change.lost:  # who is lost before it is up was never there
            self.coming.pop(node, None)
            self.live.pop(node, None)
        if lost:
            draws = tuple(next(self.draws, 0.0) for _ in lost)
            self._react(self.rules.lose(self.layout, self._moment(lost=lost, draws=draws)))
        self.coming.update(dict.fromkeys(change.added, change.time + self.rules.creation))
        ready = [node for node, time in self.coming.items() if time <= change.time]
        if ready:
            self._join(ready)

    def _join(self, ready: list[str]) -> None:
        for node in ready:
            del self.coming[node]
            self.live[node] = None
        reaction = self.rules.join(self.layout, self._moment())
        if self.resumes is None:
            self._react(reaction)
        else:  # who comes during a pause is taken along: what it takes has begun with the pause
            self.layout = reaction.then or reaction.meanwhile or self.layout
            if reaction.then is not None:
                self.resumes = max(self.resumes, self.paused + reaction.pause)

    def _moment(self, lost: tuple[str, ...] = (), draws: tuple[float, ...] = ()) -> Moment:
        paused = self.resumes is not None
        return Moment(live=self.live.keys(), lost=lost, draws=draws, paused=paused, started=self.started)

    def _react(self, reaction: Reaction) -> None:
        if not reaction.at_boundary:
            self._drop()
            self._stop(reaction)
            return
        if reaction.meanwhile is not None:
            before = self._round()[1]
            self.layout = reaction.meanwhile
            self.phase *= self._round()[1] / before if before else 0.0
        self.pending = reaction if reaction.then is not None else None

    def _stop(self, reaction: Reaction) -> None:
        assert reaction.then is not None
        self.pending, self.layout, self.why = None, reaction.then, reaction.why
        if not reaction.pause:
            self.resumes = None
            return
        # A loss during a pause may make it longer, never shorter.
        self.resumes = max(self.now + reaction.pause, self.resumes or self.now)
        self.paused = self.now
