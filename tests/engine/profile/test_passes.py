"""A pass with every boundary cut is a real one; what cannot be cut is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from holdfast import Numerics, Run, UsageError
from holdfast.engine.profile.passes import Passes, cut, micro_batch
from tests.engine.profile.runs import BATCH, Masked, Unmask, costs, linear, make_run


def gradients(run: Run) -> list[Tensor]:
    return [p.grad.clone() for p in run.engine.model.trainable if p.grad is not None]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_cutting_changes_no_gradient(autocast: torch.dtype | None) -> None:
    layers = [linear(), nn.ReLU(inplace=True), nn.Dropout(0.3), Masked(tuple), Unmask(), linear()]
    run = make_run(*layers, numerics=Numerics(autocast=autocast))
    inputs, targets = micro_batch(run.engine)
    loss = run.engine._through(range(len(layers)), inputs, targets, step=0, index=0, between=lambda: None)
    (loss * BATCH / 8).backward()  # type: ignore[no-untyped-call]
    whole = gradients(run)
    run.engine.model.module.zero_grad()
    Passes(run.engine, inputs, targets).one()
    assert len(whole) == 6
    assert all(torch.equal(a, b) for a, b in zip(whole, gradients(run), strict=True))


def test_control_another_dropout_changes_gradients() -> None:
    run = make_run(linear(), nn.Dropout(0.3), linear())
    inputs, targets = micro_batch(run.engine)
    seen = []
    for seed in (0, 1):
        run.engine.model.module.zero_grad()
        run.engine.model.seed = seed
        Passes(run.engine, inputs, targets).one()
        seen.append(gradients(run))
    assert not all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_layer_may_write_into_its_input() -> None:
    x = torch.ones(3)
    crossing = cut(x)
    crossing.inputs.zero_()
    assert x.sum() == 3


class Hidden(nn.Module):
    """Leaves something for a later layer behind the boundary's back."""

    kept: list[Tensor]

    def __init__(self, kept: list[Tensor], *, gives: bool) -> None:
        super().__init__()
        self.inner = linear()
        self.box = [kept]
        self.gives = gives

    def forward(self, x: Tensor) -> Tensor:
        if self.gives:
            self.box[0][:] = [self.inner(x)]
            return self.box[0][0]
        return self.inner(x) + self.box[0][0]


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return object()


def test_layers_that_cannot_be_cut_are_refused_in_words() -> None:
    kept: list[Tensor] = []
    with pytest.raises(UsageError, match=r"layer 0 \(Hidden\)"):
        costs(Hidden(kept, gives=True), Hidden(kept, gives=False))
    with pytest.raises(UsageError, match=r"layer 1 \(Opaque\).* object"):
        costs(linear(), Opaque(), linear())


def test_bad_losses_are_refused_in_words() -> None:
    with pytest.raises(UsageError, match="mean"):
        costs(linear(), loss=lambda output, target: output - target)
    with pytest.raises(UsageError, match="requires_grad"):
        costs(linear(), loss=lambda output, target: mse_loss(output.detach(), target))
