"""The update: any optimizer, any schedule, and the same next step after a move to another worker."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim import lr_scheduler as lrs

from holdfast import codec
from holdfast.engine.update import Update
from holdfast.errors import UsageError

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=0.1),
    "momentum": lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda ps: Adam(ps, lr=0.1, amsgrad=True),
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "Adagrad": lambda ps: Adagrad(ps, lr=0.1, lr_decay=0.1),
    "RMSprop": lambda ps: RMSprop(ps, lr=0.1, momentum=0.9, centered=True),
    "NAdam": lambda ps: NAdam(ps, lr=0.1),
    "two groups": lambda ps: AdamW([{"params": ps[:1], "weight_decay": 0.0}, {"params": ps[1:], "lr": 0.01}], lr=0.1),
}
SCHEDULES: dict[str, Any] = {
    "none": None,
    "function": lambda step: 0.1 / (1 + step),
    "StepLR": lambda o: lrs.StepLR(o, step_size=2, gamma=0.5),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, T_max=10),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=2), lrs.ExponentialLR(o, gamma=0.9)], milestones=[2]
    ),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, milestones=[2, 4]),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 4), (4,), ()]]


def train(update: Update, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in update.parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        update.apply(step=step)


def move(source: Update, target: Update) -> None:
    """As a joiner gets it: over the wire, into an update that has done nothing yet."""
    text, tensors = codec.flatten({"slots": source.slots(source.parameters), "settings": source.settings()})
    value = codec.unflatten(text, [tensor.clone() for tensor in tensors])
    target.set_slots(target.parameters, value["slots"])
    target.set_settings(value["settings"])
    with torch.no_grad():
        for mine, theirs in zip(target.parameters, source.parameters, strict=True):
            mine.copy_(theirs)


def assert_same_bits(a: Update, b: Update) -> None:
    assert all(map(torch.equal, a.parameters, b.parameters))
    assert codec.flatten(a.settings())[0] == codec.flatten(b.settings())[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_joiner_continues_bit_for_bit(optimizer: str, schedule: str) -> None:
    if schedule == "OneCycleLR" and optimizer in ("SGD", "Adagrad"):
        pytest.skip("OneCycleLR moves the momentum")
    if schedule == "function" and optimizer == "two groups":
        pytest.skip("a function of the step sets one learning rate")
    make = lambda: Update(parameters(), OPTIMIZERS[optimizer], schedule=SCHEDULES[schedule])  # noqa: E731
    stayed, joined = make(), make()
    train(stayed, range(3))
    move(stayed, joined)
    assert_same_bits(stayed, joined)
    train(stayed, range(3, 7))
    train(joined, range(3, 7))
    assert_same_bits(stayed, joined)


def test_a_joiner_without_the_slots_would_not() -> None:
    """The control: the steps depend on what was moved."""
    stayed, joined = (Update(parameters(), OPTIMIZERS["momentum"]) for _ in range(2))
    train(stayed, range(3))
    stayed.optimizer.state.clear()
    with torch.no_grad():
        for mine, theirs in zip(joined.parameters, stayed.parameters, strict=True):
            mine.copy_(theirs)
    train(joined, range(3, 5))
    other = Update(parameters(), OPTIMIZERS["momentum"])
    train(other, range(5))
    assert not torch.equal(other.parameters[0], joined.parameters[0])


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("none", "function")])
def test_a_scheduler_gives_the_rates_it_gives_in_a_plain_loop(schedule: str) -> None:
    plain = OPTIMIZERS["momentum"](parameters())
    scheduler = SCHEDULES[schedule](plain)
    update = Update(parameters(), OPTIMIZERS["momentum"], schedule=SCHEDULES[schedule])
    for step in range(6):
        assert update.optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        train(update, range(step, step + 1))
        plain.step()
        scheduler.step()


def test_a_function_of_the_step_gives_the_learning_rate() -> None:
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.5**step

    update = Update([nn.Parameter(torch.zeros(()))], lambda ps: SGD(ps, lr=9.0), schedule=rate)
    asked.clear()
    for step in range(3):
        update.parameters[0].grad = torch.ones(())
        update.apply(step=step)
    assert update.parameters[0].item() == -1.75
    assert asked == [0, 1, 2]


def test_gradients_are_clipped_to_the_norm_over_all_parameters() -> None:
    ps = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    update = Update(ps, lambda ps: SGD(ps, lr=1.0), clip_norm=1.0)
    for p, gradient in zip(ps, [3.0, 4.0], strict=True):
        p.grad = torch.tensor([gradient])
    update.apply(step=0)
    assert [p.item() for p in ps] == pytest.approx([-0.6, -0.8])
    for p in ps:
        p.grad = torch.tensor([0.1])
    update.apply(step=1)
    assert [p.item() for p in ps] == pytest.approx([-0.7, -0.9]), "a small gradient stays as it is"


def test_the_norms_of_parameters_that_are_elsewhere_count_too() -> None:
    """A stage has some of the gradients; what it is told of the others makes its factor everybody's."""
    ps = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    update = Update(ps, lambda ps: SGD(ps, lr=1.0), clip_norm=1.0)
    ps[0].grad = torch.tensor([3.0])
    assert update.norms().tolist() == [3.0, 0.0]
    update.apply(step=0, norms=torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert [p.item() for p in ps] == pytest.approx([-0.6, 0.0])


def test_a_norm_does_not_depend_on_how_a_gradient_lies_in_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in [(33, 8, 3, 3), (64, 25), (7, 5, 3)]:
        grad = torch.randn(shape, generator=generator)
        found = set()
        for lying in (grad, grad.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([grad, grad])[: len(grad)]):
            p = nn.Parameter(torch.zeros(shape))
            p.grad = lying
            found.add(Update([p], OPTIMIZERS["SGD"]).norms().item())
        assert len(found) == 1


def test_what_is_kept_for_parameters_that_have_gone_is_dropped() -> None:
    update = Update(parameters(), OPTIMIZERS["AdamW"])
    train(update, range(2))
    update.forget(update.parameters[1:])
    assert [bool(slot) for slot in update.slots(update.parameters)] == [True, False, False]
    assert set(update.optimizer.state) == {update.parameters[0]}


def test_setting_empty_slots_forgets_the_old_ones() -> None:
    update = Update(parameters(), OPTIMIZERS["AdamW"])
    train(update, range(2))
    update.set_slots(update.parameters, [{}, {}, {}])
    assert update.slots(update.parameters) == [{}, {}, {}]


def test_settings_are_a_copy() -> None:
    update = Update(parameters(), OPTIMIZERS["AdamW"], schedule=SCHEDULES["StepLR"])
    before = copy.deepcopy(update.settings())
    kept = update.settings()
    train(update, range(4))
    assert kept["groups"] == before["groups"]


@pytest.mark.parametrize("made", [None, 3, "AdamW"])
def test_a_factory_that_gives_no_optimizer_is_refused(made: Any) -> None:
    with pytest.raises(UsageError, match=r"makes an optimizer.*lambda params"):
        Update(parameters(), lambda ps: made)


@pytest.mark.parametrize("rate", [lambda step: "fast", lambda step: float("nan"), lambda step: None])
def test_a_schedule_that_gives_no_rate_is_refused(rate: Any) -> None:
    with pytest.raises(UsageError, match=r"schedule\(0\) gave"):
        Update(parameters(), OPTIMIZERS["SGD"], schedule=rate)


def test_a_wrong_scheduler_factory_shows_its_own_error() -> None:
    with pytest.raises((ValueError, UsageError), match="total_steps"):
        Update(parameters(), OPTIMIZERS["momentum"], schedule=lambda o: lrs.OneCycleLR(o, max_lr=1.0))
