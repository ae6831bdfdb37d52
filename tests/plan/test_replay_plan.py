"""What is computed again against brute force, over random layouts, changes of layout, survivors and gaps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from holdfast.plan import replay_plan as module
from holdfast.plan.batch import shares
from holdfast.plan.layout import Layout, PlacedPipeline
from holdfast.plan.log_records import Direction, HeldRecords, Key, holdings_of
from holdfast.plan.replay_plan import Impossible, Replay, Situation, Sources, needed, plan_replay
from tests.plan.judge import examples

FORWARD, BACKWARD, TIE = Direction.FORWARD, Direction.BACKWARD, Direction.TIE


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss: the records that each worker has, by rank, and what it takes to judge."""

    layers: int
    step: int
    checkpoints: tuple[int, ...]
    counts: tuple[int, ...]  # micro-batches of each step
    ties: tuple[tuple[int, ...], ...]
    records: tuple[frozenset[Key], ...]  # of those who are left
    lost: frozenset[int]

    @property
    def situation(self) -> Situation:
        return Situation(
            layers=self.layers,
            lost=self.lost,
            step=self.step,
            checkpoints=self.checkpoints,
            micro_batches=self.counts.__getitem__,
            holdings=[holdings_of(keys) for keys in self.records],
            ties=self.ties,
        )

    @property
    def there(self) -> frozenset[Key]:
        return frozenset().union(*self.records)


# --- cases ---------------------------------------------------------------------------------------


def make_layout(rng: random.Random, layers: int, workers: int) -> Layout:
    """Pipelines of so many workers, each cut as it likes; some workers may have no place."""
    order = rng.sample(range(workers), workers)
    lines = []
    while order and (not lines or rng.random() < 0.6):
        stages = rng.randint(1, min(len(order), layers))
        cuts = sorted(rng.sample(range(1, layers), stages - 1))
        ends = itertools.pairwise([0, *cuts, layers])
        lines.append(PlacedPipeline(ranks=tuple(order[:stages]), layers=tuple(range(a, b) for a, b in ends)))
        order = order[stages:]
    return Layout(pipelines=tuple(lines), size=workers, layers=layers, tolerate=0, minimum=1, reason="")


def sent(layout: Layout, step: int, count: int, logged: set[int]) -> Iterator[tuple[int, Key]]:
    """Who has to keep what, of one step."""
    for line, share in zip(layout.pipelines, layout.shares(count), strict=True):
        for rank, layers in zip(line.ranks, line.layers, strict=True):
            for index in share:
                if layers.stop in logged and layers.stop < layout.layers:
                    yield rank, Key(step=step, boundary=layers.stop, micro_batch=index, direction=FORWARD)
                if layers.start in logged and layers.start > 0:
                    yield rank, Key(step=step, boundary=layers.start, micro_batch=index, direction=BACKWARD)


def tied(layout: Layout, step: int, logged: set[int], ties: Sequence[Sequence[int]]) -> Iterator[tuple[int, Key]]:
    for number, uses in enumerate(ties):
        if any(uses[0] < boundary <= uses[-1] for boundary in logged):
            for use in uses:
                for rank in layout.holders(use):
                    yield rank, Key(step=step, boundary=use, micro_batch=number, direction=TIE)


def make_case(seed: int) -> Case:
    """Faster than drawing each number by itself, and small enough to be read as it is."""
    rng = random.Random(seed)
    while True:
        layers, workers, step = rng.randint(2, 6), rng.randint(2, 6), rng.choice([0, 1, 2, 3, 4, 5])
        counts = tuple(rng.randint(1, 5) for _ in range(step))
        ties = tuple(tuple(sorted(rng.sample(range(layers), 2))) for _ in range(rng.choice([0, 0, 1, 2])))
        records: dict[int, set[Key]] = {rank: set() for rank in range(workers)}
        layout = make_layout(rng, layers, workers)
        for each in range(step):
            if rng.random() < 0.2:  # somebody came or went
                layout = make_layout(rng, layers, workers)
            cuts = {span.stop for line in layout.pipelines for span in line.layers}
            logged = cuts if rng.random() < 0.8 else {cut for cut in cuts if rng.random() < 0.5}
            for rank, key in [*sent(layout, each, counts[each], logged), *tied(layout, each, logged, ties)]:
                records[rank].add(key)
        left = [rank for rank in range(workers) if rng.random() < 0.6]
        held = {layer for rank in left if (role := layout.role(rank)) for layer in role.layers}
        if left and len(held) < layers:
            break
    kept = [records[rank] for rank in left]
    for keys in kept:  # a few may be gone, whyever
        if keys and rng.random() < 0.1:
            keys.discard(rng.choice(sorted(keys)))
    return Case(
        layers=layers,
        step=step,
        checkpoints=tuple(known for known in range(step + 2) if known == 0 or rng.random() < 0.2),
        counts=counts,
        ties=ties,
        records=tuple(frozenset(keys) for keys in kept),
        lost=frozenset(range(layers)) - held,
    )


cases = st.builds(make_case, st.integers(0, 10**9))


# --- the judge -----------------------------------------------------------------------------------


def is_closed(case: Case, layers: frozenset[int], first: int) -> bool:
    """Whether these layers can be computed again with nothing but records."""
    there = case.there
    for step in range(first, case.step):
        for layer in layers:
            for index in range(case.counts[step]):
                before = Key(step=step, boundary=layer, micro_batch=index, direction=FORWARD)
                behind = Key(step=step, boundary=layer + 1, micro_batch=index, direction=BACKWARD)
                if layer > 0 and layer - 1 not in layers and before not in there:
                    return False
                if layer + 1 < case.layers and layer + 1 not in layers and behind not in there:
                    return False
        for number, uses in enumerate(case.ties):
            missing = [use for use in uses if use not in layers]
            keys = [Key(step=step, boundary=use, micro_batch=number, direction=TIE) for use in missing]
            if layers & set(uses) and not there.issuperset(keys):
                return False
    return True


def smallest(case: Case, first: int) -> frozenset[int]:
    """Tries all sets of layers, the small ones first."""
    others = sorted(set(range(case.layers)) - case.lost)
    sizes = range(len(others) + 1)
    tried = (case.lost | set(more) for size in sizes for more in itertools.combinations(others, size))
    return next(layers for layers in tried if is_closed(case, layers, first))


def expected(case: Case) -> tuple[int, frozenset[int]] | None:
    for first in sorted(case.checkpoints, reverse=True):
        if first <= case.step:
            layers = smallest(case, first)
            if first == case.step or len(layers) < case.layers:
                return first, layers
    return None


def judge(case: Case) -> Replay | None:
    found, wanted = plan_replay(case.situation), expected(case)
    if wanted is None:
        assert isinstance(found, Impossible), f"{found}, but it is not possible"
        assert found.reason
        return None
    assert isinstance(found, Replay), f"{found}, but {wanted} would do"
    assert (found.first, found.stop, found.layers) == (wanted[0], case.step, set(wanted[1]))
    flat = [layer for span in found.spans for layer in span]
    assert flat == sorted(wanted[1])
    assert all(a.stop < b.start for a, b in itertools.pairwise(found.spans)), "neighbours are one span"
    return found


@given(cases)
@examples(200)
def test_the_smallest_set_of_layers_that_records_suffice_for(case: Case) -> None:
    found = judge(case)
    event("impossible" if found is None else "more than what is lost" if found.layers > case.lost else "what is lost")


@given(cases, st.integers(1, 5))
@examples(150)
def test_what_is_needed_is_there_and_asked_of_one_who_has_it(case: Case, workers: int) -> None:
    found = plan_replay(case.situation)
    if isinstance(found, Impossible):
        return
    sources = Sources([holdings_of(keys) for keys in case.records])
    for step in range(found.first, found.stop):
        asked: list[Key] = []
        for share in shares(case.counts[step], workers):
            keys = list(needed(found, step, share, layers=case.layers, ties=case.ties))
            assert len(set(keys)) == len(keys)
            asked += [key for key in keys if key.direction is not TIE]
            for key in keys:
                assert key.step == step
                assert key in case.records[sources.rank_of(key)]
        assert len(set(asked)) == len(asked), "each by one worker only"
        assert set(asked) == set(all_needed(case, found, step))


def all_needed(case: Case, found: Replay, step: int) -> Iterator[Key]:
    for index in range(case.counts[step]):
        for span in found.spans:
            if span.start:
                yield Key(step=step, boundary=span.start, micro_batch=index, direction=FORWARD)
            if span.stop < case.layers:
                yield Key(step=step, boundary=span.stop, micro_batch=index, direction=BACKWARD)


@given(cases)
@examples(50)
def test_holdings_say_what_is_there_and_nothing_else(case: Case) -> None:
    for keys in case.records:
        held = holdings_of(keys)
        for key in case.there | keys:
            assert any(each.has(key) for each in held) == (key in keys)
        assert [HeldRecords.from_json(each.to_json()) for each in held] == held


# --- by hand -------------------------------------------------------------------------------------


def kept(direction: Direction, boundary: int, *, first: int = 0, stop: int = 4, micro: int = 8) -> HeldRecords:
    return HeldRecords(direction=direction, boundary=boundary, first=first, stop=stop, micro_batches=((0, micro),))


SIX = Situation(
    layers=6, lost=[2, 3], step=4, checkpoints=[0], micro_batches=lambda step: 8,
    holdings=[[kept(FORWARD, 2)], [kept(BACKWARD, 4)]],
)  # fmt: skip


def test_only_what_is_lost() -> None:
    found = plan_replay(SIX)
    assert isinstance(found, Replay)
    assert found.spans == (range(2, 4),)


@pytest.mark.parametrize(
    ("holdings", "spans"),
    [
        ([[kept(FORWARD, 1)], [kept(BACKWARD, 4)]], (range(1, 4),)),
        ([[kept(FORWARD, 2, micro=7), kept(FORWARD, 1)], [kept(BACKWARD, 4)]], (range(1, 4),)),
        ([[kept(FORWARD, 2)], [kept(BACKWARD, 4, stop=3), kept(BACKWARD, 5)]], (range(2, 5),)),
        ([[kept(FORWARD, 2)]], (range(2, 6),)),
        ([[kept(BACKWARD, 4)]], (range(4),)),
        ([[kept(FORWARD, 2, stop=2), kept(BACKWARD, 4)], [kept(FORWARD, 2, first=2)]], (range(2, 4),)),
    ],
)
def test_where_a_record_is_missing_the_layers_beyond_are_computed_again(holdings, spans) -> None:
    found = plan_replay(replace(SIX, holdings=holdings, _whole={}))
    assert isinstance(found, Replay)
    assert found.spans == spans


def test_no_records_at_all_and_no_checkpoint() -> None:
    nothing = plan_replay(replace(SIX, holdings=[], _whole={}))
    assert isinstance(nothing, Impossible)
    assert "step 0" in nothing.reason
    for checkpoints in ([], [5]):
        nowhere = plan_replay(replace(SIX, checkpoints=checkpoints, _whole={}))
        assert isinstance(nowhere, Impossible)
        assert "no checkpoint" in nowhere.reason


def test_the_newest_checkpoint_for_which_it_is_possible() -> None:
    """The records of step 3 are gone, and with them what can be done from any checkpoint before it."""
    holdings = [[kept(FORWARD, 2, stop=3), kept(BACKWARD, 4, stop=3)]]
    for checkpoints, first in [([0, 3, 4], 4), ([0, 3, 5], None), ([0, 2, 3], None)]:
        found = plan_replay(replace(SIX, holdings=holdings, checkpoints=checkpoints, _whole={}))
        assert getattr(found, "first", None) == first
    older = plan_replay(replace(SIX, holdings=holdings, checkpoints=[0, 1, 4], step=3, _whole={}))
    assert isinstance(older, Replay)
    assert older.first == 1


def test_a_tie_without_its_record_brings_the_other_user() -> None:
    ties = [[2, 5]]
    alone = plan_replay(replace(SIX, ties=ties, holdings=[*SIX.holdings, [kept(TIE, 5, micro=1)]], _whole={}))
    assert isinstance(alone, Replay)
    assert alone.spans == (range(2, 4),)
    both = plan_replay(replace(SIX, ties=ties, holdings=[*SIX.holdings, [kept(FORWARD, 5)]], _whole={}))
    assert isinstance(both, Replay)
    assert both.spans == (range(2, 4), range(5, 6))


# --- controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["_closed", "_cover", "_spans"])
def test_control_the_judge_notices(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Growth that stops too early, gaps that are overlooked, spans that are torn."""
    wrong = {
        "_closed": lambda situation, first: set(situation.lost),
        "_cover": lambda spans, wanted: bool(spans),
        "_spans": lambda layers: tuple(range(layer, layer + 1) for layer in sorted(layers)),
    }
    monkeypatch.setattr(module, broken, wrong[broken])

    @given(cases)
    @settings(deadline=None, max_examples=2000, database=None, derandomize=True, phases=[Phase.generate])
    def check(case: Case) -> None:
        judge(case)

    with pytest.raises((AssertionError, ExceptionGroup)):
        check()
