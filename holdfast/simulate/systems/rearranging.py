"""Rules of systems that rearrange the nodes left: Oobleck, holdfast, Varuna, checkpoint-restart, and the ideal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.plan.save_interval import Interval, choose, young_daly
from holdfast.simulate.course import Moment, NodeArrangement, Reaction
from holdfast.simulate.measured_tables import ModelFacts, Speeds
from holdfast.simulate.trace import Trace
from holdfast.words import count

# Rearranges nodes, given those that are up and the arrangement before.
Arrange = Callable[[tuple[str, ...], NodeArrangement | None], NodeArrangement]


def by_table(speeds: Speeds, *, moving: float = 0.0) -> Arrange:
    """Return a function that arranges nodes by a table of throughput; nodes that came first train.

    ``moving`` are the seconds in which each change moves layers.

    >>> by_table(Speeds({2: 8.0}), moving=1.5)(("a", "b", "c"), None)
    NodeArrangement(samples_per_s=8.0, used=2, moving=1.5, memory=('a', 'b'))
    """

    def arrange(live: tuple[str, ...], before: NodeArrangement | None) -> NodeArrangement:
        samples_per_s, used = speeds.at(len(live))
        return NodeArrangement(samples_per_s=samples_per_s, used=used, moving=moving, memory=live[:used])

    return arrange


def known(facts: ModelFacts, system: str) -> Speeds:
    """Return a system's throughput. The system must have the memory for the model."""
    speeds = facts.speeds[system]
    assert speeds is not None, f"{facts.model} is out of memory on {system}"
    return speeds


@dataclass(frozen=True, kw_only=True)
class Rearranging:
    """Rules: after a loss the work since the last boundary is lost; after a pause, the nodes left train on.

    Nodes that join are taken in at the next boundary, so that no work is lost. With too few nodes training stands
    still, and goes on with a restart. ``NodeArrangement.memory`` has the nodes that train. Pauses are in seconds.
    """

    arrange: Arrange
    boundary_samples: float
    boundary_seconds: float = 0.0
    creation: float = 0.0
    on_loss: float = 0.0  # pause after a loss, besides moving layers
    on_join: float = 0.0  # pause for a join, besides moving layers
    from_nothing: float = 0.0  # pause after training has stood still for lack of nodes
    why: str = ""  # name of a pause

    def begin(self, moment: Moment) -> NodeArrangement:
        return self.arrange(tuple(moment.live), None)

    def lose(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        if arrangement.samples_per_s and not any(node in arrangement.memory for node in moment.lost):
            return self.join(arrangement, moment)  # only waiting nodes are lost
        then = self.arrange(tuple(moment.live), arrangement)
        if not then.samples_per_s:
            return Reaction(then=then)
        pause = self.on_loss + then.moving if arrangement.samples_per_s else self.from_nothing
        return Reaction(then=then, pause=pause, why=self.why)

    def join(self, arrangement: NodeArrangement, moment: Moment) -> Reaction:
        then = self.arrange(tuple(moment.live), arrangement)
        if (then.samples_per_s, then.used) == (arrangement.samples_per_s, arrangement.used):
            return Reaction(then=None, at_boundary=True)  # nothing is gained: the new nodes wait
        pause = self.from_nothing if moment.started else 0.0
        if arrangement.samples_per_s:
            pause = self.on_join + then.moving
        return Reaction(then=then, pause=pause, at_boundary=True, why=self.why)


def oobleck(facts: ModelFacts, *, arrange: Arrange | None = None) -> Rearranging:
    """Return Oobleck's rules: a loss undoes the running step; losses and joins pause for the measured time."""
    arrange = arrange or by_table(known(facts, "oobleck"))
    return _step_by_step(facts, arrange, pause=facts.reconfigure, why="reconfiguring")


def holdfast(facts: ModelFacts, *, recovery: float, arrange: Arrange) -> Rearranging:
    """Return holdfast's rules: a loss undoes the running step and pauses for ``recovery`` seconds and moving."""
    return _step_by_step(facts, arrange, pause=recovery, why="recovering")


def _step_by_step(facts: ModelFacts, arrange: Arrange, *, pause: float, why: str) -> Rearranging:
    """Return rules with a boundary after each step."""
    return Rearranging(
        arrange=arrange,
        boundary_samples=facts.samples_per_step,
        creation=facts.creation,
        on_loss=pause,
        on_join=pause,
        from_nothing=facts.restart,
        why=why,
    )


def varuna(facts: ModelFacts) -> Rearranging:
    """Return Varuna's rules: checkpoints at fixed steps; a loss restarts all nodes from the last checkpoint.

    The measured restart includes a checkpoint's time, which the published simulation takes off; so do we.
    """
    return _from_checkpoints(facts, every=facts.checkpoint_every, pause=max(facts.restart - facts.checkpoint, 0.0))


def restart(facts: ModelFacts, trace: Trace) -> Rearranging:
    """Return the rules of plain checkpoint-restart: as Varuna, but the whole restart, and saving as ``saving`` says."""
    return _from_checkpoints(facts, every=saving(facts, trace).steps, pause=facts.restart)


def _from_checkpoints(facts: ModelFacts, *, every: int, pause: float) -> Rearranging:
    """Return rules with a checkpoint every so many steps as boundary, and a restart for every change."""
    return Rearranging(
        arrange=by_table(known(facts, "varuna")),
        boundary_samples=every * facts.samples_per_step,
        boundary_seconds=facts.checkpoint,
        creation=facts.creation,
        on_loss=pause,
        on_join=pause,
        from_nothing=pause,
        why="restarting",
    )


def saving(facts: ModelFacts, trace: Trace) -> Interval:
    """Return the steps between the saves of plain checkpoint-restart, by Young and Daly.

    They are given the trace's time between losses, which in practice is not known in advance. The better one of the
    two whole numbers of steps around their result is taken. Without losses it saves as often as a run of ours would.

    >>> from dataclasses import replace
    >>> from holdfast.simulate.measured_tables import example
    >>> from holdfast.simulate.trace import NodeChange
    >>> trace = Trace(name="t", start=0, end=90, nodes=("a",), changes=(NodeChange(time=45, lost=("a",)),))
    >>> saving(example(), trace)
    Interval(steps=8, reason='it saves every 8 steps, as Young and Daly advise for this very trace')
    >>> saving(example(), replace(trace, changes=())).reason
    'nothing is lost: it saves every 52 steps, which costs 3.5%'
    """
    fastest = max(known(facts, "varuna").by_nodes.values())
    if not fastest:
        return Interval(steps=1, reason="it never trains")
    step = facts.samples_per_step / fastest
    between = trace.between_losses
    if between is None:
        steps = choose(step_seconds=step, lost_seconds=facts.checkpoint, between_failures=None).steps
        share = facts.checkpoint / (steps * step)
        return Interval(
            steps=steps, reason=f"nothing is lost: it saves every {count(steps, 'step')}, which costs {share:.1%}"
        )
    advised = young_daly(facts.checkpoint, between) / step
    around = (max(math.floor(advised), 1), max(math.ceil(advised), 1))
    steps = min(around, key=lambda number: facts.checkpoint / (number * step) + number * step / (2 * between))
    return Interval(
        steps=steps, reason=f"it saves every {count(steps, 'step')}, as Young and Daly advise for this very trace"
    )


def ideal(best: Speeds) -> Rearranging:
    """Return the rules of the ideal: the best throughput of all systems at any moment; changes cost nothing."""
    return Rearranging(arrange=by_table(best), boundary_samples=0.0)
