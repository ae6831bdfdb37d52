"""Bamboo: each node can stand in for its successor, at the price of computing for two."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.simulate.course import Layout, Moment, Reaction
from holdfast.simulate.tables import Speeds

Place = tuple[int, int]  # pipeline and stage
Places = tuple[tuple[Place, ...], ...]  # of each node; none: it waits, two: it stands in for its successor

SLOWDOWN = 1.5  # of a step while somebody computes for two
RISK = 0.05  # that the next loss is fatal: above it, a rendezvous is held though nobody waits


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Who stands where, and the throughput since the last rendezvous while nobody is lost."""

    places: Places
    full: float

    @property
    def running(self) -> int:
        return sum(1 for held in self.places if held)

    @property
    def doubled(self) -> int:
        return sum(1 for held in self.places if len(held) > 1)


@dataclass(frozen=True, kw_only=True)
class Bamboo:
    """Rules of the published simulation.

    ⌊nodes / depth⌋ pipelines, the other nodes wait; the throughput is the table's for all nodes at the last
    rendezvous. A loss slows steps by half, until a rendezvous at the end of the running one. The loss of a node
    that stands in for two, or whose predecessor does, is fatal: everybody stops for a rendezvous of all.

    The published simulation slows steps for the loss of a waiting node too, but then holds no rendezvous, so they
    stay slow until somebody else is lost. ``waiting_slows=False`` is what one would expect instead.
    """

    speeds: Speeds
    boundary_samples: float
    local: float  # seconds of a rendezvous after a step
    everybody: float  # seconds of one after a fatal loss
    depth: int
    creation: float = 0.0
    waiting_slows: bool = True
    boundary_seconds: float = 0.0

    def begin(self, moment: Moment) -> Layout:
        return self._fresh(len(moment.live))

    def lose(self, layout: Layout, moment: Moment) -> Reaction:
        fresh = self._fresh(len(moment.live))
        if not fresh.samples_per_s:
            return Reaction(then=fresh)
        if not layout.samples_per_s or moment.paused:
            return Reaction(then=fresh, pause=self.local, why="rendezvous")
        standing: Standing = layout.memory
        places, slower = standing.places, False
        for draw in moment.draws:
            victim = int(draw * len(places))
            slower |= self.waiting_slows or bool(places[victim])
            after = without(places, victim, depth=self.depth)
            if after is None:
                return Reaction(then=fresh, pause=self.everybody, why="rendezvous of all")
            places = after
        speed = standing.full / SLOWDOWN if slower else layout.samples_per_s
        return self._goes_on(replace(standing, places=places), speed)

    def join(self, layout: Layout, moment: Moment) -> Reaction:
        if not layout.samples_per_s or moment.paused:
            pause = self.everybody if moment.started else 0.0
            return Reaction(then=self._fresh(len(moment.live)), pause=pause, at_boundary=True, why="rendezvous")
        standing: Standing = layout.memory
        waiting: Places = ((),) * (len(moment.live) - len(standing.places))
        return self._goes_on(replace(standing, places=standing.places + waiting), layout.samples_per_s)

    def _goes_on(self, standing: Standing, speed: float) -> Reaction:
        """Trains on, and holds a rendezvous at the end of the step if there is reason to."""
        meanwhile = Layout(samples_per_s=speed, used=standing.running, memory=standing)
        then = self._fresh(len(standing.places)) if self._wants_rendezvous(standing) else None
        return Reaction(then=then, pause=self.local, at_boundary=True, meanwhile=meanwhile, why="rendezvous")

    def _wants_rendezvous(self, standing: Standing) -> bool:
        doubled, running, nodes = standing.doubled, standing.running, len(standing.places)
        if doubled and (nodes - running >= doubled or 2 * doubled / running > RISK):
            return True
        return min(nodes, self.speeds.most) // self.depth > (running + doubled) // self.depth  # one more pipeline

    def _fresh(self, nodes: int) -> Layout:
        """What a rendezvous ends in."""
        running = min(nodes, self.speeds.most) // self.depth * self.depth
        speed = self.speeds.at(nodes)[0] if running else 0.0
        places = tuple(((n // self.depth, n % self.depth),) if n < running else () for n in range(nodes))
        return Layout(samples_per_s=speed, used=running if speed else 0, memory=Standing(places=places, full=speed))


def without(places: Places, victim: int, *, depth: int) -> Places | None:
    """The places after a loss: the predecessor stands in. None: nobody can.

    >>> pipeline = (((0, 0),), ((0, 1),), ((0, 2),), ((0, 3),))
    >>> doubled = without(pipeline, 1, depth=4)
    >>> doubled
    (((0, 0), (0, 1)), ((0, 2),), ((0, 3),))
    >>> [without(doubled, victim, depth=4) is None for victim in range(3)]
    [True, True, False]
    """
    held = places[victim]
    left = [place for number, place in enumerate(places) if number != victim]
    if not held:
        return tuple(left)
    pipeline, stage = held[0]
    before = (pipeline, (stage - 1) % depth)
    stand_in = next((number for number, place in enumerate(left) if before in place), None)
    if len(held) > 1 or stand_in is None or len(left[stand_in]) > 1:
        return None
    left[stand_in] = (*left[stand_in], held[0])
    return tuple(left)
