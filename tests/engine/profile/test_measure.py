"""Profiles: bytes to the last one, and seconds on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from holdfast import Numerics, Run
from holdfast.engine.profile.measure import layer_names, measure, with_between
from holdfast.engine.profile.round_trips import MeasuredLink
from holdfast.plan.profile import LayerCost, Link
from tests.engine.profile.runs import (
    ACTIVATION,
    BATCH,
    FLOAT,
    INT,
    LINEAR,
    WIDTH,
    Clock,
    Masked,
    Unmask,
    costs,
    linear,
    make_run,
    profile_of,
)  # fmt: skip

# --- bytes ----------------------------------------------------------------------------------------------


def test_bytes_of_linear_layers_are_exact() -> None:
    first, last = costs(linear(), linear())
    assert (first.name, last.name) == ("0 Linear", "1 Linear")
    assert first.weight_bytes == first.trainable_bytes == LINEAR
    assert first.slot_bytes == 2 * LINEAR + 2 * FLOAT  # AdamW: two moments, and a counter for each parameter
    assert first.output_bytes == first.output_gradient_bytes == ACTIVATION
    assert first.saved_bytes == ACTIVATION  # its input; the weight is there anyway
    assert last.output_bytes == last.output_gradient_bytes == 0  # behind the last layer nothing crosses
    assert last.saved_bytes == 3 * ACTIVATION  # its input, and the loss's: output and target


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1), 0),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), LINEAR),
        (lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True), 3 * LINEAR + 2 * FLOAT),
    ],
)
def test_slots_are_what_the_optimizer_really_keeps(optimizer: Any, slots: int) -> None:
    assert [layer.slot_bytes for layer in costs(linear(), linear(), optimizer=optimizer)] == [slots, slots]


def test_what_has_no_weights_keeps_only_what_backward_needs() -> None:
    _, dropout, relu, _ = costs(linear(), nn.Dropout(0.5), nn.ReLU(), linear())
    assert (dropout.state_bytes, dropout.trainable_bytes, dropout.update) == (0, 0, 0.0)
    assert dropout.saved_bytes == 2 * ACTIVATION  # its input, and the mask, which on a CPU is of floats
    assert relu.saved_bytes == 2 * ACTIVATION  # its input, and its result


def test_a_tied_weight_belongs_to_the_first_layer_and_is_not_counted_as_saved() -> None:
    first, last = linear(), linear()
    last.weight = first.weight
    a, b = costs(first, last)
    assert (a.weight_bytes, b.weight_bytes) == (LINEAR, WIDTH * FLOAT)
    assert b.saved_bytes == 3 * ACTIVATION
    assert a.slot_bytes + b.slot_bytes == 2 * (LINEAR + WIDTH * FLOAT) + 3 * FLOAT


def test_frozen_layers_have_no_gradient_no_backward_and_nothing_to_keep() -> None:
    frozen = linear().requires_grad_(False)
    first, middle, _ = costs(frozen, nn.ReLU(), linear())
    for layer in (first, middle):
        assert (layer.backward, layer.output_gradient_bytes, layer.saved_bytes, layer.slot_bytes) == (0, 0, 0, 0)
    assert (first.weight_bytes, first.trainable_bytes) == (LINEAR, 0)
    assert first.output_bytes == ACTIVATION


def test_a_frozen_layer_behind_a_trained_one_passes_the_gradient_on() -> None:
    _, frozen, _ = costs(linear(), linear().requires_grad_(False), linear())
    assert frozen.backward > 0
    assert frozen.output_gradient_bytes == ACTIVATION


@pytest.mark.parametrize("kind", [dict, tuple])
def test_only_floats_have_gradients_at_a_boundary(kind: type) -> None:
    first, _ = costs(Masked(kind), Unmask())
    assert first.output_bytes == ACTIVATION + WIDTH * INT + BATCH * WIDTH
    assert first.output_gradient_bytes == ACTIVATION


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, x * 2


class Unused(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return given[0] + given[1]


def test_a_tensor_that_is_given_twice_is_sent_once_and_one_that_is_not_used_has_no_gradient() -> None:
    _, twice, _ = costs(linear(), Twice(), Unused())
    assert twice.output_bytes == 2 * ACTIVATION
    assert twice.output_gradient_bytes == ACTIVATION


def test_integer_inputs() -> None:
    texts = TensorDataset(torch.randint(9, (16, 5)), torch.randint(9, (16, 5)))

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(scores.flatten(0, 1), target.flatten())

    embedding, _ = costs(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9), data=texts, loss=loss)
    assert embedding.saved_bytes == BATCH * 5 * INT
    assert embedding.output_bytes == embedding.output_gradient_bytes == BATCH * 5 * WIDTH * FLOAT
    assert embedding.backward > 0


def test_autocast_makes_boundaries_narrower() -> None:
    wide, _, _ = costs(linear(), linear(), linear())
    narrow, _, _ = costs(linear(), linear(), linear(), numerics=Numerics(autocast=torch.bfloat16))
    assert narrow.output_bytes == narrow.output_gradient_bytes == wide.output_bytes // 2
    assert narrow.weight_bytes == wide.weight_bytes


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.GELU(), linear())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]


def test_a_layer_that_computes_again_keeps_only_its_input() -> None:
    _, once, _ = costs(linear(), nn.Sequential(linear(), nn.GELU(), linear()), linear())
    _, again, _ = costs(linear(), Recomputed(), linear())
    assert (once.saved_bytes, again.saved_bytes) == (3 * ACTIVATION, ACTIVATION)


def test_buffers_are_weights_without_gradient() -> None:
    norm, _ = costs(nn.BatchNorm1d(WIDTH), linear(), numerics="fast")
    assert norm.trainable_bytes == 2 * WIDTH * FLOAT
    assert norm.weight_bytes == 4 * WIDTH * FLOAT + INT
    assert norm.output_gradient_bytes == ACTIVATION


# --- seconds --------------------------------------------------------------------------------------------


class _SleepBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.clock.sleep(0.02)
        return gradient, None


class SlowBackward(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        return _SleepBack.apply(x, self.clock)


class SlowForward(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(0.03)
        return x


def slow_places(layers: Iterable[LayerCost]) -> dict[tuple[int, str], float]:
    """Where time was spent, and how much."""
    return {
        (number, way): getattr(layer, way)
        for number, layer in enumerate(layers)
        for way in ("forward", "backward")
        if getattr(layer, way)
    }


def test_time_is_found_where_it_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def slow_loss(output: Tensor, target: Tensor) -> Tensor:
        clock.sleep(0.01)
        return mse_loss(output, target)

    assert slow_places(costs(linear(), linear(), linear())) == {}
    found = slow_places(costs(linear(), SlowBackward(clock), SlowForward(clock), linear(), loss=slow_loss))
    assert found == pytest.approx({(1, "backward"): 0.02, (2, "forward"): 0.03, (3, "forward"): 0.01})


def test_the_update_is_shared_out_by_bytes() -> None:
    small, none, large, _ = costs(nn.Linear(WIDTH, 1), nn.Identity(), nn.Linear(1, 640), nn.Linear(640, WIDTH))
    assert none.update == 0
    bytes_of_large, bytes_of_small = (layer.trainable_bytes + layer.slot_bytes for layer in (large, small))
    assert large.update / small.update == pytest.approx(bytes_of_large / bytes_of_small)


def test_a_schedule_with_an_end_is_left_alone() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)

    assert len(costs(linear(), linear(), schedule=schedule, clip_norm=1.0)) == 2


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_names_come_from_the_model() -> None:
    assert layer_names(make_run(linear(), nn.GELU()).engine.model) == ["0 Linear", "1 GELU"]
    whole = Run(
        layers=Named(), loss=mse_loss, optimizer=torch.optim.AdamW, global_batch=8, micro_batch=4,
        data=TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH)),
    )  # fmt: skip
    assert layer_names(whole.engine.model) == ["Named"]
    (only,) = measure(whole.engine, rounds=3).costs
    assert (only.output_bytes, only.weight_bytes) == (0, LINEAR)


# --- links in a profile -----------------------------------------------------------------------------------


def test_what_is_known_between_hosts_is_said() -> None:
    known = profile_of(make_run(linear()))
    assert known.between == known.inside
    assert known.notes["between"] == "not measured: taken to be as inside a host"
    both = with_between(known, bandwidth=5e9, latency=1e-3)
    assert both.between == Link(bandwidth=5e9, latency=1e-3)
    assert both.notes["between"] == "given: bandwidth and latency"
    assert with_between(known, latency=1e-3).between == replace(known.inside, latency=1e-3)
    measured = MeasuredLink(link=Link(bandwidth=2e9, latency=2e-3), seconds={4: 2e-3}, error=0.0)
    peer = with_between(known, peer="head:1", measured=measured)
    assert (peer.between, peer.inside) == (measured.link, known.inside)
    assert peer.notes["between"] == "measured: with head:1"
