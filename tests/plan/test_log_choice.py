"""Which boundaries are logged: all without a limit, and within a budget no more than fits."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from holdfast.plan import log_choice as module
from holdfast.plan.layout import Layout, PlacedPipeline
from holdfast.plan.log_choice import LogChoice, Tie, choose_boundaries
from holdfast.plan.profile import Profile, uniform
from tests.plan import judge


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    profile: Profile
    micro_batches: int
    interval: int
    budget: int
    ties: tuple[Tie, ...] = ()

    def choose(self) -> LogChoice:
        return choose_boundaries(
            self.layout,
            profile=self.profile,
            micro_batches=self.micro_batches,
            interval=self.interval,
            budget=self.budget,
            ties=self.ties,
        )


def cuts(line: PlacedPipeline) -> set[int]:
    return {layers.start for layers in line.layers[1:]}


def make_line(rng: random.Random, ranks: list[int], layers: int) -> PlacedPipeline:
    ends = [0, *sorted(rng.sample(range(1, layers), len(ranks) - 1)), layers]
    return PlacedPipeline(ranks=tuple(ranks), layers=tuple(range(a, b) for a, b in itertools.pairwise(ends)))


def make_case(seed: int) -> Case:
    """One to three pipelines, some with cuts of their own; of different lengths, so that their shares differ."""
    rng = random.Random(seed)
    layers = rng.randint(3, 9)
    lines: list[PlacedPipeline] = []
    size = 0
    for _ in range(rng.choice([1, 1, 2, 3])):
        stages = rng.randint(1, min(5, layers))
        lines.append(make_line(rng, list(range(size, size + stages)), layers))
        if rng.random() < 0.5:  # as the one before
            lines[-1] = replace(lines[0], ranks=tuple(range(size, size + len(lines[0].ranks))))
        size += len(lines[-1].ranks)
    layout = Layout(pipelines=tuple(lines), size=size, layers=layers, tolerate=0, minimum=1, reason="")
    profile = judge.FAMILIES[rng.choice(sorted(judge.FAMILIES))](rng, layers)
    micro_batches, interval = rng.randint(1, 16), rng.choice([1, 2, 5, 50])
    uses = [tuple(sorted(rng.sample(range(layers), 2))) for _ in range(rng.choice([0, 0, 1, 2]))]
    ties = tuple(Tie(layers=layers, bytes=rng.randint(1, 10**7)) for layers in uses)
    everything = choose_boundaries(
        layout, profile=profile, micro_batches=micro_batches, interval=1, budget=None, ties=ties
    )
    budget = int(everything.bytes_per_step * interval * rng.choice([0.0, 0.1, 0.4, 0.7, 0.99, 1.0, 2.0])) + 1
    return Case(
        layout=layout, profile=profile, micro_batches=micro_batches, interval=interval, budget=budget, ties=ties
    )


cases = st.builds(make_case, st.integers(0, 10**9))


def crossing(case: Case, boundaries: frozenset[int]) -> int:
    """Bytes that cross these boundaries in a step, counted one by one."""
    total = 0
    for line, share in zip(case.layout.pipelines, case.layout.shares(case.micro_batches), strict=True):
        for _ in share:
            for cut in cuts(line) & boundaries:
                layer = case.profile.layers[cut - 1]
                total += layer.output_bytes + layer.output_gradient_bytes
    for tie in case.ties:
        if any(a < boundary <= b for a, b in itertools.combinations(tie.layers, 2) for boundary in boundaries):
            total += sum(tie.bytes for _ in tie.layers)
    return total


def check(case: Case) -> None:
    found = case.choose()
    busy = zip(case.layout.pipelines, case.layout.shares(case.micro_batches), strict=True)
    for line in [line for line, share in busy if share]:
        assert found.boundaries <= cuts(line), "one pipeline has no records there, so those of the others are of no use"
    assert found.bytes_per_step == crossing(case, found.boundaries)
    assert found.bytes_per_step * case.interval <= case.budget, "more than the budget"
    assert found.longest is None or found.longest >= case.interval
    assert found.reason


def test_shared_weights_that_fit_one_by_one_may_not_fit_together() -> None:
    check(make_case(1641891))


@given(cases)
@judge.examples(100)
def test_what_is_logged_fits_into_the_budget(case: Case) -> None:
    check(case)
    event(f"{len(case.layout.pipelines)} pipelines, {'some' if case.choose().boundaries else 'no'} boundaries")


@given(cases)
@judge.examples(50)
def test_more_budget_never_takes_longer_to_recover(case: Case) -> None:
    """And one that is large enough logs everything."""
    if len(case.layout.pipelines) > 1:
        return
    case = replace(case, ties=())
    everything = choose_boundaries(
        case.layout, profile=case.profile, micro_batches=case.micro_batches, interval=case.interval, budget=None
    )
    enough = replace(case, budget=everything.bytes_per_step * case.interval)
    seconds = [replay_seconds(each, each.choose()) for each in (case, enough) if each.budget <= enough.budget]
    assert seconds == sorted(seconds, reverse=True)


def replay_seconds(case: Case, found: LogChoice) -> float:
    """The expected time to replay a step, when each stage is as likely to be lost."""
    (line,) = case.layout.pipelines
    ends = [0, *sorted(found.boundaries), case.layout.layers]
    groups = [range(a, b) for a, b in itertools.pairwise(ends)]
    costs = case.profile.layers
    of_group = {group: sum(costs[layer].forward + costs[layer].backward for layer in group) for group in groups}
    lost = [next(group for group in groups if layers.start in group) for layers in line.layers]
    # Equal times differ in their last bits with the order of the sums.
    return round(sum(of_group[group] for group in lost) * case.micro_batches, 9)


def one_line(stages: int = 4, layers: int = 8) -> Layout:
    line = make_line(random.Random(0), list(range(stages)), layers)
    return Layout(pipelines=(line,), size=stages, layers=layers, tolerate=0, minimum=1, reason="")


def test_without_a_limit_all_cuts_are_logged() -> None:
    layout = one_line()
    for profile in (None, uniform(8)):
        found = choose_boundaries(layout, profile=profile, micro_batches=4, interval=10, budget=None)
        assert found.boundaries == cuts(layout.pipelines[0])
        assert found.longest is None


def test_a_cut_that_only_one_pipeline_has_is_not_logged() -> None:
    one = PlacedPipeline(ranks=(0, 1, 2), layers=(range(2), range(2, 5), range(5, 8)))
    other = PlacedPipeline(ranks=(3, 4), layers=(range(5), range(5, 8)))
    layout = Layout(pipelines=(one, other), size=5, layers=8, tolerate=1, minimum=1, reason="")
    for budget in (None, 10**15):
        found = choose_boundaries(layout, profile=uniform(8), micro_batches=4, interval=10, budget=budget)
        assert found.boundaries == {5}


def test_a_shared_weight_counts() -> None:
    tie = Tie(layers=(0, 7), bytes=100)
    sizes = [
        choose_boundaries(one_line(), profile=uniform(8), micro_batches=4, interval=1, budget=None, ties=ties)
        for ties in ([], [tie])
    ]
    assert sizes[1].bytes_per_step - sizes[0].bytes_per_step == 200


def test_one_stage_has_nothing_to_log() -> None:
    found = choose_boundaries(one_line(1), profile=uniform(8), micro_batches=4, interval=10, budget=1000)
    assert not found.boundaries


def test_a_budget_of_nothing_logs_nothing() -> None:
    found = choose_boundaries(one_line(), profile=uniform(8), micro_batches=4, interval=10, budget=1)
    assert (found.boundaries, found.bytes_per_step, found.longest) == (frozenset(), 0, None)


def test_control_a_choice_beyond_the_budget_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.choose_groups
    monkeypatch.setattr(module, "choose_groups", lambda *, budget, **rest: real(budget=2 * budget, **rest))
    alone = [case for case in map(make_case, range(200)) if len(case.layout.pipelines) == 1]
    with pytest.raises(AssertionError, match="more than the budget"):
        list(map(check, alone))
