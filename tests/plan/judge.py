"""An independent judge of the planner: everything by definition, everything tried, nothing clever.

Nothing here uses the planner's own search, schedule or timing. Times of a stage are (forward, backward, send forward,
send backward) in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import settings

from holdfast.plan.profile import LayerCost, Link, Profile

Times = tuple[float, float, float, float]
PER_DEVICE = 4  # micro-batches per device of a pipeline while templates are made


def examples(number: int) -> settings:
    """So many random examples in ``make test``, ten times as many in ``make thorough``."""
    return settings(max_examples=number * (10 if settings.get_current_profile_name() == "thorough" else 1))


# --- one pipeline, event by event ---------------------------------------------------------------------------------


def order_of(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """1F1B by its definition: warm-up forwards, then pairs of a forward and a backward, then the other backwards."""
    warm = min(stages - stage - 1, micro_batches)
    pairs = [(("f", warm + k), ("b", k)) for k in range(micro_batches - warm)]
    cool = [("b", k) for k in range(micro_batches - warm, micro_batches)]
    return [("f", k) for k in range(warm)] + [op for pair in pairs for op in pair] + cool


def run_1f1b(times: Sequence[Times], micro_batches: int) -> list[tuple[int, str, int, float, float]]:
    """Simulates workers and messages; (stage, kind, micro-batch, start, end of the send), in order of time."""
    stages = len(times)
    todo = [order_of(stage, stages, micro_batches)[::-1] for stage in range(stages)]
    inbox = {(0, "f", m) for m in range(micro_batches)} | {(stages - 1, "b", m) for m in range(micro_batches)}
    busy = [False] * stages
    events: list[tuple[float, int, int, str, int]] = [(0.0, -1, stage, "", 0) for stage in range(stages)]
    done = []
    while events:
        now, _, stage, kind, number = heapq.heappop(events)
        awake = {stage}
        if kind:  # an operation's send has ended: the worker is free, the neighbour has its input
            busy[stage] = False
            neighbour = stage + 1 if kind == "f" else stage - 1
            inbox.add((neighbour, kind, number))
            awake.add(neighbour)
        for worker in sorted(awake & set(range(stages))):
            if busy[worker] or not todo[worker] or (worker, *todo[worker][-1]) not in inbox:
                continue
            what, which = todo[worker].pop()
            forward, backward, send_forward, send_backward = times[worker]
            took = forward + send_forward if what == "f" else backward + send_backward
            busy[worker] = True
            heapq.heappush(events, (now + took, len(done), worker, what, which))
            done.append((worker, what, which, now, now + took))
    assert not any(todo), "deadlock"
    return done


def step_seconds(times: Sequence[Times], micro_batches: int) -> float:
    return max(end for *_, end in run_1f1b(times, micro_batches))


# --- all cuts ------------------------------------------------------------------------------------------------------


def link_seconds(link: Link, size: float) -> float:
    return link.latency + size / link.bandwidth if size else 0.0


def stage_times(profile: Profile, bounds: Sequence[int], *, per_node: int, lanes: int) -> list[Times]:
    """What the contract says: between nodes all lanes share the link, inside a node each has its own."""
    stages = len(bounds) - 1

    def send(boundary: int, stage: int, forward: bool) -> float:
        """Over the boundary in front of ``stage``, which begins with layer ``boundary``."""
        layer = profile.layers[boundary - 1]
        size = layer.output_bytes if forward else layer.output_gradient_bytes
        if stage % per_node == 0:
            return link_seconds(profile.between, lanes * size)
        return link_seconds(profile.inside, size)

    return [
        (
            math.fsum(layer.forward for layer in profile.layers[first:stop]),
            math.fsum(layer.backward for layer in profile.layers[first:stop]),
            send(stop, stage + 1, forward=True) if stage + 1 < stages else 0.0,
            send(first, stage, forward=False) if stage > 0 else 0.0,
        )
        for stage, (first, stop) in enumerate(itertools.pairwise(bounds))
    ]


def stage_bytes(profile: Profile, bounds: Sequence[int], micro_batches: int) -> list[int]:
    """State and gradient, and what each micro-batch that 1F1B has under way keeps for its backward."""
    found = []
    for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
        layers = profile.layers[first:stop]
        state = sum(layer.weight_bytes + layer.slot_bytes + layer.trainable_bytes for layer in layers)
        under_way = most = 0
        for kind, _ in order_of(stage, len(bounds) - 1, micro_batches):
            under_way += 1 if kind == "f" else -1
            most = max(most, under_way)
        found.append(state + most * sum(layer.saved_bytes for layer in layers))
    return found


def after_seconds(profile: Profile, bounds: Sequence[int], *, per_node: int, lanes: int) -> list[tuple[float, float]]:
    """After each stage's last backward: (sum gradients among lanes and update, sum them with other pipelines).

    Each byte is sent about twice; the stages of a node share its link to the other nodes.
    """
    found = []
    for first, stop in itertools.pairwise(bounds):
        size = sum(layer.trainable_bytes for layer in profile.layers[first:stop])
        update = sum(layer.update for layer in profile.layers[first:stop])
        inside = link_seconds(profile.inside, 2 * size) if lanes > 1 else 0.0
        found.append((update + inside, link_seconds(profile.between, 2 * size * per_node)))
    return found


def whole_step(times: Sequence[Times], after: Sequence[tuple[float, float]], micro_batches: int) -> float:
    """Until every stage has updated; ``after`` as above."""
    return max(end + sum(rest) for end, rest in zip(last_ends(times, micro_batches), after, strict=True))


def last_ends(times: Sequence[Times], micro_batches: int) -> list[float]:
    """When each stage has done all it has to do for its micro-batches."""
    last = [0.0] * len(times)
    for stage, _, _, _, end in run_1f1b(times, micro_batches):
        last[stage] = max(last[stage], end)
    return last


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


@dataclass(frozen=True)
class Choice:
    lanes: int
    bounds: tuple[int, ...]
    seconds: float  # of a step with the micro-batches of planning


def all_choices(profile: Profile, nodes: int, devices: int) -> list[Choice]:
    """Every number of lanes and every cut that fits, timed with the micro-batches of planning."""
    found = []
    for lanes in (k for k in range(1, devices + 1) if devices % k == 0):
        shape = {"per_node": devices // lanes, "lanes": lanes}
        stages = nodes * devices // lanes
        count = PER_DEVICE * stages
        for bounds in all_cuts(len(profile.layers), stages):
            if profile.memory is not None and max(stage_bytes(profile, bounds, count)) > profile.memory:
                continue
            times, after = stage_times(profile, bounds, **shape), after_seconds(profile, bounds, **shape)
            found.append(Choice(lanes, bounds, whole_step(times, after, count)))
    return found


# --- several pipelines ---------------------------------------------------------------------------------------------


def all_splits(total: int, pipelines: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each pipeline at least one micro-batch, ``total`` in all."""
    for cuts in itertools.combinations(range(1, total), pipelines - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def best_split(total: int, seconds: Sequence[Callable[[int], float]]) -> float:
    """The least time of the slowest pipeline over all splits; infinite if there is none."""
    return min(
        (max(time(n) for time, n in zip(seconds, split, strict=True)) for split in all_splits(total, len(seconds))),
        default=math.inf,
    )


def fastest_split(total: int, seconds: Sequence[Callable[[int], float]]) -> float:
    """The same by dynamic programming, for more micro-batches than can be listed."""
    best = [math.inf] * (total + 1)
    best[0] = 0.0
    for time in seconds:
        known = [math.inf, *(time(n) for n in range(1, total + 1))]
        best = [min((max(best[m - n], known[n]) for n in range(1, m + 1)), default=math.inf) for m in range(total + 1)]
    return best[total]


def compositions(nodes: int, sizes: Sequence[int], fewest: int) -> Iterator[tuple[int, ...]]:
    """Every multiset of sizes that uses all nodes in at least so many pipelines."""

    def extend(left: int, largest: int, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if left == 0 and len(chosen) >= fewest:
            yield chosen
        for size in sizes:
            if size <= min(left, largest):
                yield from extend(left - size, size, (*chosen, size))

    yield from extend(nodes, max(sizes), ())


def moved(roles: Mapping[str, range], held: Mapping[str, range], sizes: Sequence[int]) -> int:
    """Bytes that somebody has to be sent: the layers of his role that he does not hold."""
    return sum(sizes[layer] for node, role in roles.items() for layer in role if layer not in held.get(node, ()))


def fewest_moved(shapes: Sequence[Sequence[range]], held: Mapping[str, range], sizes: Sequence[int]) -> int:
    """Over every assignment of nodes to the places of these pipelines (``shapes``: the layers of each node)."""
    places = [role for shape in shapes for role in shape]
    names = sorted(held)
    assert len(names) == len(places)
    cost = [[moved({name: role}, held, sizes) for role in places] for name in names]
    return min(
        sum(cost[name][place] for name, place in enumerate(order))
        for order in itertools.permutations(range(len(places)))
    )


# --- made-up models ------------------------------------------------------------------------------------------------


def layer(
    number: int, forward: float, backward: float, out: int, weight: int, saved: int, *, update: float = 0.0
) -> LayerCost:
    return LayerCost(
        name=f"layer {number}",
        forward=forward,
        backward=backward,
        output_bytes=out,
        output_gradient_bytes=out,
        weight_bytes=weight,
        trainable_bytes=weight,
        slot_bytes=2 * weight,
        saved_bytes=saved,
        update=update,
    )


def model(
    layers: Sequence[LayerCost], *, bandwidth: float, latency: float = 1e-5, memory: int | None = None
) -> Profile:
    return Profile(
        model="made up by the judge",
        device="none",
        micro_batch=1,
        layers=tuple(layers),
        inside=Link(bandwidth=8 * bandwidth, latency=latency / 5),
        between=Link(bandwidth=bandwidth, latency=latency),
        memory=memory,
    )


def transformer(rng: random.Random, count: int) -> Profile:
    """An embedding, equal blocks with a little noise, a head that is dear."""
    blocks = [
        layer(i, 0.01 * rng.uniform(0.97, 1.03), 0.02 * rng.uniform(0.97, 1.03), 8 << 20, 50 << 20, 60 << 20)
        for i in range(1, count - 1)
    ]
    first = layer(0, 0.0005, 0.001, 8 << 20, 150 << 20, 8 << 20)
    last = layer(count - 1, 0.01 * rng.uniform(0.5, 3), 0.02 * rng.uniform(0.5, 3), 1 << 10, 150 << 20, 90 << 20)
    chain = [first, *blocks, last] if count > 1 else [last]
    return model(chain, bandwidth=rng.choice([1.25e9, 3e9, 12.5e9]), latency=rng.choice([0.0, 2e-5, 2e-4]))


def cnn(rng: random.Random, count: int) -> Profile:
    """Outputs halve and weights double as one goes on; backward is two to three times forward."""
    chain = []
    for i in range(count):
        forward, slower = 0.01 * rng.uniform(0.3, 1.7), rng.uniform(1.6, 3)
        octave = 4 * i // count
        chain.append(layer(i, forward, forward * slower, (64 << 20) >> octave, 1 << (20 + octave), 96 << 20 >> octave))
    return model(chain, bandwidth=rng.choice([1.25e9, 12.5e9]))


def wild(rng: random.Random, count: int) -> Profile:
    """Anything: layers that take nothing, links that take longer than the work, gradients without activations."""
    chain = []
    for i in range(count):
        cost = layer(
            i,
            rng.choice([0.0, 1e-4, 0.01, 0.02, rng.random() * 0.05]),
            rng.choice([0.0, 1e-4, 0.01, 0.03, rng.random() * 0.05]),
            rng.choice([0, 1 << 10, rng.randrange(64 << 20)]),
            rng.randrange(64 << 20),
            rng.randrange(64 << 20),
            update=rng.choice([0.0, rng.random() * 0.01]),
        )
        gradient = rng.choice([0, cost.output_bytes, 2 * cost.output_bytes])
        chain.append(LayerCost(**{**vars(cost), "output_gradient_bytes": gradient}))
    if sum(cost.forward + cost.backward for cost in chain) == 0:
        chain[0] = layer(0, 0.01, 0.02, 1 << 20, 1 << 20, 1 << 20)
    return model(chain, bandwidth=rng.choice([1e8, 1e9, 12.5e9]), latency=rng.choice([0.0, 1e-4, 5e-3]))


FAMILIES: dict[str, Callable[[random.Random, int], Profile]] = {
    "transformer": transformer,
    "cnn": cnn,
    "wild": wild,
}
