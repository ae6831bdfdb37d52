"""Pipeline templates: for each number of nodes the fastest pipeline, made once before training.

Let n0 be the fewest nodes that can hold a pipeline, N all nodes and f the losses to survive. The sizes are n0, n0 + 1,
… N − f·n0. Any number of nodes from (f+1)·n0 to N is then a sum of at least f+1 sizes: f pipelines of n0 nodes, and
one of all the others. So after the loss of any f nodes there is a plan that uses all nodes left, as long as these are
at least (f+1)·n0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from holdfast.errors import UsageError
from holdfast.plan.pipeline_sizes import PER_DEVICE as PER_DEVICE
from holdfast.plan.pipeline_sizes import chains, fewest_nodes, what_it_takes, what_would_help
from holdfast.plan.profile import Profile
from holdfast.plan.stage_costs import Chain, StageCosts
from holdfast.plan.stage_cut import EFFORT, TINY, LowerBounds, StageCut, best_cut
from holdfast.plan.timeline import StageTimes, Vector, last_ends
from holdfast.words import count

# A template knows the exact time of a step for some numbers of micro-batches, and interpolates between these:
FEW = 16  # all numbers up to this one, where the time grows unevenly,
CLOSELY = 40  # so many numbers, evenly spaced, up to twice the number of stages,
WIDELY = (3, 4, 5, 6)  # and these multiples of the number of stages, between which the time is nearly linear
CLOSE = 1e-9  # relative: times that differ by less count as equal
PLENTY = 10**9  # micro-batches of a lane: more than any step has, and no overflow in sums


@dataclass(frozen=True, kw_only=True)
class TemplateStage:
    """A stage of a template: layers [first, stop) on one device of the pipeline's node ``node``, in each lane."""

    first: int
    stop: int
    node: int
    times: StageTimes
    update: float  # seconds after the last backward: the sum of gradients among lanes, and the optimizer
    exchange: float  # seconds of the sum of gradients with other pipelines
    bytes: int  # of memory on its device

    @property
    def layers(self) -> range:
        """Layers of the stage."""
        return range(self.first, self.stop)


class Knots(NamedTuple):
    """Points of the function from micro-batches of a lane to seconds of a step."""

    numbers: Vector  # of micro-batches
    times: Vector  # seconds with as many
    alone: Vector  # the same if there is no other pipeline to sum gradients with
    slope: float  # seconds that each micro-batch beyond the last number adds


@dataclass(frozen=True, kw_only=True)
class Template:
    """Shape of a pipeline: ``lanes`` equal chains of stages, side by side on the same nodes.

    ``devices`` is the number per node. ``gap`` 0 means that no cut is faster; 0.01 that one may be up to 1% faster.

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
        """Exact times of some numbers of micro-batches, for ``seconds`` and ``capacity`` to interpolate."""
        forward = np.array([stage.times.forward + stage.times.send_forward for stage in self.stages])
        backward = np.array([stage.times.backward + stage.times.send_backward for stage in self.stages])
        update = np.array([stage.update for stage in self.stages])
        exchange = np.array([stage.exchange for stage in self.stages])
        stages = len(self.stages)
        near = np.unique([*range(1, FEW + 1), *np.linspace(1, 2 * stages, CLOSELY).round().astype(int)])
        far = np.array([times * stages for times in WIDELY if times * stages > near[-1]], dtype=int)
        numbers = np.concatenate([near, far])
        # Two calls, because every number of a call takes as many rounds as the largest.
        ends = np.concatenate([last_ends(forward, backward, each) for each in (near, far) if len(each)])
        return Knots(
            numbers=numbers,
            times=(ends + update + exchange).max(axis=1),
            alone=(ends + update).max(axis=1),
            slope=float((forward + backward).max()),
        )

    def seconds(self, micro_batches: int, *, alone: bool = False) -> float:
        """Return the seconds of a step with so many micro-batches; ``alone``: there is no other pipeline."""
        knots = self.knots
        longest = -(-micro_batches // self.lanes)
        beyond = max(longest - int(knots.numbers[-1]), 0)
        times = knots.alone if alone else knots.times
        return float(np.interp(longest, knots.numbers, times)) + beyond * knots.slope

    def capacity(self, seconds: float) -> int:
        """Return the most micro-batches that the pipeline can compute in a step of so many seconds."""
        numbers, times = self.knots.numbers, self.knots.times
        seconds *= 1 + TINY
        if seconds < times[0]:
            return 0
        longest = float(np.interp(seconds, times, numbers)) + max(seconds - times[-1], 0.0) / self.knots.slope
        if longest >= PLENTY:
            return PLENTY * self.lanes
        longest = int(longest)
        # Rounding may have given one too few or too many.
        while self.seconds((longest + 1) * self.lanes) <= seconds:
            longest += 1
        while self.seconds(longest * self.lanes) > seconds:
            longest -= 1
        return longest * self.lanes

    @cached_property
    def roles(self) -> tuple[range, ...]:
        """Layers of each of the pipeline's nodes."""
        per_node = len(self.stages) // self.nodes
        return tuple(
            range(self.stages[first].first, self.stages[first + per_node - 1].stop)
            for first in range(0, len(self.stages), per_node)
        )


@dataclass(frozen=True, kw_only=True)
class Templates:
    """Templates for all sizes that a pipeline may have, and the reason for these sizes."""

    profile: Profile
    devices: int
    tolerate: int
    minimum: int  # n0, the fewest nodes of a pipeline
    by_nodes: dict[int, Template]
    reason: str

    @property
    def needed(self) -> int:
        """Fewest nodes that survive the loss of ``tolerate`` nodes."""
        return (self.tolerate + 1) * self.minimum


def make_templates(
    profile: Profile, *, nodes: int, tolerate: int, devices: int = 1, minimum: int | None = None
) -> Templates:
    """Make the templates for up to ``nodes`` nodes of ``devices`` devices each.

    ``tolerate`` is the number of simultaneous losses to survive. ``minimum`` is the least number of nodes of a
    pipeline; by default, the fewest whose memory suffices. Raises UsageError if the nodes or their memory are too few.

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
    """Return a sentence with the sizes, and why some up to the wanted largest are missing."""
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
    """Return the fastest way to use the devices; all numbers of lanes together share the effort of the search."""
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
    assert template.knots is not None  # computed now, so that it need not be after a failure
    return template
