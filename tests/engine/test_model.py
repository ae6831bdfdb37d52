"""The model as layers: names as given, random numbers by place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.engine.model import LayeredModel
from holdfast.errors import UsageError

CPU = torch.device("cpu")


def dropout_model() -> LayeredModel:
    return LayeredModel([nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0.5)], seed=3, device=CPU)


def run(model: LayeredModel, step: int, index: int) -> torch.Tensor:
    layers = range(len(model.layers))
    return model.forward(torch.ones(4, 8), layers, step=step, index=index, between=lambda: None)


def test_dropout_belongs_to_its_place_whatever_was_drawn_before() -> None:
    model = dropout_model()
    first = run(model, 5, 2)
    run(model, 0, 0)
    torch.rand(17)
    assert torch.equal(run(model, 5, 2), first)
    assert not torch.equal(run(model, 5, 3), first)
    assert not torch.equal(run(model, 6, 2), first)


def test_a_layer_draws_the_same_whoever_runs_the_layers_before_it() -> None:
    """So that layers may be cut into stages anywhere."""
    model, seen = dropout_model(), []
    model.layers[2].register_forward_pre_hook(lambda _, __: seen.append(torch.rand(3)))
    run(model, 1, 1)
    model.layers[1].p = 0.0  # draws nothing now
    run(model, 1, 1)
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("cut", [1, 2])
def test_layers_cut_anywhere_give_what_they_give_together(cut: int) -> None:
    model = dropout_model()
    place = {"step": 5, "index": 2, "between": lambda: None}
    first = model.forward(torch.ones(4, 8), range(cut), **place)
    torch.rand(3)  # drawn between the stages, in another process too
    assert torch.equal(model.forward(first, range(cut, 3), **place), run(model, 5, 2))


def test_names_are_those_of_the_module_that_was_given() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

    net = Net()
    model = LayeredModel(net, seed=0, device=CPU)
    assert model.layers == [net]
    assert list(model.module.state_dict()) == ["body.weight", "body.bias"]


def test_between_is_called_before_each_layer() -> None:
    calls: list[int] = []
    dropout_model().forward(torch.ones(1, 8), range(3), step=0, index=0, between=lambda: calls.append(1))
    assert len(calls) == 3


def test_what_layers_share_belongs_to_the_first() -> None:
    shared = nn.Linear(2, 2)
    norm = nn.BatchNorm1d(2)
    model = LayeredModel([shared, norm, shared, nn.Linear(2, 2), norm], seed=0, device=CPU)
    parts = model.parts()
    assert [len(parameters) for parameters, _ in parts] == [2, 2, 0, 2, 0]
    assert [len(buffers) for _, buffers in parts] == [0, 3, 0, 0, 0]


@pytest.mark.parametrize("layers", [[], ["linear"], [nn.Linear(1, 1), None]])
def test_what_is_no_list_of_modules_is_refused(layers: list[nn.Module]) -> None:
    with pytest.raises(UsageError, match="torch modules"):
        LayeredModel(layers, seed=0, device=CPU)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(UsageError, match="no parameter to train"):
        LayeredModel(nn.Linear(1, 1).requires_grad_(False), seed=0, device=CPU)


def test_a_sequential_with_a_forward_of_its_own_keeps_it() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    model = LayeredModel(Residual(nn.Linear(8, 8)), seed=0, device=CPU)
    assert torch.equal(run(model, 0, 0), model.module(torch.ones(4, 8)))
