"""Layers that share parameters: by hand, or by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.model import LayeredModel
from holdfast.engine.tied_weights import share, shared_names, tied
from holdfast.errors import UsageError


class Head(nn.Module):
    def __init__(self, words: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.score = nn.Linear(4, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.norm(x))


def test_a_parameter_is_put_in_the_place_of_the_layers_own() -> None:
    embedding = nn.Embedding(7, 4)
    head = Head()
    assert tied(head, **{"score.weight": embedding.weight}) is head
    assert head.score.weight is embedding.weight
    assert list(head.state_dict()) == list(Head().state_dict()), "names stay"
    assert shared_names(head) == {}, "nothing is left to do"
    head(embedding(torch.tensor([[1, 2]]))).sum().backward()
    alone = torch.autograd.grad(embedding(torch.tensor([[1, 2]])).sum(), embedding.weight)[0]
    assert embedding.weight.grad is not None
    assert not torch.equal(embedding.weight.grad, alone), "both uses have a part in the gradient"


def test_a_name_is_kept_for_later() -> None:
    head = tied(Head(), **{"score.weight": "0.weight"})
    assert shared_names(head) == {"score.weight": "0.weight"}
    assert tied(head, **{"norm.bias": "1.bias"}) is head
    assert shared_names(head) == {"score.weight": "0.weight", "norm.bias": "1.bias"}
    assert list(head.state_dict()) == list(Head().state_dict()), "it is no part of the state"


def test_a_function_keeps_its_names_and_makes_a_new_layer_each_time() -> None:
    make = tied(partial(Head, 5), **{"score.weight": "0.byte.weight"})
    assert shared_names(make) == make.shared == {"score.weight": "0.byte.weight"}
    first, second = make(), make()
    assert isinstance(first, Head)
    assert first is not second
    assert first.score.out_features == 5
    assert shared_names(tied(make, **{"norm.bias": "1.bias"})) == {
        "score.weight": "0.byte.weight",
        "norm.bias": "1.bias",
    }


def test_sharing_by_name_ends_in_the_very_parameter() -> None:
    whole = nn.Sequential(nn.Embedding(7, 4), tied(Head, **{"score.weight": "0.weight"})())
    share(whole[1], "score.weight", whole.get_parameter("0.weight"))
    assert whole[1].score.weight is whole[0].weight


def by_hand(embedding: nn.Module, head: Head) -> list[Any]:
    return [embedding, tied(head, **{"score.weight": embedding.weight})]


def by_name(embedding: nn.Module, head: Head) -> list[Any]:
    return [embedding, tied(head, **{"score.weight": "0.weight"})]


@pytest.mark.parametrize("tie", [by_hand, by_name])
def test_a_model_has_one_weight_and_the_gradients_of_both_its_uses(tie: Callable[..., list[Any]]) -> None:
    x = torch.tensor([[1, 2], [0, 6]])
    torch.manual_seed(0)
    embedding, head = nn.Embedding(7, 4), Head()
    wanted = nn.Sequential(*by_hand(copy.deepcopy(embedding), copy.deepcopy(head)))
    wanted(x).sum().backward()
    model = LayeredModel(tie(embedding, head), seed=0, device=torch.device("cpu"))
    model(x).sum().backward()
    [(alias, weight)] = model.aliases
    assert weight is embedding.weight
    assert len(model.trainable) == len(list(wanted.parameters())) == 4
    assert torch.equal(weight.grad + alias.grad, wanted[0].weight.grad)


def test_a_layer_made_later_shares_by_name() -> None:
    layers = [partial(nn.Embedding, 7, 4), tied(Head, **{"score.weight": "0.weight"})]
    model = LayeredModel(layers, seed=0, device=torch.device("cpu"))
    assert [(w is model.layers[0].weight, a is model.layers[1].score.weight) for a, w in model.aliases] == [
        (True, True)
    ]
    model.hold([0, 1])
    model.make(model.units)
    assert model.layers[1].score.weight.data_ptr() == model.layers[0].weight.data_ptr()
    assert model(torch.tensor([[1, 2]])).isfinite().all()


WEIGHT = nn.Parameter(torch.zeros(7, 4))


@pytest.mark.parametrize(
    ("layer", "shared", "reason"),
    [
        (Head, {}, "weight=embedding.weight"),
        (
            Head(),
            {"score.wieght": WEIGHT},
            "norm.weight, norm.bias, score.",
        ),
        (Head(), {"scores.weight": WEIGHT}, "'scores.weight'"),
        (Head(), {"score": WEIGHT}, "'score'"),
        (Head(), {"score.wieght": "0.weight"}, "'score.wieght'"),
        (nn.ReLU(), {"weight": WEIGHT}, "'weight'"),
        (nn.Linear(4, 7, bias=False), {"bias": WEIGHT}, "'bias'"),
        (
            Head(5),
            {"score.weight": WEIGHT},
            "(7, 4)",
        ),
        (Head().half(), {"score.weight": WEIGHT}, "torch.float16"),
        (Head(), {"score.weight": WEIGHT.data}, "Tensor"),
        (Head(), {"score.weight": "byte.weight"}, "'byte.weight'"),
        (Head(), {"score.weight": "0"}, "'0'"),
        (Head, {"score.weight": WEIGHT}, "name"),
        (7, {"score.weight": "0.weight"}, "int"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(layer: Any, shared: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        tied(layer, **shared)
    assert reason in str(caught.value)


def test_a_refused_tie_changes_nothing() -> None:
    head = Head()
    own = head.score.weight
    with pytest.raises(UsageError):
        tied(head, **{"score.weight": WEIGHT, "norm.wieght": "0.weight"})
    assert head.score.weight is own
