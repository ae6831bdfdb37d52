"""The variance between replicas, from sketches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sync import replica_variance as module
from holdfast.sync.replica_variance import BUCKETS, ReplicaVariance, Sketch

SHAPES = ((64, 128), (128,), (300, 40), ())


def random_parameters(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source) * scale for shape in SHAPES]


def estimate(replicas: list[list[torch.Tensor]]) -> float:
    """The variance that replicas compute together, after a synchronisation at the first one's parameters."""
    signals = [ReplicaVariance(delta=None) for _ in replicas]
    for signal in signals:
        signal.synchronised(replicas[0])
    ballots = [signal.measure(each) for signal, each in zip(signals, replicas, strict=True)]
    sums = [math.fsum(column) for column in zip(*ballots, strict=True)]
    return signals[0].read(sums, len(replicas))


def true_variance(replicas: list[list[torch.Tensor]]) -> float:
    flat = torch.stack([torch.cat([each.reshape(-1) for each in replica]) for replica in replicas]).double()
    return float((flat - flat.mean(0)).square().sum(1).mean() / flat[0].square().sum())


def apart(count: int, seed: int, by: float) -> list[list[torch.Tensor]]:
    """Replicas that went a long way together and a short one each by itself."""
    start, together = random_parameters(1), random_parameters(2, 0.3)
    own = [random_parameters(1000 * seed + 100 + rank, by) for rank in range(count)]
    return [[s + t + o for s, t, o in zip(start, together, each, strict=True)] for each in own]


@pytest.mark.parametrize("by", [1e-3, 0.1])
def test_the_estimate_is_near(by: float) -> None:
    ratios = []
    for seed in range(20):
        replicas = apart(4, seed, by)
        ratios.append(estimate(replicas) / true_variance(replicas))
    assert statistics.mean(ratios) == pytest.approx(1, abs=0.1)
    assert statistics.stdev(ratios) < 0.25  # sqrt(2 / 61 / 3) = 0.1 in theory


def test_negative_control_fdas_own_estimate_is_lost_in_the_common_way() -> None:
    """An estimate from lengths and one sketch of the mean misses small differences after a long common way."""
    errors = []
    for seed in range(10):
        replicas = apart(4, seed, 1e-2)
        start = random_parameters(1)
        ways = [[p - s for p, s in zip(replica, start, strict=True)] for replica in replicas]
        squares = statistics.mean(sum(float(w.double().square().sum()) for w in way) for way in ways)
        mean = [statistics.mean(column) for column in zip(*map(Sketch(), ways), strict=True)]
        length = sum(float(s.double().square().sum()) for s in start)
        errors.append((squares - sum(x * x for x in mean)) / length / true_variance(replicas) - 1)
    assert max(map(abs, errors)) > 3


def test_low_rank_differences_too() -> None:
    """Gradients are near to low rank; signs that are a product of row and column signs would fail here."""
    ratios = []
    for seed in range(20):
        source = torch.Generator().manual_seed(seed)
        start = torch.randn(256, 128, generator=source)
        replicas = [
            [start + 0.01 * torch.outer(torch.randn(256, generator=source), torch.randn(128, generator=source))]
            for _ in range(2)
        ]
        ratios.append(estimate(replicas) / true_variance(replicas))
    assert statistics.mean(ratios) == pytest.approx(1, abs=0.15)
    assert statistics.stdev(ratios) < 0.4


def test_equal_replicas_are_not_apart() -> None:
    for count in (1, 2, 3, 7):
        assert estimate([random_parameters(0)] * count) == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(-2, 2), st.floats(-2, 2))
def test_a_sketch_is_linear(seed: int, a: float, b: float) -> None:
    sketch, x, y = Sketch(), random_parameters(seed), random_parameters(seed + 1)
    both = sketch([a * p + b * q for p, q in zip(x, y, strict=True)])
    parts = [a * p + b * q for p, q in zip(sketch(x), sketch(y), strict=True)]
    assert both == pytest.approx(parts, abs=1e-3)


def test_a_model_of_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signs are used again, at other buckets: equal batches must not add up in step."""
    monkeypatch.setattr(module, "ROOM", BUCKETS * 4)
    vector = torch.randn(BUCKETS * 4, generator=torch.Generator().manual_seed(0))
    length = sum(x * x for x in Sketch()([vector] * 20))
    assert length < 3 * 20 * float(vector.square().sum())  # in step it would be 400 times one
    cut = Sketch()([torch.cat([vector] * 20)])
    assert cut == pytest.approx(Sketch()([vector] * 20))


def test_any_precision_and_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.randn(100))
    assert Sketch()([weight.bfloat16()]) == pytest.approx(Sketch()([weight]), abs=0.1)
    assert Sketch()([torch.view_as_complex(weight.view(50, 2))]) == Sketch()([weight])
    assert Sketch()([weight.view(10, 10).t()]) == Sketch()([weight.view(10, 10).t().contiguous()])
    assert Sketch()([]) == [0.0] * BUCKETS


def test_what_is_not_finite_is_nan() -> None:
    for bad in (math.nan, math.inf):
        replicas = [random_parameters(0), random_parameters(0)]
        replicas[1][1][3] = bad
        signal = ReplicaVariance(delta=1.0)
        signal.synchronised(random_parameters(0))
        sums = [a + b for a, b in zip(*map(signal.measure, replicas), strict=True)]
        assert math.isnan(signal.read(sums, 2))
        assert signal.over(sums, 2) is None


def test_the_scale_is_the_length_at_the_last_synchronisation() -> None:
    near = [[p * 100 for p in replica] for replica in apart(2, 0, 0.01)]
    assert estimate(near) == pytest.approx(estimate(apart(2, 0, 0.01)), rel=1e-3)
    signal, other = ReplicaVariance(delta=1.0), ReplicaVariance(delta=1.0)
    signal.synchronised(random_parameters(3))
    other.load(signal.state())
    assert other.measure(random_parameters(0)) == signal.measure(random_parameters(0))


@pytest.mark.parametrize("lying", [torch.Tensor.contiguous, torch.Tensor.t])
def test_what_was_measured_before_is_not_measured_again(lying: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Views are kept from one time to the next; what they show must be the parameters as they are now."""
    weight = lying(torch.ones(80, 80))
    variance = ReplicaVariance(delta=None)
    before = variance.measure([weight])
    weight.mul_(2)
    assert variance.measure([weight])[2:] == pytest.approx([2 * number for number in before[2:]])
    other = weight.clone() * 2
    assert variance.measure([other])[2:] == pytest.approx([4 * number for number in before[2:]])


def test_a_quarter_of_large_tensors_tells_of_all() -> None:
    generator = torch.Generator().manual_seed(3)
    replicas = [[torch.randn(300, 300, generator=generator), torch.randn(50, generator=generator)] for _ in range(4)]
    found = [ReplicaVariance(delta=None).measure(replica) for replica in replicas]
    sums = [math.fsum(column) for column in zip(*found, strict=True)]
    signal = ReplicaVariance(delta=None)
    true = sum(float(torch.stack(same).var(0, correction=0).sum()) for same in zip(*replicas, strict=True))
    assert signal.read(sums, 4) == pytest.approx(true, rel=0.5)
