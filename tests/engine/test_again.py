"""Layers that are computed again from records: weights and slots are those of the first time, to the bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.engine.again import Again
from holdfast.engine.engine import Engine
from holdfast.engine.pipe import read
from holdfast.engine.statistics import Statistics
from holdfast.engine.update import Terms
from holdfast.log.record import Message
from holdfast.plan.batch import shares
from holdfast.plan.layout import Layout
from holdfast.plan.log_records import Direction, Key
from tests.engine.between import BETWEEN
from tests.engine.memory_group import MemoryGroup, Network, on_workers
from tests.engine.norms import both
from tests.engine.pipelines import (
    WIDTH,
    Job,
    Layer,
    each_alone,
    lay,
    linear,
    mlp,
    numbers,
    one_step,
    same_bits,
    state_of,
    take_place,
)


@dataclass
class Book:
    """A log that copies nothing: who writes later into what was kept is found out."""

    records: dict[Key, Message] = field(default_factory=dict)
    terms: dict[int, Terms] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        self.records = {key: message for key, message in self.records.items() if key.step < step}

    def keep(self, key: Key, message: Message) -> None:
        assert key not in self.records, f"{key} is kept twice"
        self.records[key] = message

    def note(self, step: int, terms: Terms) -> None:
        self.terms[step] = terms


@dataclass(frozen=True, kw_only=True)
class Past:
    """What was trained: its state at the end, and what was kept of the way there."""

    state: dict[str, Tensor]
    records: dict[Key, Message]
    terms: dict[int, Terms]

    def find(self, key: Key) -> Any:
        """As it would have arrived: in memory of its own, for autograd may give it to a parameter as its gradient."""
        text, tensors = self.records[key]
        return read((text, [tensor.clone() for tensor in tensors]))

    def uses(self, number: int) -> set[int]:
        """The layers that share a weight."""
        return {key.boundary for key in self.records if key.direction is Direction.TIE and key.micro_batch == number}


def cuts_of(layout: Layout) -> set[int]:
    return {layers.start for line in layout.pipelines for layers in line.layers[1:]}


def live(job: Job, layout: Layout) -> Past:
    def work(group: MemoryGroup) -> tuple[dict[str, Tensor], Book]:
        engine, book = job.engine(), Book()
        engine.log = book
        take_place(engine, layout, group)
        engine.enter(layout, group, logged=cuts_of(layout))
        for step in range(job.steps):
            one_step(engine, group, step)
        return state_of(engine), book

    results = on_workers(layout.size, work)
    state = {name: tensor for tensors, _ in results for name, tensor in tensors.items()}
    records = {key: message for _, book in results for key, message in book.records.items()}
    return Past(state=state, records=records, terms=results[0][1].terms)


def bring_to(engine: Engine, step: int) -> None:
    """As a checkpoint of that step would."""
    group = MemoryGroup(0, Network(1))
    for each in range(step):
        one_step(engine, group, each)


def again(
    job: Job, past: Past, spans: Sequence[range], *, workers: int, first: int = 0, size: int | None = None
) -> list[tuple[dict[str, Tensor], Book]]:
    """What so many workers have after they have computed the spans' steps from ``first`` on once more."""
    layers = {layer for span in spans for layer in span}

    def work(group: MemoryGroup) -> tuple[dict[str, Tensor], Book]:
        engine, book = job.engine(), Book()
        bring_to(engine, first)
        engine.model.release(set(range(len(engine.model.layers))) - layers)
        once_more = Again(engine, group, spans, past.find, workers=workers, log=book)  # type: ignore[arg-type]
        idle = [range(0)] * (group.size - workers)
        for step in range(first, job.steps):
            once_more.attempt(step, shares(engine.order.micro_batches(step), workers) + idle)
            group.vote(torch.zeros(1))  # until then what was sent must stay as it is
            once_more.apply(step, past.terms[step])
        return state_of(engine), book

    return on_workers(size or workers, work)


def assert_as_before(
    job: Job, past: Past, spans: Sequence[range], *, workers: int, first: int = 0, size: int | None = None
) -> None:
    before = {key: (text, [tensor.clone() for tensor in tensors]) for key, (text, tensors) in past.records.items()}
    found = again(job, past, spans, workers=workers, first=first, size=size)
    for rank, (state, _) in enumerate(found[:workers]):
        assert state.keys() <= past.state.keys()
        wrong = [name for name in state if not same_bits(state[name], past.state[name])]
        assert not wrong, f"spans {spans}, {workers} workers, rank {rank}: {wrong}"
    held = {name for state, _ in found[:workers] for name in state}
    assert held, "nothing was computed"
    made = {key: message for _, book in found for key, message in book.records.items()}
    assert made.keys() == lost_records(past, spans, first)
    for key, message in [*made.items(), *past.records.items()]:
        assert_same_message(key, message, before[key])


def lost_records(past: Past, spans: Sequence[range], first: int) -> set[Key]:
    """What the spans had given their neighbours: it goes into the log once more."""
    ends = {end for span in spans for end in (span.start, span.stop)}
    inside = {layer for span in spans for layer in span}
    given = {(Direction.FORWARD, span.stop) for span in spans} | {(Direction.BACKWARD, span.start) for span in spans}

    def is_lost(key: Key) -> bool:
        if key.direction is not Direction.TIE:
            return (key.direction, key.boundary) in given
        uses = past.uses(key.micro_batch)  # those within one span always come together
        return key.boundary in inside and any(min(uses) < end <= max(uses) for end in ends)

    return {key for key in past.records if key.step >= first and is_lost(key)}


def assert_same_message(key: Key, found: Message, expected: Message) -> None:
    assert found[0] == expected[0], key
    assert len(found[1]) == len(expected[1]), key
    assert all(map(same_bits, found[1], expected[1])), f"{key} is not what it was"


def each_span(layers: int) -> list[list[range]]:
    return [[range(layer, layer + 1)] for layer in range(layers)]


# --- whatever goes between layers ----------------------------------------------------------------

# Ten of them; all with a long soak.
TYPICAL = ["dicts", "masks and integers", "changing shapes and numbers of tensors", "transposed", "written into"]
TYPICAL += ["returned as it came", "only some get a gradient", "parameters as values", "float64 and bfloat16"]
TYPICAL += ["some micro-batches give no gradient"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    soak = metafunc.config.getoption("--soak")
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", sorted(BETWEEN) if soak > 3 else TYPICAL)
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(4 * soak))


def test_each_layer_alone(name: str) -> None:
    job = BETWEEN[name]()
    layers = len(job.engine().model.layers)
    past = live(job, each_alone(layers))
    for number, spans in enumerate(each_span(layers)):
        if trains(job, spans):
            assert_as_before(job, past, spans, workers=1 + number % 3)


def trains(job: Job, spans: Sequence[range]) -> bool:
    model = job.engine().model
    return any(p.requires_grad for span in spans for layer in span for p in model.layers[layer].parameters())


def tied() -> list[nn.Module]:
    """The first, a middle and the last layer share a weight, two others another one."""
    layers = [linear() for _ in range(5)]
    layers[2].weight = layers[4].weight = layers[0].weight
    layers[3].weight = layers[1].weight
    return [*layers[:1], nn.Tanh(), *layers[1:], nn.Identity()]


TIED = Job(layers=tied, clip_norm=0.05, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1), steps=4)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_shared_weights(workers: int) -> None:
    past = live(TIED, each_alone(7))
    for spans in ([range(1)], [range(2, 3)], [range(5, 7)], [range(2), range(3, 4), range(5, 6)], [range(6)]):
        assert_as_before(TIED, past, spans, workers=workers)


def test_clipping_has_to_do_with_it() -> None:
    """The control of those who clip: gradients are longer than what they are clipped to."""
    norms = [terms.norm for terms in live(TIED, each_alone(7)).terms.values()]
    assert all(norm is not None and norm > 2 * 0.05 for norm in norms)


def test_some_workers_only_look_on() -> None:
    past = live(TIED, each_alone(7))
    assert_as_before(TIED, past, [range(2, 4)], workers=2, size=4)


def test_more_workers_than_micro_batches() -> None:
    past = live(TIED, each_alone(7))
    assert_as_before(TIED, past, [range(3, 6)], workers=6)


def whole_batch() -> list[nn.Module]:
    """Gradients of parameters that lie where the input's gradient lies: autograd gives both the same memory."""

    def shifted(x: Tensor, m: nn.Module) -> Tensor:
        return x + m.weight.view(2, WIDTH)

    flat = [nn.Linear(1, 2 * WIDTH, bias=False) for _ in range(3)]
    return [linear(), *(Layer(shifted, m) for m in flat), linear()]


def test_a_parameter_as_large_as_a_micro_batch() -> None:
    job = Job(layers=whole_batch, data=numbers(20), steps=3, clip_norm=0.1)
    past = live(job, each_alone(5))
    for spans in each_span(5):  # torch itself adds wrongly if two such layers are in one stage
        assert_as_before(job, past, spans, workers=2)


# --- random layouts, spans, workers and checkpoints ----------------------------------------------


def random_job(rng: random.Random) -> Job:
    optimizers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda ps: torch.optim.AdamW([{"params": ps[1::2], "lr": 0.02}, {"params": ps[::2]}], lr=0.05, amsgrad=True),
        lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    ]
    return Job(
        layers=rng.choice([mlp, tied]),
        optimizer=rng.choice(optimizers),
        clip_norm=rng.choice([None, 0.05]),
        data=numbers(rng.choice([13, 21])),
        global_batch=rng.choice([6, 10]),
        steps=rng.randint(1, 5),
    )


def random_layout(rng: random.Random, layers: int) -> Layout:
    """Pipelines with the same cuts, so that all records of a boundary are there."""
    stages, lines = rng.randint(2, 4), rng.randint(1, 2)
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    counts = [stop - start for start, stop in itertools.pairwise(cuts)]
    ranks = rng.sample(range(stages * lines), stages * lines)
    return lay(*((ranks[number::lines], counts) for number in range(lines)))


def test_random(seed: int) -> None:
    rng = random.Random(seed)
    job = random_job(rng)
    layout = random_layout(rng, len(job.engine().model.layers))
    past = live(job, layout)
    stages = list(layout.pipelines[0].layers)
    lost = sorted(rng.sample(stages, rng.randint(1, len(stages))), key=lambda layers: layers.start)
    spans: list[range] = []
    for layers in lost:
        joins = spans and spans[-1].stop == layers.start
        spans[-1:] = [range(spans[-1].start, layers.stop)] if joins else [*spans[-1:], layers]
    if trains(job, spans):
        assert_as_before(job, past, spans, workers=rng.randint(1, 4), first=rng.randrange(job.steps))


# --- controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sabotage", ["a bit of a record", "no norm", "another rate", "a step later", "no tie"])
def test_control_what_is_wrong_shows(sabotage: str) -> None:
    past = live(TIED, each_alone(7))
    spans, first = [range(2, 4)], 0
    records, terms = dict(past.records), dict(past.terms)
    if sabotage == "a bit of a record":
        key = Key(step=0, boundary=2, micro_batch=1, direction=Direction.FORWARD)
        text, (tensor,) = records[key]
        changed = tensor.clone()
        changed.view(torch.int32)[0, 0] ^= 1 << 12  # the lowest is rounded away on some processors
        records[key] = (text, [changed])
    if sabotage == "no tie":
        ties = [key for key in records if key.direction is Direction.TIE and key.boundary == 0]
        records |= {key: (records[key][0], [torch.zeros_like(records[key][1][0])]) for key in ties}
    if sabotage == "no norm":
        terms[1] = Terms(groups=terms[1].groups, norm=None)
    if sabotage == "another rate":
        terms[1] = Terms(groups=[{**group, "lr": 0.049} for group in terms[1].groups], norm=terms[1].norm)
    if sabotage == "a step later":
        first = 1
        past = replace(past, state=live(replace(TIED, steps=3), each_alone(7)).state)
    with pytest.raises(AssertionError, match="workers, rank 0"):
        assert_as_before(TIED, replace(past, records=records, terms=terms), spans, workers=2, first=first)


def test_control_records_that_somebody_writes_into_show() -> None:
    """A layer that keeps what it has given, and writes into it in the next step."""

    class Rude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()
            self.given: list[Tensor] = []

        def forward(self, x: Tensor) -> Any:
            for tensor in self.given:
                with torch.no_grad():
                    tensor.data.add_(1.0)
            self.given = [self.inner(x)]
            return self.given[0]

    job = Job(layers=lambda: [Rude(), linear(), linear()], exact=False)
    past = live(job, each_alone(3))
    with pytest.raises(AssertionError, match="workers, rank 0"):
        assert_as_before(job, past, [range(1, 2)], workers=1)


# --- statistics --------------------------------------------------------------------------------------

NORMS = Job(
    layers=lambda: [
        linear(),
        nn.BatchNorm1d(WIDTH),
        linear(),
        Layer(both, nn.BatchNorm1d(WIDTH, momentum=None)),
        linear(),
    ],
    data=numbers(32),
    global_batch=12,
    micro_batch=3,
    steps=4,
)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_running_statistics(workers: int) -> None:
    """Also from a step on at which they were saved, and with a worker that only watches."""
    past = live(NORMS, each_alone(5))
    for spans in ([range(1, 2)], [range(3, 4)], [range(1), range(3, 5)], [range(5)]):
        assert_as_before(NORMS, past, spans, workers=workers, size=workers + 1)
    assert_as_before(NORMS, past, [range(1, 4)], workers=workers, first=2)


def test_control_statistics_that_are_not_exchanged_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    past = live(NORMS, each_alone(5))
    monkeypatch.setattr(Statistics, "exchange", lambda *args: None)
    with pytest.raises(AssertionError, match="running_mean"):
        assert_as_before(NORMS, past, [range(1, 2)], workers=2)
