"""Whose profile is it? The same run's and one's like it, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Numerics
from holdfast.engine.profile.measure import fits, read_facts
from holdfast.plan.profile import Profile, uniform
from tests.engine.profile.runs import WIDTH, linear, make_run, profile_of


class Heads(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, self.heads, WIDTH // self.heads).flatten(1))


@pytest.fixture(scope="module")
def known() -> Profile:
    return profile_of(make_run(Heads(), nn.Dropout(0.1), linear()))


def test_a_profile_fits_the_run_it_was_made_from_and_one_like_it(known: Profile) -> None:
    run = make_run(Heads(), nn.Dropout(0.1), linear())
    assert fits(known, run) is None
    assert fits(known, run) is None  # asking changes nothing
    slower = make_run(Heads(), nn.Dropout(0.1), linear(), optimizer=lambda ps: torch.optim.AdamW(ps, lr=1.0))
    assert fits(known, slower) is None
    assert Profile.from_json(known.to_json()) == known


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([Heads(), linear()], "3 layers"),
        ([Heads(), nn.GELU(), linear()], "'1 GELU'"),
        (
            [Heads(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH, bias=False)],
            "1,024",
        ),
        ([Heads(), nn.Dropout(0.2), linear()], "settings"),
        ([Heads(4), nn.Dropout(0.1), linear()], "settings"),
    ],
)
def test_a_profile_of_another_model_is_told_apart(known: Profile, layers: list[nn.Module], said: str) -> None:
    reason = fits(known, make_run(*layers))
    assert reason is not None
    assert said in reason


def test_another_optimizer_loss_micro_batch_or_device_is_told_apart(known: Profile) -> None:
    layers = [Heads(), nn.Dropout(0.1), linear()]

    def sgd(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(ps, lr=1e-3)

    assert "optimizer" in str(fits(known, make_run(*layers, optimizer=sgd)))
    assert "optimizer" in str(fits(known, make_run(*layers, loss=nn.functional.l1_loss)))
    reason = fits(known, make_run(*layers, micro_batch=2))
    assert reason is not None
    assert all(part in reason for part in ("micro-batch", "4 samples", "2 samples", "[4, 16]", "[2, 16]"))
    assert "device" in str(fits(known, make_run(*layers, numerics=Numerics(autocast=torch.bfloat16))))
    run = make_run(*layers)
    torch.set_num_threads(2)
    try:
        assert "2 threads" in str(fits(known, run))
    finally:
        torch.set_num_threads(1)


def test_a_made_up_profile_fits_nothing() -> None:
    assert "made up" in str(fits(uniform(1), make_run(linear())))


def written(source: str) -> str:
    """The key of a run whose layer has this forward."""
    names: dict[str, Any] = {"nn": nn, "__name__": "a script"}
    exec(f"class Layer(nn.Linear):\n    def forward(self, x):\n        {source}", names)
    facts, *_ = read_facts(make_run(names["Layer"](WIDTH, WIDTH)).engine)
    return facts.key


def test_the_code_of_a_layer_counts_but_not_its_comments() -> None:
    assert written("return super(Layer, self).forward(x)") == written("return super(Layer, self).forward(x)  # so")
    assert written("return super(Layer, self).forward(x)") != written("return super(Layer, self).forward(x * 2)")
