"""Race of the planner against published times: all templates, a new plan after a failure, over layers and nodes."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.race_report import Bar, Say
from bench.running import BENCH
from holdfast.errors import HoldfastError
from holdfast.measuring import spread
from holdfast.plan.place import NodeName
from holdfast.plan.planner import PipelinePlan, Shortage, make_plan
from holdfast.plan.profile import LayerCost, Profile, uniform
from holdfast.plan.template import PER_DEVICE, Templates, make_templates

Times = dict[str, list[float]]
COLUMNS = {"seconds": "s: median (range)", "note": "note"}
PUBLISHED = {24: 15.6, 96: 3298.0}  # layers: seconds, from Oobleck's paper
PUBLISHED_ON = 24  # nodes of 8 devices, in that paper
FAILURE = "after a failure"
DEVICES, TOLERATE = 8, 2
TURNS = 3  # failures of each kind in a round, of other nodes each time
MINIMA = (1, 8)  # nodes of the smallest pipeline: with little memory it is more than one


@dataclass(frozen=True, kw_only=True)
class PlannerSizes:
    """Sizes to plan for: (layers, nodes) that have bars, and the numbers along which the cost is drawn."""

    published: tuple[int, int] = (96, PUBLISHED_ON)
    large: tuple[int, int] = (128, 1000)
    layers: tuple[int, ...] = (12, 24, 48, 96, 192)
    nodes: tuple[int, ...] = (8, 24, 72, 216, 648)


def race(*, rounds: int, say: Say, sizes: PlannerSizes | None = None) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Plan everything once a round; return results and bars."""
    sizes = sizes or PlannerSizes()
    times: Times = {}
    made: dict[str, Templates] = {}
    for number in range(rounds):
        for kind, make in MODELS.items():
            for layers, nodes in (sizes.published, sizes.large):
                name = f"templates, {kind}, {_size(layers, nodes)}"
                made[name] = _timed(times, name, make(layers), nodes)
                say(f"round {number + 1}/{rounds}, {name}: {times[name][-1]:.2f} s")
            for minimum in MINIMA:
                title, some = f"{FAILURE}, {kind}, pipelines of {minimum} or more", with_minimum(made[name], minimum)
                for turn in range(TURNS):
                    _fail(times, title, some, nodes, seed=number * TURNS + turn)
    along = _along(sizes, rounds, say)
    draw(BENCH / "planner.png", along)
    say(f"drawn: {BENCH / 'planner.png'}")
    return _results(times, made, along, sizes), _bars(times, sizes)


def _timed(times: Times, name: str, profile: Profile, nodes: int) -> Templates:
    begin = time.perf_counter()
    made = make_templates(profile, nodes=nodes, tolerate=TOLERATE, devices=DEVICES)
    times.setdefault(name, []).append(time.perf_counter() - begin)
    return made


# --- models ---------------------------------------------------------------------------------------


def changed(one: LayerCost, *, forward: float, backward: float, sent: int, weights: int) -> LayerCost:
    """Return a layer with other costs, trained with Adam."""
    return replace(
        one,
        forward=forward,
        backward=backward,
        output_bytes=sent,
        output_gradient_bytes=sent,
        weight_bytes=weights,
        trainable_bytes=weights,
        slot_bytes=2 * weights,
    )


def transformer(layers: int) -> Profile:
    """Return a profile of an embedding with many weights, equal blocks, and a head of 2.5 times a block's work.

    >>> [round(layer.forward, 3) for layer in transformer(4).layers]
    [0.001, 0.01, 0.01, 0.025]
    """
    plain = uniform(layers)
    first, last = plain.layers[0], plain.layers[-1]
    embedding = changed(first, forward=0.001, backward=0.001, sent=first.output_bytes, weights=512 << 20)
    head = changed(last, forward=0.025, backward=0.05, sent=last.output_bytes, weights=512 << 20)
    blocks = plain.layers[1:-1]
    return replace(plain, model=f"transformer, {layers} layers", layers=(embedding, *blocks, head))


def at_random(layers: int) -> Profile:
    """Return a profile in which no two layers are alike, so that repetition does not help."""
    draw = random.Random(layers)

    def layer(one: LayerCost) -> LayerCost:
        forward = draw.uniform(0.002, 0.02)
        sent, weights = int(draw.uniform(0.1, 4) * 2**20), int(draw.uniform(1, 128) * 2**20)
        return changed(one, forward=forward, backward=forward * draw.uniform(1, 3), sent=sent, weights=weights)

    plain = uniform(layers)
    return replace(plain, model=f"random, {layers} layers", layers=tuple(map(layer, plain.layers)))


def convolutions(layers: int) -> Profile:
    """Return a profile with large outputs in front and much state behind: the hardest to cut.

    >>> [layer.output_bytes >> 20 for layer in convolutions(8).layers]
    [32, 32, 16, 16, 8, 8, 4, 4]
    """
    draw = random.Random(layers)

    def layer(number: int, one: LayerCost) -> LayerCost:
        depth = 4 * number // layers
        forward, sent, weights = draw.uniform(0.005, 0.015), (32 << 20) >> depth, (2 << 20) << 2 * depth
        return changed(one, forward=forward, backward=2 * forward, sent=sent, weights=weights)

    plain = uniform(layers)
    made = tuple(layer(number, one) for number, one in enumerate(plain.layers))
    return replace(plain, model=f"convolutions, {layers} layers", layers=made)


MODELS: dict[str, Callable[[int], Profile]] = {
    "equal": uniform,
    "transformer": transformer,
    "convolutions": convolutions,
    "random": at_random,
}


# --- after a failure ------------------------------------------------------------------------------


def _fail(times: Times, name: str, templates: Templates, nodes: int, *, seed: int) -> None:
    """Time a new plan after each kind of failure, and after a join."""
    batch = PER_DEVICE * DEVICES * nodes
    everyone = [f"n{number:05}" for number in range(nodes)]
    plan = _planned(templates, everyone, batch)
    for kind, lost in failures(plan, everyone, seed=seed).items():
        left = [node for node in everyone if node not in lost]
        held = plan.held()
        begin = time.perf_counter()
        _planned(templates, left, batch, held)
        times.setdefault(f"{name}: {kind}", []).append(time.perf_counter() - begin)
    begin = time.perf_counter()
    _planned(templates, [*everyone, "new"], batch, plan.held())
    times.setdefault(f"{name}: one joins", []).append(time.perf_counter() - begin)


def with_minimum(templates: Templates, minimum: int) -> Templates:
    """Return the templates of at least ``minimum`` nodes, as if memory were short."""
    kept = {nodes: one for nodes, one in templates.by_nodes.items() if nodes >= minimum}
    return replace(templates, minimum=minimum, by_nodes=kept)


def failures(plan: PipelinePlan, everyone: Sequence[NodeName], *, seed: int) -> dict[str, set[NodeName]]:
    """Return the lost nodes for each kind of failure."""
    draw = random.Random(seed)
    widest = max(plan.pipelines, key=lambda pipeline: len(pipeline.nodes))
    return {
        "one lost": {draw.choice(everyone)},
        f"{TOLERATE} lost": set(draw.sample(everyone, TOLERATE)),
        "a pipeline lost": set(widest.nodes),
        "a tenth lost": set(draw.sample(everyone, len(everyone) // 10)),
    }


def _planned(
    templates: Templates, nodes: Sequence[NodeName], batch: int, held: dict[NodeName, range] | None = None
) -> PipelinePlan:
    plan = make_plan(templates, nodes, micro_batches=batch, held=held)
    if isinstance(plan, Shortage):
        raise HoldfastError(f"the bench cannot plan for {len(nodes)} nodes: {plan.reason}", hint=plan.hint)
    return plan


# --- as a function of layers and nodes ------------------------------------------------------------

Along = dict[str, dict[str, dict[int, list[float]]]]  # title of the panel, kind of model, size: seconds


def _along(sizes: PlannerSizes, rounds: int, say: Say) -> Along:
    """Time planning along layers and along nodes; the other number is that of the published case."""
    layers, nodes = sizes.published
    titles = (
        f"templates, {nodes} nodes of {DEVICES}",
        f"templates, {layers} layers",
        f"{FAILURE}, {layers} layers",
    )
    found: Along = {title: {kind: {} for kind in MODELS} for title in titles}
    for _ in range(rounds):
        for kind, make in MODELS.items():
            for count in sizes.layers:
                times: Times = {}
                _timed(times, "templates", make(count), nodes)
                found[titles[0]][kind].setdefault(count, []).extend(times["templates"])
            for count in sizes.nodes:
                times = {}
                made = _timed(times, "templates", make(layers), count)
                found[titles[1]][kind].setdefault(count, []).extend(times.pop("templates"))
                _fail(times, "failure", made, count, seed=0)
                found[titles[2]][kind].setdefault(count, []).extend(t for values in times.values() for t in values)
        say("a round along layers and nodes is done")
    return found


def draw(path: Path, along: Along) -> None:
    """Draw a panel for each, seconds over size. Both axes are logarithmic: a straight line is a power."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(exist_ok=True)
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, len(along), figsize=(13, 4.2), dpi=130, layout="constrained", squeeze=False)
        for panel, (title, kinds) in zip(axes[0], along.items(), strict=True):
            for (kind, points), marker in zip(kinds.items(), "os^D", strict=True):
                middle = [statistics.median(values) for values in points.values()]
                panel.plot(list(points), middle, marker=marker, label=kind)
                panel.fill_between(list(points), *_edges(points.values()), alpha=0.15)
            if title == f"templates, {PUBLISHED_ON} nodes of {DEVICES}":
                panel.plot(list(PUBLISHED), list(PUBLISHED.values()), "kx", label="published by Oobleck")
            ticks = list(next(iter(kinds.values())))
            panel.set(title=title, xscale="log", yscale="log", xlabel=_by(title))
            panel.set_xticks(ticks, map(str, ticks))
            panel.minorticks_off()
            panel.grid(alpha=0.25)
        axes[0, 0].set_ylabel("seconds")
        axes[0, 0].legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


def _edges(times: Iterable[list[float]]) -> tuple[list[float], list[float]]:
    return [min(values) for values in times], [max(values) for values in times]


# --- the outcome ----------------------------------------------------------------------------------


def _results(times: Times, made: dict[str, Templates], along: Along, sizes: PlannerSizes) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, templates in made.items():
        gap = max(one.gap for one in templates.by_nodes.values())
        note = "proven optimal" if gap <= 0 else f"at most {gap:.2%} from optimal"
        layers, nodes = sizes.published
        if name.endswith(_size(layers, nodes)) and layers in PUBLISHED and nodes == PUBLISHED_ON:
            note += f", {PUBLISHED[layers] / statistics.median(times[name]):,.0f} times as fast as published"
        results[name] = {"seconds": spread(times[name]), "note": note}
    failures = {name.split(": ")[1] for name in times if name.startswith(FAILURE)}
    for failure in sorted(failures):
        each = {name: values for name, values in times.items() if name.endswith(f": {failure}")}
        every = [seconds for values in each.values() for seconds in values]
        medians = {name: statistics.median(values) for name, values in each.items()}
        results[f"{FAILURE}: {failure}"] = {"seconds": spread(every), "each": medians}
    for title, kinds in along.items():
        results[title] = {"note": f"grows with {_by(title)}^{exponent(kinds):.1f}", "points": kinds}
    return results


def exponent(kinds: dict[str, dict[int, list[float]]]) -> float:
    """Return the largest exponent between the smallest and the largest size.

    >>> exponent({"equal": {10: [1.0], 100: [100.0, 100.0]}, "random": {10: [1.0], 100: [10.0]}})
    2.0
    """
    found = []
    for points in kinds.values():
        small, large = min(points), max(points)
        rise = statistics.median(points[large]) / statistics.median(points[small])
        found.append(math.log(rise) / math.log(large / small))
    return max(found)


def _bars(times: Times, sizes: PlannerSizes) -> dict[str, Bar]:
    """Return the bars: the slowest kind of model, and of failures the median and the slowest kind."""

    def slowest(size: tuple[int, int]) -> float:
        return max(statistics.median(times[name]) for name in times if name.endswith(_size(*size)))

    failures = [1e3 * statistics.median(values) for name, values in times.items() if name.startswith(FAILURE)]
    return {
        f"templates, {_size(*sizes.published)}, s": Bar(value=slowest(sizes.published), bar=2.0, at_most=True),
        f"templates, {_size(*sizes.large)}, s": Bar(value=slowest(sizes.large), bar=30.0, at_most=True),
        f"{FAILURE}, ms": Bar(value=statistics.median(failures), bar=100.0, at_most=True),
        f"{FAILURE}, the slowest kind, ms": Bar(value=max(failures), bar=100.0, at_most=True),
    }


def _size(layers: int, nodes: int) -> str:
    return f"{layers} layers on {nodes}x{DEVICES}"


def _by(title: str) -> str:
    """Return the label of a panel's axis: the size that its title does not fix."""
    return "nodes" if "layers" in title else "layers"
