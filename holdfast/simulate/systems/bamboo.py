"""Rules of Bamboo: each node can stand in for its successor in the pipeline, computing for two."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.simulate.course import Moment, NodeArrangement, Reaction
from holdfast.simulate.measured_tables import Speeds

SLOWDOWN = 1.5  # factor on a step's time while a node computes for two, as in the published simulation
RISK = 0.05  # probability that the next loss is fatal, above which a rendezvous is held even without waiting nodes


@dataclass(frozen=True, kw_only=True)
class BambooPlaces:
    """Places of nodes in the pipelines, numbered one pipeline after the other.

    For a place that is ``gone``, its predecessor stands in. The predecessor of a pipeline's first place is its last.
    """

    pipelines: int
    depth: int  # places of a pipeline
    waiting: int  # nodes without a place
    full: float = 0.0  # samples per second since the last rendezvous, as long as no node is lost
    gone: tuple[int, ...] = ()  # places whose node is lost, sorted

    @property
    def running(self) -> int:
        """Number of nodes that train."""
        return self.pipelines * self.depth - len(self.gone)

    @property
    def nodes(self) -> int:
        """Number of all nodes."""
        return self.running + self.waiting

    def place(self, draw: float) -> int | None:
        """Return the place of the node at this share of all nodes; None if that node waits.

        >>> [BambooPlaces(pipelines=1, depth=4, waiting=1, gone=(1,)).place(draw) for draw in (0.0, 0.3, 0.5, 0.8)]
        [0, 2, 3, None]
        """
        place = int(draw * self.nodes)
        if place >= self.running:
            return None
        for gone in self.gone:
            place += gone <= place
        return place

    def without(self, place: int | None) -> BambooPlaces | None:
        """Return the places after the loss of the node at ``place`` (None: a waiting node); None if that is fatal.

        >>> pipeline = BambooPlaces(pipelines=1, depth=4, waiting=0)
        >>> pipeline.without(1).gone
        (1,)
        >>> [pipeline.without(1).without(place) is None for place in (0, 2, 3)]
        [True, True, False]
        """
        if place is None:
            return replace(self, waiting=self.waiting - 1)
        first, stage = place - place % self.depth, place % self.depth
        beside = {first + (stage + by) % self.depth for by in (-1, 1)}
        if self.depth == 1 or not beside.isdisjoint(self.gone):
            # The lost node stood in for its successor, or its own predecessor is gone and cannot stand in for it.
            return None
        return replace(self, gone=tuple(sorted((*self.gone, place))))


@dataclass(frozen=True, kw_only=True)
class Bamboo:
    """Rules of Bamboo's published simulation.

    There are ⌊nodes / depth⌋ pipelines; the other nodes wait. The throughput is the table's for all nodes at the last
    rendezvous. After a loss, steps take 1.5 times as long until a rendezvous at the end of the running step. The loss
    of a node that stands in for another, or whose predecessor is gone, is fatal: all nodes stop for a rendezvous.

    The published simulation also slows down for the loss of a waiting node, but then holds no rendezvous, so steps
    stay slow until another node is lost. ``waiting_slows=False`` is what one would expect instead.
    """

    speeds: Speeds
    boundary_samples: float
    local: float  # seconds of a rendezvous at the end of a step
    everybody: float  # seconds of a rendezvous after a fatal loss
    depth: int
    creation: float = 0.0
    waiting_slows: bool = True
    boundary_seconds: float = 0.0

    def begin(self, moment: Moment) -> NodeArrangement:
        return self._fresh(len(moment.live))

    def lose(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        fresh = self._fresh(len(moment.live))
        if not fresh.samples_per_s:
            return Reaction(then=fresh)
        if not arrangement.samples_per_s or moment.paused:
            return Reaction(then=fresh, pause=self.local, why="rendezvous")
        standing: BambooPlaces = arrangement.memory
        slower = False
        for draw in moment.draws:
            place = standing.place(draw)
            slower |= self.waiting_slows or place is not None
            after = standing.without(place)
            if after is None:
                return Reaction(then=fresh, pause=self.everybody, why="rendezvous of all")
            standing = after
        return self._goes_on(standing, standing.full / SLOWDOWN if slower else arrangement.samples_per_s)

    def join(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        if not arrangement.samples_per_s or moment.paused:
            pause = self.everybody if moment.started else 0.0
            return Reaction(then=self._fresh(len(moment.live)), pause=pause, at_boundary=True, why="rendezvous")
        standing: BambooPlaces = arrangement.memory
        more = len(moment.live) - standing.nodes
        return self._goes_on(replace(standing, waiting=standing.waiting + more), arrangement.samples_per_s)

    def _goes_on(self, standing: BambooPlaces, speed: float) -> Reaction:
        """Train on, and hold a rendezvous at the end of the step if there is reason to."""
        meanwhile = NodeArrangement(samples_per_s=speed, used=standing.running, memory=standing)
        then = self._fresh(standing.nodes) if self._wants_rendezvous(standing) else None
        return Reaction(then=then, pause=self.local, at_boundary=True, meanwhile=meanwhile, why="rendezvous")

    def _wants_rendezvous(self, standing: BambooPlaces) -> bool:
        """Return whether waiting nodes can fill the gaps, the risk is too high, or one more pipeline is possible."""
        doubled = len(standing.gone)
        if doubled and (standing.waiting >= doubled or 2 * doubled / standing.running > RISK):
            return True
        return min(standing.nodes, self.speeds.most) // self.depth > standing.pipelines

    def _fresh(self, nodes: int) -> NodeArrangement:
        """Return the arrangement after a rendezvous of so many nodes."""
        pipelines = min(nodes, self.speeds.most) // self.depth
        running = pipelines * self.depth
        speed = self.speeds.at(nodes)[0] if running else 0.0
        standing = BambooPlaces(pipelines=pipelines, depth=self.depth, waiting=nodes - running, full=speed)
        return NodeArrangement(samples_per_s=speed, used=running if speed else 0, memory=standing)
