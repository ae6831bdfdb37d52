"""Costs of stages: the profile as arrays of sums, and the shape of a chain of stages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from holdfast.plan.profile import Link, Profile
from holdfast.plan.timeline import StageTimes, Vector


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Shape of one lane of a pipeline: a chain of stages, ``per_node`` of them on each node."""

    stages: int
    per_node: int
    lanes: int
    micro_batches: int

    def crosses(self, stage: int) -> bool:
        """Return whether the boundary in front of this stage lies between two nodes."""
        return stage % self.per_node == 0


class StageCosts:
    """A profile as arrays of running sums: the cost of layers [a, b) is a difference of two entries.

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
        """Return the seconds of sends over the boundary in front of a stage, by its first layer.

        The first row is forward, the second backward.
        """
        crosses = chain.crosses(stage)
        link, shared = (self.profile.between, chain.lanes) if crosses else (self.profile.inside, 1)
        return _seconds(link, shared * self.sent)

    def times(self, chain: Chain, bounds: tuple[int, ...]) -> list[StageTimes]:
        """Return the seconds of one micro-batch at each stage of a cut."""
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
        """Return the seconds after the last backward of stages with layers [first, stop), in two parts.

        The first is the update with the gradient sum among lanes, the second the gradient sum with other pipelines.
        A sum (by a ring or by halving) sends and receives each byte about twice. The stages of a node share its link.
        """
        size = self.trainable[stop] - self.trainable[first]
        update = self.update[stop] - self.update[first]
        if chain.lanes > 1:
            update = update + _seconds(self.profile.inside, 2 * size)
        return update, _seconds(self.profile.between, 2 * size * chain.per_node)

    def memory(self, chain: Chain, stage: int, first: int, stop: int) -> int:
        """Return the bytes of a stage: state, gradient, and what is saved for the micro-batches under way."""
        under_way = min(chain.stages - stage, chain.micro_batches)
        resident = int(self.resident[stop] - self.resident[first])
        return resident + under_way * int(self.saved[stop] - self.saved[first])

    def fits(self, chain: Chain) -> bool:
        """Return whether some cut has all stages fit into memory, by following the layers each stage may begin with."""
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
