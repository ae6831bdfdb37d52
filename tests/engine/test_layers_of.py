"""Models cut into layers. Those of transformers have tests of their own, beside this file."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import nn

from holdfast.engine.layers_of import layers_of
from holdfast.errors import UsageError


@pytest.mark.parametrize("kind", [nn.Sequential, lambda *layers: nn.ModuleList(layers)])
def test_a_list_is_cut_at_its_items(kind: type[nn.Sequential]) -> None:
    shared = nn.Linear(2, 2)
    model = kind(shared, nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), shared)
    names = list(model.state_dict())
    cut = layers_of(model)
    assert cut.module is model
    assert cut.layers == [model[0], model[1], model[2]], "what is there twice, runs twice"
    assert list(cut.module.state_dict()) == names


def test_layers_are_the_model() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(5, 3)
    output = x
    for layer in layers_of(model).layers:
        output = layer(output)
    assert torch.equal(output, model(x))


class Backwards(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


class WithExtra(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([nn.Linear(2, 2)])
        self.register_buffer("mean", torch.zeros(2))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Backwards(nn.Linear(2, 2)), "forward"),
        (nn.Sequential(), "empty"),
        (nn.ModuleList(), "empty"),
        (WithExtra(), "mean"),
        (nn.Linear(2, 2), "nn.Sequential"),
        ([nn.Linear(2, 2)], "list"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(model: nn.Module, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        layers_of(model)
    assert reason in str(caught.value)
    assert "layers=[" in str(caught.value), "what to do instead"


def test_transformers_is_not_imported_for_models_that_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holdfast does not depend on it, and importing it takes seconds."""
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import would fail
    for name in [name for name in sys.modules if name.startswith(("holdfast.engine.layers_of", "holdfast.engine.hf"))]:
        monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module("holdfast.engine.layers_of")
    assert fresh.layers_of is not layers_of
    assert len(fresh.layers_of(nn.Sequential(nn.Linear(1, 1))).layers) == 1
    with pytest.raises(UsageError, match="Linear"):
        fresh.layers_of(nn.Linear(1, 1))
