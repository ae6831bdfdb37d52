"""The smoothed relative change of the gradient's size, as published."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.sync.gradient_change import SMOOTHING, GradientChange, SmoothedChange, smoothed, squared_norm


def with_gradient(*values: float) -> torch.Tensor:
    weight = torch.zeros(len(values), requires_grad=True)
    weight.grad = torch.tensor(values)
    return weight


def test_squared_norm_of_many() -> None:
    weights = [torch.randn(shape, requires_grad=True) for shape in ((3, 4), (5,), ())]
    sum((weight**3).sum() for weight in weights).backward()  # type: ignore[union-attr]
    expected = sum(float(weight.grad.double().square().sum()) for weight in weights if weight.grad is not None)
    assert squared_norm(weights) == pytest.approx(expected, rel=1e-6)


def test_squared_norm_of_odd_ones() -> None:
    assert squared_norm([torch.zeros(2, requires_grad=True)]) == 0
    assert squared_norm([with_gradient(1e30)]) == pytest.approx(1e60)  # infinite in single precision
    assert math.isnan(squared_norm([with_gradient(math.nan), with_gradient(1.0)]))
    double = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    double.grad = torch.tensor([2.0], dtype=torch.float64)
    assert squared_norm([with_gradient(1.0), double]) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_hide_a_change(dtype: torch.dtype) -> None:
    gradients = torch.full((1000,), 3.0), torch.full((1001,), 3.0)
    for gradient in gradients:
        weight = torch.zeros(len(gradient), dtype=dtype, requires_grad=True)
        weight.grad = gradient.to(dtype)
        full = torch.zeros(1, requires_grad=True)
        full.grad = torch.ones(1)
        assert squared_norm([weight, full]) == pytest.approx(9 * len(gradient) + 1, rel=1e-6)


def test_squared_norm_of_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    (table(torch.tensor([1, 1])).sum()).backward()
    assert squared_norm(list(table.parameters())) == pytest.approx(8)  # row 1 twice: (2, 2)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_smoothed_is_the_weighted_mean(values: list[float], smoothing: float) -> None:
    weights = [(1 - smoothing) ** age for age in range(len(values))]
    expected = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)
    assert smoothed(values, smoothing) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=60), st.sampled_from([0.04, 0.16, 1.0]))
def test_change_is_the_papers_formula_over_a_window(values: list[float], smoothing: float) -> None:
    change = SmoothedChange(window=25)
    found = [change.next(value, smoothing) for value in values]
    for at in range(1, len(values)):
        now = smoothed(values[: at + 1][::-1][:25], smoothing)
        before = smoothed(values[:at][::-1][:25], smoothing)
        assert found[at] == pytest.approx(abs((now - before) / before), abs=1e-12)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), st.sampled_from([2.0**-10, 2.0, 1024.0]))
def test_change_has_no_unit(values: list[float], scale: float) -> None:
    one, other = SmoothedChange(window=25), SmoothedChange(window=25)
    assert [one.next(v, 0.16) for v in values] == [other.next(v * scale, 0.16) for v in values]


def test_change_at_the_edges() -> None:
    change = SmoothedChange(window=3)
    assert change.next(0.0, 0.5) == 0  # the first: nothing to compare with
    assert change.next(0.0, 0.5) == 0
    assert change.next(1.0, 0.5) == math.inf
    before = change.state()
    assert math.isnan(change.next(math.inf, 0.5))
    assert math.isnan(change.next(math.nan, 0.5))
    assert change.state() == before  # what is not finite does not stay


@given(st.lists(st.floats(0, 100), max_size=40), st.floats(0, 100))
def test_change_goes_on_from_its_state(values: list[float], then: float) -> None:
    one, other = SmoothedChange(window=25), SmoothedChange(window=25)
    for value in values:
        one.next(value, 0.16)
    assert len(one.state()) == len(other.state())
    other.load(one.state())
    assert one.next(then, 0.16) == other.next(then, 0.16)


def test_smoothing_is_the_number_of_workers_over_100() -> None:
    signal = GradientChange(window=25, smoothing=None, delta=0.3)
    assert signal.smoothing == SMOOTHING
    signal.read([0.0, 0.0], 4)
    assert signal.smoothing == 0.04
    other = GradientChange(window=25, smoothing=None, delta=0.3)
    other.load(signal.state())
    assert other.smoothing == 0.04
    signal.read([0.0, 0.0], 1000)
    assert signal.smoothing == 1
    assert GradientChange(window=25, smoothing=0.5, delta=0.3).smoothing == 0.5


def test_a_flag_is_raised_from_delta_on() -> None:
    signal = GradientChange(window=25, smoothing=1.0, delta=3.0)
    assert signal.measure([with_gradient(1.0)]) == [0.0, 0.0]
    assert signal.measure([with_gradient(1.5)]) == [1.25, 0.0]
    assert signal.measure([with_gradient(3.0)]) == [3.0, 1.0]
    assert signal.measure([with_gradient(math.nan)])[1] == 0.0  # the nan tells it
