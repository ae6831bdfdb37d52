"""What stages cost: a profile as arrays, and the shape of the chain that is cut out of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from holdfast.plan.profile import Link, Profile
from holdfast.plan.timeline import StageTimes, Vector


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The shape of a pipeline's lane: its stages, of which each node holds ``per_node``."""

    stages: int
    per_node: int
    lanes: int
    micro_batches: int

    def crosses(self, stage: int) -> bool:
        """Does the boundary in front of this stage lie between two nodes?"""
        return stage % self.per_node == 0


class StageCosts:
    """A profile as arrays: sums over layers [a, b) at a glance.

    >>> from holdfast.plan.profile import uniform
    >>> chain = Chain(stages=2, per_node=1, lanes=1, micro_batches=8)
    >>> [times.forward for times in StageCosts(uniform(4)).times(chain, (0, 1, 4))]
    [0.01, 0.03]
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.count = len(profile.layers)
        self.forward = _sums([layer.forward for layer in profile.layers])
        self.backward = _sums([layer.backward for layer in profile.layers])
        sent = [(layer.output_bytes, layer.output_gradient_bytes) for layer in profile.layers[:-1]]
        self.sent = np.array([(0, 0), *sent, (0, 0)], dtype=float).T  # forward and backward, in front of each layer
        self.resident = _sums([layer.resident_bytes for layer in profile.layers])
        self.saved = _sums([layer.saved_bytes for layer in profile.layers])
        self.trainable = _sums([layer.trainable_bytes for layer in profile.layers])
        self.update = _sums([layer.update for layer in profile.layers])

    def sends(self, chain: Chain, stage: int) -> Vector:
        """Seconds to send forward and backward over the boundary in front of a stage, by the layer it begins with."""
        crosses = chain.crosses(stage)
        link, shared = (self.profile.between, chain.lanes) if crosses else (self.profile.inside, 1)
        return _seconds(link, shared * self.sent)

    def times(self, chain: Chain, bounds: tuple[int, ...]) -> list[StageTimes]:
        """What one micro-batch takes at each stage of a cut."""
        found = []
        for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
            last = stage + 1 == chain.stages
            found.append(
                StageTimes(
                    forward=float(self.forward[stop] - self.forward[first]),
                    backward=float(self.backward[stop] - self.backward[first]),
                    send_forward=0.0 if last else float(self.sends(chain, stage + 1)[0][stop]),
                    send_backward=float(self.sends(chain, stage)[1][first]),
                )
            )
        return found

    def after(self, chain: Chain, first: Vector, stop: Vector) -> tuple[Vector, Vector]:
        """Seconds after a stage's last backward: its update with the sum among lanes, and the sum with other pipelines.

        A ring, or the exchange of halves, sends and receives each byte about twice. The stages of a node
        share its link to other nodes.
        """
        size = self.trainable[stop] - self.trainable[first]
        update = self.update[stop] - self.update[first]
        if chain.lanes > 1:
            update = update + _seconds(self.profile.inside, 2 * size)
        return update, _seconds(self.profile.between, 2 * size * chain.per_node)

    def memory(self, chain: Chain, stage: int, first: int, stop: int) -> int:
        """Bytes of a stage's device: the state, the gradient, and what the micro-batches under way keep."""
        under_way = min(chain.stages - stage, chain.micro_batches)
        resident = int(self.resident[stop] - self.resident[first])
        return resident + under_way * int(self.saved[stop] - self.saved[first])

    def fits(self, chain: Chain) -> bool:
        """Is there a cut whose stages all fit into the memory? Follows every layer that a stage may begin with."""
        if chain.stages > self.count:
            return False
        if self.profile.memory is None:
            return True
        begins = np.zeros(self.count + 1, dtype=bool)
        begins[0] = True
        for stage in range(chain.stages):
            needed = self.resident + min(chain.stages - stage, chain.micro_batches) * self.saved
            furthest = np.searchsorted(needed, needed + self.profile.memory, side="right") - 1
            first = np.flatnonzero(begins)
            # The next stage begins behind at least one layer of this one, and at most at the furthest.
            change = np.zeros(self.count + 3, dtype=int)
            np.add.at(change, first + 1, 1)
            np.add.at(change, furthest[first] + 1, -1)
            begins = np.cumsum(change)[: self.count + 1] > 0
        return bool(begins[self.count])


def _sums(values: list[float]) -> Vector:
    return np.concatenate([[0.0], np.cumsum(values)])


def _seconds(link: Link, sizes: Vector) -> Vector:
    seconds: Vector = np.where(sizes > 0, link.latency + sizes / link.bandwidth, 0.0)
    return seconds
