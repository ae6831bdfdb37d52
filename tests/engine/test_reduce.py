"""The reduction over workers: exact means the bits of one worker, fast means close to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.cluster.team import ALONE
from holdfast.engine import exchanges
from holdfast.engine.exchanges import slices
from holdfast.engine.gradients import make_buckets
from holdfast.engine.reduce import Reduction
from holdfast.errors import Broken
from holdfast.plan.batch import shares
from tests.engine.memory_group import on_workers

SHAPES = [(3, 5), (7,), (1,), (), (2, 2)]
UNUSED = 1  # this parameter's hook never fires
LIMIT = 64  # bytes: several buckets, one of them smaller than the number of workers

Gradients = list[list[torch.Tensor]]


@pytest.fixture(params=["directly", "by halves"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which holders exchange their sums."""
    monkeypatch.setattr(exchanges, "DIRECT_HOLDERS", 99 if request.param == "directly" else 1)
    return request.param


def gradients(micro_batches: int, seed: int = 0) -> Gradients:
    """Of very different sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...]) -> torch.Tensor:
        exponents = torch.randint(-10, 10, shape, generator=generator)
        return torch.randn(shape, generator=generator) * 2.0**exponents

    return [[one(shape) for shape in SHAPES] for _ in range(micro_batches)]


class Worker:
    """Parameters and buckets of one worker, from attempt to attempt."""

    def __init__(self, workers: int) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.buckets = make_buckets([(tuple(range(workers)), self.parameters)], LIMIT)

    def regroup(self, workers: int) -> None:
        """As the engine does it: memory that is there already serves again."""
        for bucket in self.buckets:
            bucket.ranks = tuple(range(workers))

    def position_of(self, p: nn.Parameter) -> int:
        return next(i for i, b in enumerate(self.buckets) if any(q is p for q in b.parameters))

    def attempt(self, group: Any, leaves: Gradients, *, exact: bool) -> list[torch.Tensor]:
        reduction = Reduction(self.buckets, group, shares(len(leaves), group.size), exact=exact)
        try:
            for index in reduction.share:
                last = index == reduction.share[-1]
                reduction.before(index)
                for number, p in reversed(list(enumerate(self.parameters))):
                    leaf = leaves[index][number]
                    p.grad = leaf.clone() if p.grad is None else p.grad.add_(leaf)  # as autograd does
                    if last and number != UNUSED:
                        reduction.gradient_ready(self.position_of(p))
                if not last:
                    reduction.after(index)
            reduction.flush()
            reduction.finish()
            group.vote(torch.zeros(1))
            return [p.grad.clone() for p in self.parameters if p.grad is not None]
        finally:
            reduction.release()


def reduced(workers: int, leaves: Gradients, *, exact: bool) -> list[list[torch.Tensor]]:
    """Each worker's result of its second attempt: the first leaves used slabs behind."""

    def work(group: Any) -> list[torch.Tensor]:
        worker = Worker(group.size)
        worker.attempt(group, gradients(len(leaves), seed=99), exact=exact)
        return worker.attempt(group, leaves, exact=exact)

    return on_workers(workers, work)


def tree_of(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return tree_of(values[:half]) + tree_of(values[half:])


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("micro_batches", range(1, 10))
def test_exact_sums_are_those_of_the_tree_on_any_number_of_workers(micro_batches: int) -> None:
    leaves = gradients(micro_batches)
    expected = [tree_of([leaf[number] for leaf in leaves]) for number in range(len(SHAPES))]
    for workers in (1, 2, 3, 4, 5, 7, 8, 11):
        for result in reduced(workers, leaves, exact=True):
            assert same_bits(result, expected), f"{workers} workers"


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 9])
def test_fast_sums_are_close_and_the_same_on_every_worker(micro_batches: int) -> None:
    leaves = gradients(micro_batches)
    expected = [sum(leaf[number].double() for leaf in leaves).float() for number in range(len(SHAPES))]
    for workers in range(1, 6):
        results = reduced(workers, leaves, exact=False)
        assert all(same_bits(result, results[0]) for result in results)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(results[0], expected, strict=True))


def test_fast_sums_do_depend_on_the_workers() -> None:
    """The control: the gradients are such that another order of additions shows."""
    leaves = gradients(9)
    assert not same_bits(reduced(1, leaves, exact=False)[0], reduced(4, leaves, exact=False)[0])


@pytest.mark.parametrize("exact", [True, False])
def test_attempts_need_no_more_memory_than_the_first(exact: bool) -> None:
    def work(group: Any) -> tuple[list[int], list[int]]:
        worker, leaves = Worker(group.size), gradients(7)
        counts = []
        for _ in range(2):
            worker.attempt(group, leaves, exact=exact)
            counts.append([len(b.free) for b in worker.buckets])
        assert all(len({id(s) for s in b.free}) == len(b.free) for b in worker.buckets), "a slab is twice in the pool"
        assert all(p.grad is None for p in worker.parameters)
        return counts[0], counts[1]

    for first, second in on_workers(3, work):
        assert first == second


class BreakingGroup:
    """Two workers, one of which is lost after so many transfers."""

    rank, size, team = 0, 2, ALONE

    def __init__(self, transfers: int) -> None:
        self.left = transfers

    def check(self) -> None: ...

    def start(self, sends: Any, receives: Any) -> list[Any]:
        self.left -= 1
        if self.left < 0:
            raise Broken("lost")
        return []

    def finish(self, works: Any) -> None:
        if self.left <= 1:
            raise Broken("lost")


@pytest.mark.parametrize("transfers", range(4))
@pytest.mark.parametrize("exact", [True, False])
def test_an_attempt_that_breaks_leaves_no_trace_in_the_next(transfers: int, exact: bool) -> None:
    worker, leaves = Worker(2), gradients(7)
    (clean,) = reduced(1, leaves, exact=exact)
    with pytest.raises(Broken):
        worker.attempt(BreakingGroup(transfers), leaves, exact=exact)
    assert all(p.grad is None for p in worker.parameters)
    worker.regroup(1)
    (result,) = on_workers(1, lambda group: worker.attempt(group, leaves, exact=exact))
    assert same_bits(result, clean)


# --- pipelines: each bucket among the workers that hold its layers --------------------------------------

Lines = list[list[tuple[int, list[int]]]]  # of each pipeline: its workers, and the parameters of each
LINES: dict[str, Lines] = {
    "two stages beside one": [[(2, [0, 1]), (1, [2, 3, 4])], [(0, [0, 1, 2, 3, 4])]],
    "cut at different places": [[(3, [0]), (0, [1, 2, 3, 4])], [(1, [0, 1, 2, 3]), (2, [4])]],
    "three pipelines": [[(4, [0, 1, 2]), (3, [3, 4])], [(2, [0, 1, 2, 3, 4])], [(0, [0]), (5, [1, 2]), (1, [3, 4])]],
}


def summed_in_pipelines(
    lines: Lines, leaves: Gradients, *, exact: bool, by_rank: bool = False
) -> list[dict[int, torch.Tensor]]:
    """What each worker has for its parameters; ``by_rank`` is the control: holders in the wrong order."""
    workers = sum(len(line) for line in lines)
    parts = shares(len(leaves), len(lines))
    share_of = {rank: parts[number] for number, line in enumerate(lines) for rank, _ in line}

    def work(group: Any) -> dict[int, torch.Tensor]:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        groups = []
        for number, p in enumerate(parameters):
            ranks = tuple(rank for line in lines for rank, held in line if number in held)
            groups.append((tuple(sorted(ranks)) if by_rank else ranks, [p]))
        buckets = [bucket for bucket in make_buckets(groups) if group.rank in bucket.ranks]
        mine = {number: p for number, p in enumerate(parameters) if any(p is b.parameters[0] for b in buckets)}
        reduction = Reduction(buckets, group, [share_of[rank] for rank in range(workers)], exact=exact)
        for index in reduction.share:
            reduction.before(index)
            for number, p in reversed(mine.items()):
                leaf = leaves[index][number]
                p.grad = leaf.clone() if p.grad is None else p.grad.add_(leaf)
            if index != reduction.share[-1]:
                reduction.after(index)
        reduction.flush()
        reduction.finish()
        group.vote(torch.zeros(1))
        found = {number: p.grad.clone() for number, p in mine.items()}
        reduction.release()
        return found

    return on_workers(workers, work)


@pytest.mark.parametrize("lines", LINES)
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
def test_in_pipelines_every_holder_gets_the_sum_of_the_tree(lines: str, micro_batches: int) -> None:
    leaves = gradients(micro_batches)
    expected = [tree_of([leaf[number] for leaf in leaves]) for number in range(len(SHAPES))]
    for rank, result in enumerate(summed_in_pipelines(LINES[lines], leaves, exact=True)):
        held = next(numbers for line in LINES[lines] for each, numbers in line if each == rank)
        assert list(result) == held
        assert all(torch.equal(value, expected[number]) for number, value in result.items())


@pytest.mark.parametrize("lines", LINES)
def test_in_pipelines_fast_sums_are_the_same_for_all_holders(lines: str) -> None:
    leaves = gradients(8)
    found: dict[int, torch.Tensor] = {}
    for result in summed_in_pipelines(LINES[lines], leaves, exact=False):
        for number, value in result.items():
            assert torch.equal(found.setdefault(number, value), value)
            whole = sum(leaf[number].double() for leaf in leaves).float()
            assert torch.allclose(value, whole, rtol=1e-4, atol=1e-3)


def test_holders_may_stand_in_another_order_than_their_micro_batches() -> None:
    lines, leaves = LINES["three pipelines"], gradients(7)
    for one, other in zip(
        summed_in_pipelines(lines, leaves, exact=True),
        summed_in_pipelines(lines, leaves, exact=True, by_rank=True),
        strict=True,
    ):
        assert all(torch.equal(one[number], other[number]) for number in one)


def test_control_sums_that_do_not_follow_the_tree_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two holders have is added as it comes, and counts as the node above."""

    def add_as_it_comes(parts: Any, leaves: int, add: Any) -> list[Any]:
        (node, total), *rest = list(parts)[::-1]
        for _, value in rest:
            total = add(total, value)
        return [(node, total)]

    leaves = gradients(9)
    expected = reduced(1, leaves, exact=True)[0]
    monkeypatch.setattr(exchanges, "combine", add_as_it_comes)
    assert not same_bits(reduced(2, leaves, exact=True)[0], expected)


def test_micro_batches_that_are_nobodys_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shares

    def with_a_gap(count: int, workers: int) -> list[range]:
        found = whole(count, workers)
        return [range(found[0].stop, found[0].stop), *found[1:]]

    monkeypatch.setattr("tests.engine.test_reduce.shares", with_a_gap)
    with pytest.raises(AssertionError, match="each once"):
        reduced(3, gradients(6), exact=True)


def test_slices_are_consecutive_and_complete() -> None:
    for size in range(12):
        for owners in range(1, 6):
            found = [i for part in slices(size, owners) for i in range(part.start, part.stop)]
            assert found == list(range(size))
