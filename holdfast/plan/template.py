"""Pipeline templates: for each number of nodes the fastest pipeline, made once and used ever after.

With n0 the fewest nodes that hold a pipeline, the sizes are n0, n0 + 1, … up to what is left of N nodes
when f pipelines of n0 stand beside. Any number of nodes from (f+1)·n0 to N is then a sum of at least f+1
sizes: f pipelines of n0, and one of all others. So whatever f nodes are lost, there is a plan that uses all
that are left, as long as they are (f+1)·n0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from holdfast.errors import UsageError
from holdfast.plan.profile import Profile
from holdfast.plan.sizes import PER_DEVICE as PER_DEVICE
from holdfast.plan.sizes import chains, fewest_nodes, what_it_takes, what_would_help
from holdfast.plan.stage_costs import Chain, StageCosts
from holdfast.plan.stage_cut import EFFORT, TINY, LowerBounds, StageCut, best_cut
from holdfast.plan.timeline import StageTimes, Vector, last_ends
from holdfast.words import count

FEW = 16  # up to here the time of every number of micro-batches is known exactly,
CLOSELY = 40  # of so many numbers up to twice the stages,
WIDELY = (3, 4, 5, 6)  # and of these times the stages; in between it is all but linear
CLOSE = 1e-9  # relative: nearer times are equal
PLENTY = 10**9  # micro-batches in a lane; whoever has time for more has time for any step


@dataclass(frozen=True, kw_only=True)
class TemplateStage:
    """Layers [first, stop) on one device of the pipeline's node number ``node``, in every lane."""

    first: int
    stop: int
    node: int
    times: StageTimes
    update: float  # seconds after its last backward: the optimizer, and the sum of gradients among lanes
    exchange: float  # and the sum of gradients with other pipelines
    bytes: int  # of memory

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


class Knots(NamedTuple):
    """Numbers of micro-batches in a lane, the time of each, and what one more adds beyond the last."""

    numbers: Vector
    times: Vector
    alone: Vector  # the time if there is no other pipeline
    slope: float


@dataclass(frozen=True, kw_only=True)
class Template:
    """A pipeline's shape: ``lanes`` equal chains of stages, side by side on the same nodes.

    ``gap`` 0 means proven optimal, 0.01 that a cut may exist that is up to 1% faster.

    >>> from holdfast.plan.profile import uniform
    >>> template = make_templates(uniform(4), nodes=4, tolerate=1).by_nodes[2]
    >>> [stage.layers for stage in template.stages]
    [range(0, 2), range(2, 4)]
    >>> template.capacity(template.seconds(7))
    7
    """

    nodes: int
    devices: int
    lanes: int
    stages: tuple[TemplateStage, ...]
    gap: float
    reason: str = field(compare=False)

    @cached_property
    def knots(self) -> Knots:
        forward = np.array([stage.times.forward + stage.times.send_forward for stage in self.stages])
        backward = np.array([stage.times.backward + stage.times.send_backward for stage in self.stages])
        update = np.array([stage.update for stage in self.stages])
        exchange = np.array([stage.exchange for stage in self.stages])
        stages = len(self.stages)
        near = np.unique([*range(1, FEW + 1), *np.linspace(1, 2 * stages, CLOSELY).round().astype(int)])
        far = np.array([times * stages for times in WIDELY if times * stages > near[-1]], dtype=int)
        numbers = np.concatenate([near, far])
        # Apart, because all of a call take as many rounds as its longest.
        ends = np.concatenate([last_ends(forward, backward, each) for each in (near, far) if len(each)])
        return Knots(
            numbers=numbers,
            times=(ends + update + exchange).max(axis=1),
            alone=(ends + update).max(axis=1),
            slope=float((forward + backward).max()),
        )

    def seconds(self, micro_batches: int, *, alone: bool = False) -> float:
        """A step with so many micro-batches; ``alone``: there is no other pipeline to sum gradients with."""
        knots = self.knots
        longest = -(-micro_batches // self.lanes)
        beyond = max(longest - int(knots.numbers[-1]), 0)
        times = knots.alone if alone else knots.times
        return float(np.interp(longest, knots.numbers, times)) + beyond * knots.slope

    def capacity(self, seconds: float) -> int:
        """The most micro-batches that a step of so many seconds has time for."""
        numbers, times = self.knots.numbers, self.knots.times
        seconds *= 1 + TINY
        if seconds < times[0]:
            return 0
        longest = float(np.interp(seconds, times, numbers)) + max(seconds - times[-1], 0.0) / self.knots.slope
        if longest >= PLENTY:
            return PLENTY * self.lanes
        longest = int(longest)
        # Rounding may put the border on either side.
        while self.seconds((longest + 1) * self.lanes) <= seconds:
            longest += 1
        while self.seconds(longest * self.lanes) > seconds:
            longest -= 1
        return longest * self.lanes

    @cached_property
    def roles(self) -> tuple[range, ...]:
        """The layers that each of the pipeline's nodes holds."""
        per_node = len(self.stages) // self.nodes
        return tuple(
            range(self.stages[first].first, self.stages[first + per_node - 1].stop)
            for first in range(0, len(self.stages), per_node)
        )


@dataclass(frozen=True, kw_only=True)
class Templates:
    """A template for each size that a pipeline may have."""

    profile: Profile
    devices: int
    tolerate: int
    minimum: int  # n0, the fewest nodes of a pipeline
    by_nodes: dict[int, Template]
    reason: str

    @property
    def needed(self) -> int:
        """The fewest nodes that survive the loss of ``tolerate``."""
        return (self.tolerate + 1) * self.minimum


def make_templates(
    profile: Profile, *, nodes: int, tolerate: int, devices: int = 1, minimum: int | None = None
) -> Templates:
    """All templates for up to so many nodes.

    >>> from holdfast.plan.profile import uniform
    >>> made = make_templates(uniform(8), nodes=6, tolerate=1, minimum=2)
    >>> list(made.by_nodes), made.reason
    ([2, 3, 4], 'a pipeline takes 2 to 4 nodes')
    """
    if nodes < 1 or tolerate < 0 or devices < 1 or (minimum is not None and minimum < 1):
        raise UsageError(f"{nodes} nodes of {devices} devices, tolerating {tolerate}: these cannot be negative or zero")
    if profile.memory is not None and profile.memory <= 0:
        raise UsageError(f"a device with {profile.memory} bytes of memory cannot hold a layer")
    costs = StageCosts(profile)
    fewest = fewest_nodes(costs, devices, minimum)
    needed = (tolerate + 1) * fewest
    if nodes < needed:
        raise UsageError(
            f"{count(nodes, 'node')} {'is' if nodes == 1 else 'are'} too few: {what_it_takes(tolerate, fewest)}, "
            f"{needed} in all",
            hint=what_would_help(nodes, fewest),
        )
    most = min(nodes - tolerate * fewest, costs.count)
    made = {size: _template(costs, size, devices) for size in range(fewest, most + 1)}
    found = {size: template for size, template in made.items() if template is not None}
    return Templates(
        profile=profile,
        devices=devices,
        tolerate=tolerate,
        minimum=fewest,
        by_nodes=found,
        reason=_reason(costs, found, nodes - tolerate * fewest),
    )


def _reason(costs: StageCosts, found: dict[int, Template], wanted: int) -> str:
    """Which sizes there are, and why not all from the smallest to the wanted largest."""
    sizes = f"{min(found)} to {max(found)} nodes" if len(found) > 1 else count(min(found), "node")
    words = f"a pipeline takes {sizes}"
    missing = [size for size in range(min(found), min(wanted, costs.count) + 1) if size not in found]
    if missing:
        # A longer pipeline has more micro-batches under way in its first stages.
        words += f": of {missing[0]} nodes{' and others' if missing[1:] else ''} it would not fit into the memory"
    elif wanted > costs.count:
        words += f": the model has only {count(costs.count, 'layer')}"
    return words


def _template(costs: StageCosts, nodes: int, devices: int) -> Template | None:
    """The fastest of all ways to use the devices; the search's effort is shared among them."""
    bounds = sorted(
        (LowerBounds(costs, chain) for chain in chains(costs, nodes, devices)),
        key=lambda one: (one.least, one.chain.lanes),
    )
    best: tuple[StageCut, Chain] | None = None
    effort, least = EFFORT, np.inf
    for one in bounds:
        rival = np.inf if best is None else best[0].seconds
        if one.least >= rival:
            break
        cut = best_cut(one, effort=effort, rival=rival)
        assert cut is not None, "the chain fits"
        effort -= cut.effort
        least = min(least, cut.least)
        if cut.seconds < rival:
            best = (cut, one.chain)
    if best is None:
        return None
    gap = best[0].seconds / least - 1
    return _describe(costs, nodes, devices, *best, gap=gap if gap > CLOSE else 0.0)


def _describe(costs: StageCosts, nodes: int, devices: int, cut: StageCut, chain: Chain, *, gap: float) -> Template:
    bounds, times = cut.bounds, costs.times(chain, cut.bounds)
    update, exchange = costs.after(chain, np.array(bounds[:-1]), np.array(bounds[1:]))
    stages = tuple(
        TemplateStage(
            first=bounds[number],
            stop=bounds[number + 1],
            node=number // chain.per_node,
            times=times[number],
            update=float(update[number]),
            exchange=float(exchange[number]),
            bytes=costs.memory(chain, number, bounds[number], bounds[number + 1]),
        )
        for number in range(chain.stages)
    )
    slowest = max(range(chain.stages), key=lambda number: times[number].total)
    proof = "no cut is faster" if gap == 0.0 else f"no cut is more than {gap:.2%} faster"
    template = Template(
        nodes=nodes,
        devices=devices,
        lanes=chain.lanes,
        stages=stages,
        gap=gap,
        reason=f"stage {slowest} of {chain.stages} sets the pace, {times[slowest].total * 1e3:.3g} ms "
        f"for a micro-batch; {proof}",
    )
    assert template.knots is not None  # timed now: after a failure there is no time for it
    return template
