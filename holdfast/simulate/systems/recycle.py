"""Rules of ReCycle: the other nodes of a lost node's stage compute its micro-batches, as far as possible in bubbles."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from holdfast.simulate.course import Moment, NodeArrangement, Reaction
from holdfast.simulate.measured_tables import Speeds


@dataclass(frozen=True, kw_only=True)
class RecycleGrid:
    """A grid of equal pipelines, with the number of nodes that each stage has lost, and that of waiting nodes.

    >>> RecycleGrid(pipelines=3, lost=(0, 0), waiting=1).nodes
    7
    """

    pipelines: int
    lost: tuple[int, ...]  # by stage
    waiting: int

    @property
    def running(self) -> int:
        """Number of nodes that train."""
        return self.pipelines * len(self.lost) - sum(self.lost)

    @property
    def nodes(self) -> int:
        """Number of all nodes."""
        return self.running + self.waiting

    @property
    def is_broken(self) -> bool:
        """Whether a stage has lost all its nodes, and so its layers."""
        return self.pipelines <= max(self.lost)

    def without(self, draw: float) -> RecycleGrid:
        """Return the grid after the loss of the node at this share of all nodes.

        >>> grid = RecycleGrid(pipelines=2, lost=(0, 0), waiting=1)
        >>> grid.without(0.0).lost, grid.without(0.5).lost, grid.without(0.9).waiting
        ((1, 0), (0, 1), 0)
        """
        number = int(draw * self.nodes)
        for stage, lost in enumerate(self.lost):
            number -= self.pipelines - lost
            if number < 0:
                return replace(self, lost=_plus(self.lost, stage, 1))
        return replace(self, waiting=self.waiting - 1)

    def levelled(self) -> RecycleGrid:
        """Fill the places of lost nodes with waiting ones, and spread the remaining gaps evenly over the stages.

        >>> RecycleGrid(pipelines=5, lost=(3, 0, 1), waiting=1).levelled()
        RecycleGrid(pipelines=5, lost=(1, 1, 1), waiting=0)
        """
        filled = min(self.waiting, sum(self.lost))
        each, more = divmod(sum(self.lost) - filled, len(self.lost))
        lost = tuple(each + (stage < more) for stage in range(len(self.lost)))
        return replace(self, lost=lost, waiting=self.waiting - filled)

    def slowdown(self, micro_batches: int) -> float:
        """Return how much longer a step takes than without losses, as a factor.

        The unit is the time of one micro-batch at one stage. A step without losses takes M units for the micro-batches
        of a pipeline, and S - 1 to fill and drain it. A stage that has lost f of its D nodes takes M·D/(D - f) instead
        of M, rounded up.

        >>> RecycleGrid(pipelines=5, lost=(0,) * 6, waiting=0).slowdown(120)
        1.0
        >>> round(RecycleGrid(pipelines=5, lost=(1, 1, 1, 0, 0, 0), waiting=0).slowdown(120), 3)
        1.207
        """
        around = len(self.lost) - 1
        most = math.ceil(micro_batches / (self.pipelines - max(self.lost)))
        return (most + around) / (math.ceil(micro_batches / self.pipelines) + around)


def _plus(lost: tuple[int, ...], stage: int, by: int) -> tuple[int, ...]:
    return (*lost[:stage], lost[stage] + by, *lost[stage + 1 :])


@dataclass(frozen=True, kw_only=True)
class ReCycle:
    """Rules of ReCycle: the grid stays; a loss undoes the running step and pauses for ``on_loss`` seconds.

    Waiting and joining nodes fill gaps. Nodes change stages so that all stages have about as many gaps (ReCycle's
    failure normalization). When a stage is lost whole, or there are nodes for one more pipeline, a new grid begins
    after ``restart`` seconds. The loss of a waiting node costs nothing.
    """

    speeds: Speeds
    boundary_samples: float
    on_loss: float
    restart: float
    stages: int
    micro_batches: int  # of a step, in all pipelines
    creation: float = 0.0
    boundary_seconds: float = 0.0

    def begin(self, moment: Moment) -> NodeArrangement:
        return self._arranged(self._fresh(len(moment.live)))

    def lose(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        grid: RecycleGrid = arrangement.memory
        for draw in moment.draws:
            grid = grid.without(draw)
        if grid.lost == arrangement.memory.lost:
            return self.join(replace(arrangement, memory=grid), moment)  # only waiting nodes are lost
        fresh = self._fresh(len(moment.live))
        is_new = grid.is_broken or fresh.pipelines > grid.pipelines  # a larger grid may have been due at the boundary
        then = self._arranged(fresh if is_new else grid.levelled())
        if not then.samples_per_s:
            return Reaction(then=then)
        if is_new or not arrangement.samples_per_s:
            return Reaction(then=then, pause=self.restart, why="restarting")
        return Reaction(then=then, pause=self.on_loss, why="rerouting")

    def join(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        grid: RecycleGrid = arrangement.memory
        more = replace(grid, waiting=grid.waiting + len(moment.live) - grid.nodes)
        meanwhile = replace(arrangement, memory=more)
        fresh = self._fresh(len(moment.live))
        if fresh.pipelines > grid.pipelines:
            then = self._arranged(fresh)
            pause = self.restart if moment.started else 0.0
            return Reaction(then=then, pause=pause, at_boundary=True, meanwhile=meanwhile, why="restarting")
        levelled = more.levelled()
        return Reaction(
            then=self._arranged(levelled) if levelled.lost != grid.lost else None,
            pause=self.on_loss,
            at_boundary=True,
            meanwhile=meanwhile,
            why="rerouting",
        )

    def reach(self) -> Speeds:
        """Return the best throughput by the number of nodes, of larger grids with gaps and of smaller ones without.

        >>> speeds = Speeds({2: 4.0, 4: 9.0})
        >>> rules = ReCycle(speeds=speeds, boundary_samples=1.0, on_loss=0.0, restart=0.0, stages=2, micro_batches=8)
        >>> rules.reach().by_nodes
        {2: 5.0, 3: 5.0, 4: 9.0}
        """
        found: dict[int, float] = {}
        for pipelines in range(1, self.speeds.most // self.stages + 1):
            whole = RecycleGrid(pipelines=pipelines, lost=(0,) * self.stages, waiting=0)
            for gone in range(self.stages * (pipelines - 1) + 1):
                grid = replace(whole, lost=_plus(whole.lost, 0, gone)).levelled()
                speed = self._arranged(grid).samples_per_s
                found[grid.running] = max(found.get(grid.running, 0.0), speed)
        return Speeds(dict(sorted(found.items())))

    def _fresh(self, nodes: int) -> RecycleGrid:
        """Return a grid without gaps for so many nodes."""
        pipelines = min(nodes, self.speeds.most) // self.stages
        return RecycleGrid(pipelines=pipelines, lost=(0,) * self.stages, waiting=nodes - pipelines * self.stages)

    def _arranged(self, grid: RecycleGrid) -> NodeArrangement:
        full = 0.0 if grid.is_broken else self.speeds.at(grid.pipelines * self.stages)[0]
        if not full or grid.running < self.speeds.fewest:  # fewer than were measured: not known, so nothing
            return NodeArrangement(samples_per_s=0.0, used=0, memory=grid)
        return NodeArrangement(samples_per_s=full / grid.slowdown(self.micro_batches), used=grid.running, memory=grid)
