"""Copies of a layer sit on different hosts, whoever holds what; judged by trying every permutation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from holdfast.plan.hosts import EFFORT, AssignmentTask, spread
from holdfast.plan.layout import Layout, PlacedPipeline, side_by_side


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    hosts: Sequence[str]
    held: Sequence[set[int]]
    sizes: Sequence[int]
    barred: frozenset[int] = frozenset()

    @property
    def wanted(self) -> int:
        return min(len(self.layout.pipelines), self.layout.tolerate + 1)

    def spread(self) -> Layout:
        return spread(self.layout, hosts=self.hosts, held=self.held, sizes=self.sizes, barred=self.barred)


def ranks(layout: Layout) -> list[int]:
    return [rank for line in layout.pipelines for rank in line.ranks]


def with_ranks(layout: Layout, order: Sequence[int]) -> Layout:
    left = iter(order)
    return replace(
        layout, pipelines=tuple(replace(line, ranks=tuple(next(left) for _ in line.ranks)) for line in layout.pipelines)
    )


def is_spread(case: Case, layout: Layout) -> bool:
    every = (layout.holders(layer) for layer in range(layout.layers))
    return all(len({case.hosts[rank] for rank in holders}) >= case.wanted for holders in every)


def moved(case: Case, layout: Layout) -> int:
    pairs = [pair for line in layout.pipelines for pair in zip(line.ranks, line.layers, strict=True)]
    return sum(case.sizes[layer] for rank, layers in pairs for layer in layers if layer not in case.held[rank])


def fewest_bytes(case: Case) -> int | None:
    """Of all assignments that keep the rule; None if there is none."""
    allowed = [rank for rank in range(case.layout.size) if rank not in case.barred]
    tried = (with_ranks(case.layout, order) for order in itertools.permutations(allowed, len(ranks(case.layout))))
    return min((moved(case, layout) for layout in tried if is_spread(case, layout)), default=None)


def cut(rng: random.Random, layers: int, stages: int) -> tuple[range, ...]:
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    return tuple(itertools.starmap(range, itertools.pairwise(cuts)))


def some_case(rng: random.Random, size: int) -> Case:
    """Pipelines of different depths, hosts of different sizes, some workers with no place, any layers held."""
    layers = rng.randint(2, 5)
    depths = [rng.randint(1, 3)]
    while len(depths) < 2 or (rng.random() < 0.7 and len(depths) < 4):
        depths.append(rng.randint(1, 2))
    depths = [min(depth, layers) for depth in depths]
    while sum(depths) > size:
        depths[depths.index(max(depths))] -= 1
    taken = iter(rng.sample(range(size), sum(depths)))
    cuts = {depth: cut(rng, layers, depth) for depth in depths}
    lines = tuple(
        PlacedPipeline(ranks=tuple(next(taken) for _ in range(depth)), layers=cuts[depth]) for depth in depths
    )
    tolerate = rng.randint(1, len(lines) - 1)
    layout = Layout(pipelines=lines, size=size, layers=layers, tolerate=tolerate, minimum=1, reason="so")
    begins = [rng.randint(0, layers) for _ in range(size)]
    idle = [rank for rank in range(size) if rank not in ranks(layout)]
    return Case(
        layout=layout,
        hosts=[rng.choice("abcd"[: rng.randint(2, 4)]) for _ in range(size)],
        held=[set(range(begin, rng.randint(begin, layers))) for begin in begins],
        sizes=[rng.randint(0, 9) for _ in range(layers)],
        barred=frozenset(rng.sample(idle, rng.randint(0, len(idle)))),
    )


@pytest.mark.parametrize("size", [4, 5, 6])
def test_equal_to_trying_every_permutation(size: int) -> None:
    rng = random.Random(size)
    possible = already = 0
    for _ in range(120 if size < 6 else 40):
        case = some_case(rng, size)
        best, found = fewest_bytes(case), case.spread()
        assert not set(ranks(found)) & case.barred
        assert len(set(ranks(found))) == len(ranks(case.layout))
        if best is not None:
            assert is_spread(case, found), case
            assert moved(case, found) == best, case
            possible += 1
            already += is_spread(case, case.layout)
    assert possible - already >= 8, "otherwise doing nothing would nearly do"


def test_whatever_it_changes_only_ranks_change() -> None:
    rng = random.Random(1)
    for _ in range(50):
        case = some_case(rng, 6)
        found = case.spread()
        again = with_ranks(found, ranks(case.layout))
        assert replace(again, reason="so") == case.layout
        assert found.reason.startswith("so")
        assert (found.reason == "so") == (found == case.layout)


def pipelines(number: int, stages: int, *, tolerate: int, size: int = 0) -> Layout:
    layers = tuple(range(2 * stage, 2 * stage + 2) for stage in range(stages))
    lines = tuple(
        PlacedPipeline(ranks=tuple(range(n * stages, (n + 1) * stages)), layers=layers) for n in range(number)
    )
    size = max(size, number * stages)
    return Layout(pipelines=lines, size=size, layers=2 * stages, tolerate=tolerate, minimum=stages, reason="so")


def test_what_is_well_spread_stays() -> None:
    layout = pipelines(3, 2, tolerate=1)
    assert spread(layout, hosts="aabbcc", held=[()] * 6, sizes=[1] * 4) == layout


def test_a_worker_without_a_place_is_taken_in_for_its_host() -> None:
    layout = pipelines(2, 1, tolerate=1, size=4)
    found = spread(layout, hosts="aaab", held=[{0, 1}] * 4, sizes=[1] * 2)
    assert sorted(ranks(found)) == [0, 3]
    assert "1 worker" in found.reason
    assert "2 hosts" in found.reason
    alone = spread(layout, hosts="aaab", held=[{0, 1}] * 4, sizes=[1] * 2, barred=[3])
    assert ranks(alone) == [0, 1]
    assert "host a" in alone.reason


def test_what_cannot_be_spread_is_told() -> None:
    """Five workers on one host, one on the other: it can hold one stage of the three."""
    layout = pipelines(2, 3, tolerate=1)
    found = spread(layout, hosts="aaaaab", held=[()] * 6, sizes=[1, 1, 5, 5, 1, 1])
    assert {rank for layer in (2, 3) for rank in found.holders(layer)} & {5}, "the most bytes are on both"
    assert found.reason.endswith("all copies of layers 0, 1, 4, 5 are on one host")


def test_fewer_hosts_than_wanted_are_used_all() -> None:
    layout = pipelines(3, 2, tolerate=2)
    found = spread(layout, hosts="abaabb", held=[()] * 6, sizes=[1] * 4)
    assert all(len({"abaabb"[rank] for rank in found.holders(layer)}) == 2 for layer in range(4))


@pytest.mark.parametrize(
    ("layout", "hosts"),
    [(pipelines(2, 2, tolerate=0), "aabb"), (pipelines(1, 4, tolerate=1), "aabb"), (side_by_side(4, 1), "a")],
)
def test_nothing_to_spread(layout: Layout, hosts: str) -> None:
    assert spread(layout, hosts=hosts, held=[()] * layout.size, sizes=[1] * layout.layers) is layout


def test_huge_layers_are_weighed_alike() -> None:
    """Sums of bytes beyond what floating point counts exactly."""
    layout = pipelines(2, 2, tolerate=1)
    held = [{0, 1}, {2, 3}, {2, 3}, {0, 1}]
    found = spread(layout, hosts="abab", held=held, sizes=[2**60, 2**61, 2**60, 2**61])
    assert moved(Case(layout=layout, hosts="abab", held=held, sizes=[1] * 4), found) == 0


def mixed_up(rng: random.Random, *, size: int, stages: int, per_host: int) -> Case:
    """A layout from before, cut otherwise, on workers in any order, some of which are new."""
    layers = 48
    cuts = {depth: cut(rng, layers, depth) for depth in (stages, stages + 1)}
    order = rng.sample(range(size), size)
    lines = []
    while len(order) >= stages:
        depth = stages + (len(order) > stages and rng.random() < 0.5)
        lines.append(PlacedPipeline(ranks=tuple(order[:depth]), layers=cuts[depth]))
        del order[:depth]
    before = cut(rng, layers, rng.randint(2, 8))
    tolerate = min(2, len(lines) - 1)
    layout = Layout(pipelines=tuple(lines), size=size, layers=layers, tolerate=tolerate, minimum=stages, reason="so")
    return Case(
        layout=layout,
        hosts=[f"h{rank // per_host}" for rank in range(size)],
        held=[set(rng.choice([*before, range(0)])) for _ in range(size)],
        sizes=[rng.randint(1, 10**9) for _ in range(layers)],
    )


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("per_host", [4, 8, 16])
def test_sixty_four_workers_need_few_assignments(stages: int, per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for the search: it may try hundreds of assignments, and tries 8 at most here."""
    tried: list[Sequence[int]] = []
    real = AssignmentTask.assign
    monkeypatch.setattr(AssignmentTask, "assign", lambda task, domains: tried.append(domains) or real(task, domains))
    rng = random.Random(stages)
    for _ in range(5):
        case = mixed_up(rng, size=64, stages=stages, per_host=per_host)
        tried.clear()
        assert is_spread(case, case.spread())
        assert 1 <= len(tried) <= EFFORT // 10


@pytest.mark.parametrize("stages", [7, 8])
def test_every_pipeline_on_a_host_of_its_own_is_found(stages: int) -> None:
    """The tightest rule: four copies on four hosts. Bytes alone lead into dead ends here."""
    rng = random.Random(3)
    for _ in range(5):
        layout = pipelines(4, stages, tolerate=3, size=32)
        order = rng.sample(range(32), 4 * stages)
        held = [set(rng.choice([*layout.pipelines[0].layers, range(0)])) for _ in range(32)]
        sizes = [rng.randint(1, 10**9) for _ in range(2 * stages)]
        hosts = [f"h{rank // 8}" for rank in range(32)]
        case = Case(layout=with_ranks(layout, order), hosts=hosts, held=held, sizes=sizes)
        assert is_spread(case, case.spread())
