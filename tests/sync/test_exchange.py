"""Averaging and ballots: the same bits everywhere, memory that is left alone, and no waiting for sends."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.group import Group, alone
from holdfast.sync import exchange
from holdfast.sync.exchange import Averaging, Ballots
from holdfast.sync.packed import Packed
from holdfast.sync.peers import Peers
from tests.engine.memory_group import Lost, MemoryGroup, Network, on_workers


def values(rank: int, *sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def mean_of(rows: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    """The definition, number by number."""
    counted = [(row, share) for row, share in zip(rows, shares, strict=True) if share]
    first = counted[0][0]
    total = first.clone()
    for row, share in counted[1:]:
        total = total + (row - first) * share
    return total


def test_a_group_is_a_peer() -> None:
    group: Group = alone()
    peers: Peers = group
    assert Averaging(peers, [torch.ones(3)]).finish()[0].tolist() == [1, 1, 1]


# --- Packed ---------------------------------------------------------------------------------------


def test_packed_reads_and_writes_all_shapes_and_kinds() -> None:
    tensors = [
        torch.arange(6.0).view(2, 3).t(),  # not contiguous
        torch.tensor(7.0, dtype=torch.float64),
        torch.tensor([1 + 2j]),
        torch.empty(0),
        torch.nn.Parameter(torch.ones(2)),
    ]
    packed = Packed(tensors)
    before = [tensor.detach().clone() for tensor in tensors]
    buffers = packed.read()
    assert [buffer.dtype for buffer in buffers] == [torch.float32, torch.float64]
    assert packed.nbytes == (6 + 2 + 2) * 4 + 8
    packed.add(buffers)
    assert all(torch.equal(tensor, 2 * old) for tensor, old in zip(tensors, before, strict=True))
    packed.write(buffers)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    buffers[0].zero_()
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True)), "memory of its own"


def test_one_tensor_is_copied_too() -> None:
    tensor = torch.ones(3)
    Packed([tensor]).read()[0].zero_()
    assert tensor.tolist() == [1, 1, 1]


# --- Averaging ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    workers=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 40), max_size=3),
    bucket=st.sampled_from([4, 16, 1 << 20]),
    beside=st.booleans(),
    data=st.data(),
)
def test_the_mean_is_the_same_bits_everywhere(
    workers: int, sizes: list[int], bucket: int, beside: bool, data: st.DataObject
) -> None:
    shares = data.draw(
        st.none() | st.lists(st.sampled_from([0.0, 0.25, 0.6]), min_size=workers, max_size=workers).filter(any)
    )
    inputs = [values(rank, *sizes) for rank in range(workers)]

    def work(group: MemoryGroup) -> list[torch.Tensor]:
        averaging = Averaging(group, [x.clone() for x in inputs[group.rank]], shares, beside=beside)
        assert beside or not averaging.done or workers == 1
        means = averaging.finish()
        group.vote(torch.zeros(1))
        assert averaging.done
        return means

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "BUCKET_BYTES", bucket)
        results = on_workers(workers, work)
    weights = shares or [1 / workers] * workers
    for place in range(len(sizes)):
        wanted = (
            inputs[0][place] if workers == 1 else mean_of([inputs[rank][place] for rank in range(workers)], weights)
        )
        for result in results:
            assert torch.equal(result[place], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equal_replicas_stay_exactly_as_they_are(dtype: torch.dtype) -> None:
    same = values(7, 1001, dtype=dtype)
    results = on_workers(3, lambda group: Averaging(group, [same[0].clone()]).finish())
    assert all(torch.equal(result[0], same[0]) for result in results)
    plain = (same[0] + same[0] + same[0]) / 3
    assert dtype == torch.float64 or not torch.equal(plain, same[0]), "which is not what adding and dividing does"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_numbers_that_all_have_stay(dtype: torch.dtype) -> None:
    """An attention mask is one: -inf - -inf is nan. Where not all are equal, the mean is none and may be nan."""
    rows = [torch.tensor([-torch.inf, torch.inf, torch.inf, 1.0, torch.nan, x], dtype=dtype) for x in (1.0, 3.0, 2.0)]
    rows[1][2] = 0
    for mean in on_workers(3, lambda group: Averaging(group, [rows[group.rank].clone()]).finish()[0]):
        assert mean[[0, 1, 3, 5]].tolist() == [-torch.inf, torch.inf, 1.0, 2.0]
        assert not mean[[2, 4]].isfinite().any()


def test_small_floats_are_averaged_in_wide_ones() -> None:
    rows = [torch.tensor([1.0]), torch.tensor([1.0 + 2**-7]), torch.tensor([1.0 + 2**-7])]
    results = on_workers(3, lambda group: Averaging(group, [rows[group.rank].bfloat16()]).finish()[0])
    assert [float(result) for result in results] == [float(torch.cat(rows).mean().bfloat16())] * 3


def test_who_has_no_share_sends_no_values() -> None:
    def work(group: MemoryGroup) -> tuple[float, int]:
        averaging = Averaging(group, [torch.full((100,), float(group.rank))], [0.0, 0.0, 0.5, 0.5])
        return float(averaging.finish()[0].mean()), averaging.sent

    results = on_workers(4, work)
    assert [mean for mean, _ in results] == [2.5] * 4
    assert [sent for _, sent in results] == [300, 300, 600, 600]


def test_sent_is_what_travels() -> None:
    network = Network(3)

    def work(group: MemoryGroup) -> int:
        averaging = Averaging(group, values(group.rank, 1000, 2))
        averaging.finish()
        return averaging.sent

    assert sum(on_workers(3, work, network)) == network.bytes == 2 * 2 * 1002 * 4


def test_training_goes_on_beside_it() -> None:
    """Nobody waits in the constructor, and what was read before is what is averaged."""
    begun = threading.Barrier(2)

    def work(group: MemoryGroup) -> float:
        parameter = torch.full((10,), float(group.rank))
        packed = Packed([parameter])
        since = packed.read()
        averaging = Averaging(group, since)
        parameter += 100
        begun.wait(10)
        mean = averaging.finish()
        packed.add([m - s for m, s in zip(mean, since, strict=True)])
        return float(parameter.mean())

    assert on_workers(2, work) == [100.5, 100.5]


def test_a_negative_control_that_values_must_be_left_alone() -> None:
    """Sent memory is read late: if training still wrote to it, the mean would be another."""

    def work(group: MemoryGroup) -> float:
        parameter = torch.full((10,), float(group.rank))
        if group.rank == 1:
            gate.wait(10)
        averaging = Averaging(group, [parameter])
        if group.rank == 0:
            parameter += 100
            gate.wait(10)
        return float(averaging.finish()[0].mean())

    gate = threading.Barrier(2)
    assert on_workers(2, work) == [50.5, 50.5]


def test_a_failure_is_raised_in_finish_and_nobody_hangs() -> None:
    network = Network(2)

    def work(group: MemoryGroup) -> Any:
        if group.rank == 1:
            network.fail()
            return None
        averaging = Averaging(group, values(0, 100))
        with pytest.raises(Lost):
            averaging.finish()
        averaging.abandon()
        assert averaging.done
        return None

    on_workers(2, work, network)


# --- Ballots --------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(workers=st.integers(1, 4), delay=st.integers(0, 2), drops=st.sets(st.integers(0, 9)))
def test_ballots_are_added_up_alike(workers: int, delay: int, drops: set[int]) -> None:
    def numbers(rank: int, step: int) -> list[float]:
        return [random.Random(f"{rank} {step}").random(), float(rank)]

    def work(group: MemoryGroup) -> dict[int, list[float]]:
        ballots, sums, first = Ballots(group), {}, 0
        for step in range(10):
            ballots.cast(step, numbers(group.rank, step))
            if step - delay >= first:
                sums[step - delay] = ballots.sums(step - delay)
            if step in drops:
                ballots.drop()
                first = step + 1
        ballots.drop()
        assert ballots.sent == 10 * 3 * 8 * (workers - 1)
        return sums

    results = on_workers(workers, work)
    assert all(result == results[0] for result in results)
    for step, sums in results[0].items():
        wanted = 0.0
        for rank in range(workers):
            wanted += numbers(rank, step)[0]
        assert sums == [wanted, sum(range(workers))]


def test_sends_are_kept_no_longer_than_needed() -> None:
    def work(group: MemoryGroup) -> int:
        ballots = Ballots(group)
        most = 0
        for step in range(50):
            ballots.cast(step, [1.0])
            if step:
                ballots.sums(step - 1)
            most = max(most, len(ballots._kept))
        ballots.drop()
        assert not ballots._kept
        return most

    assert max(on_workers(3, work)) <= 4


def test_ballots_are_asked_for_in_order() -> None:
    ballots = Ballots(alone())
    ballots.cast(3, [1.0])
    with pytest.raises(AssertionError, match="step 3 come before those of step 4"):
        ballots.sums(4)
