"""Averages of the weights: their values, their place among slots, and computing with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.engine.averages import Averages, Ema
from holdfast.engine.model import LayeredModel
from holdfast.engine.update import Update
from holdfast.errors import UsageError


def step(update: Update, number: int) -> None:
    for p in update.parameters:
        p.grad = torch.full_like(p, 0.1 * (number + 1))
    update.apply(step=number)


def made(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Update, list[Ema]]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    update = Update(parameters, lambda ps: torch.optim.AdamW(ps, lr=0.1), **more)
    return update, [update.averages.add(0.9), update.averages.add(0.5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_average_that_torch_would_make(dtype: torch.dtype) -> None:
    update, emas = made((3,), (2, 2), dtype=dtype)
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    expected = {ema: [p.detach().to(wide, copy=True) for p in update.parameters] for ema in emas}
    for number in range(5):
        step(update, number)
        for ema, averages in expected.items():
            for average, p in zip(averages, update.parameters, strict=True):
                average.lerp_(p.detach().to(wide), 1 - ema.decay)
    for ema, averages in expected.items():
        for average, p in zip(averages, update.parameters, strict=True):
            assert torch.equal(update.averages.of(ema, p), average)
            assert update.averages.weights(ema, [p])[p].dtype is dtype


def test_before_the_first_step_it_is_the_weight() -> None:
    update, [ema, _] = made((3,))
    assert torch.equal(update.averages.weights(ema, update.parameters)[update.parameters[0]], update.parameters[0])


def test_it_moves_with_the_slots() -> None:
    one, [ema, _] = made((3,), (2, 2))
    other, _ = made((3,), (2, 2))
    step(one, 0)
    other.set_slots(other.parameters, copy.deepcopy(one.slots(one.parameters)))
    with torch.no_grad():
        for mine, theirs in zip(other.parameters, one.parameters, strict=True):
            mine.copy_(theirs)
    for number in (1, 2):
        step(one, number)
        step(other, number)
    for mine, theirs in zip(other.parameters, one.parameters, strict=True):
        assert torch.equal(other.averages.of(ema, mine), one.averages.of(ema, theirs))
        assert "exp_avg" in other.optimizer.state[mine], "the optimizer has its own"
        assert ema.name not in other.optimizer.state[mine]


def test_a_repeated_update_repeats_the_average() -> None:
    one, [ema, _] = made((3,))
    again, _ = made((3,))
    for number in range(3):
        one.parameters[0].grad = torch.full((3,), 0.1)
        terms = one.apply(step=number)
        again.parameters[0].grad = torch.full((3,), 0.1)
        again.repeat(terms)
    assert torch.equal(one.averages.of(ema, one.parameters[0]), again.averages.of(ema, again.parameters[0]))


def test_workers_with_other_averages_are_refused() -> None:
    update, _ = made((3,))
    other = Update([nn.Parameter(torch.zeros(1))], lambda ps: torch.optim.AdamW(ps))
    with pytest.raises(UsageError, match=r"ema-0\.9"):
        other.set_settings(update.settings())


def test_what_is_no_decay_is_refused() -> None:
    for wrong in (1.0, -0.1, "0.9", True, float("nan")):
        with pytest.raises(UsageError, match="decay"):
            Averages().add(wrong)  # type: ignore[arg-type]


def lose_a_worker(model: LayeredModel, weights: dict[nn.Parameter, Tensor], is_right: Callable[[], bool]) -> None:
    with model.weights(weights):
        assert is_right(), "in both layers"
        raise KeyError("a worker is lost in the middle")


def test_a_model_computes_with_other_weights_and_has_its_own_back() -> None:
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    last.weight = first.weight
    model = LayeredModel([first, last], seed=0, device=torch.device("cpu"))
    x, weight = torch.randn(2, 3), model.trainable[0]
    before, memory, alias = model(x), weight.data_ptr(), model.layers[1].weight
    other = torch.randn(3, 3)
    with pytest.raises(KeyError):
        lose_a_worker(model, {weight: other}, lambda: torch.equal(model(x), x @ other.T @ other.T))
    assert torch.equal(model(x), before)
    assert weight.data_ptr() == memory == alias.data_ptr()


def test_weights_on_their_way_to_a_joiner_are_not_written_to() -> None:
    """A copy of the weights may be sent while an evaluation computes with an average."""
    model = LayeredModel([nn.Linear(2, 2)], seed=0, device=torch.device("cpu"))
    weight = model.trainable[0]
    sent: Tensor = weight.detach()
    before = sent.clone()
    with model.weights({weight: torch.zeros(2, 2)}):
        assert torch.equal(sent, before)
