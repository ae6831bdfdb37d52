"""What a model holds: memory for those layers and no others, made where they are held if functions make them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.engine.model import LayeredModel, Layers
from holdfast.engine.tied_weights import tied
from holdfast.errors import UsageError

CPU = torch.device("cpu")


def with_everything() -> list[nn.Module]:
    """Own weights, a tied one, one used three times, a shared buffer, other dtypes, nothing at all."""
    first, middle, last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    middle.weight = first.weight
    last.weight = first.weight
    last.register_parameter("extra", middle.bias)
    norms = [nn.BatchNorm1d(8), nn.BatchNorm1d(8)]
    norms[1].running_mean = norms[0].running_mean
    frozen = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return [first, norms[0], nn.ReLU(), middle, norms[1], frozen, conv, last]


def storages(model: LayeredModel) -> dict[int, int]:
    """The real memory of the model: storage → bytes. Two names of one storage count once."""
    found = [*model.module.parameters(), *model.module.buffers(), *(alias for alias, _ in model.aliases)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}


def needed(model: LayeredModel, layers: set[int]) -> int:
    """The bytes of all that these layers use, each tensor once."""
    tensors = {id(t): t.nbytes for unit in model.units if unit.layers & layers for t in unit.tensors}
    return sum(tensors.values())


FILLER = 16  # bytes of a released tensor's one value, at most


@pytest.mark.parametrize("count", range(9))
def test_memory_is_that_of_the_held_layers(count: int) -> None:
    for kept in combinations(range(8), count):
        model = LayeredModel(with_everything(), seed=0, device=CPU)
        everything = sum(storages(model).values())
        assert everything == needed(model, set(range(8))), "the control: all of it is counted"
        tensors = len(storages(model))
        model.release(set(range(8)) - set(kept))
        assert model.held == set(kept)
        assert needed(model, set(kept)) <= sum(storages(model).values()) <= needed(model, set(kept)) + FILLER * tensors


def test_a_released_tensor_keeps_identity_shape_and_dtype_and_has_no_number_to_be_mistaken_for_a_weight() -> None:
    model = LayeredModel(with_everything(), seed=0, device=CPU)
    before = {name: (id(t), t.shape, t.dtype) for name, t in model.module.named_parameters()}
    names = list(model.module.state_dict())
    model.release(range(8))
    assert {name: (id(t), t.shape, t.dtype) for name, t in model.module.named_parameters()} == before
    assert list(model.module.state_dict()) == names
    assert all(t.isnan().all() for t in model.module.state_dict().values() if t.is_floating_point())
    assert model.layers[0](torch.ones(1, 8)).isnan().all()


def test_held_again_tensors_lie_as_before_and_aliases_follow() -> None:
    model = LayeredModel(with_everything(), seed=0, device=CPU)
    before = {name: t.stride() for name, t in model.module.state_dict().items()}
    assert before["6.weight"] != nn.Conv2d(4, 4, 3).weight.stride(), "the control: not all lie in the same way"
    model.release(range(8))
    model.hold([7, 6])
    assert [unit.number for unit in model.units if model.is_held(unit)] == [
        unit.number for unit in model.units_of([6, 7])
    ]
    now = model.module.state_dict()
    for name in ("6.weight", "6.bias", "7.weight", "7.bias", "7.extra", "0.weight", "3.weight", "3.bias"):
        assert now[name].stride() == before[name], name
    with torch.no_grad():
        model.layers[0].weight.fill_(3.0)
    assert model.layers[7].weight.tolist() == model.layers[3].weight.tolist() == [[3.0] * 8] * 8
    assert model.layers[0].bias.isnan().all(), "layer 0 itself is not held"


def test_a_shared_weight_stays_as_long_as_one_of_its_layers() -> None:
    model = LayeredModel(with_everything(), seed=0, device=CPU)
    weight = model.layers[0].weight.detach().clone()
    for gone in (0, 7):
        model.release([gone])
        assert torch.equal(model.layers[3].weight, weight)
    model.release([3])
    assert model.layers[3].weight.isnan().all()


def test_holding_what_is_held_changes_nothing() -> None:
    model = LayeredModel(with_everything(), seed=0, device=CPU)
    before = {name: t.clone() for name, t in model.module.state_dict().items()}
    model.hold([0, 5])
    model.release([])
    assert all(torch.equal(t, before[name]) for name, t in model.module.state_dict().items())


def test_every_tensor_is_in_one_unit_with_the_layers_that_use_it() -> None:
    model = LayeredModel(with_everything(), seed=0, device=CPU)
    seen = [id(t) for unit in model.units for t in unit.tensors]
    assert len(seen) == len(set(seen))
    assert [unit.number for unit in model.units] == list(range(len(model.units)))
    assert [unit.layers for unit in model.units[:8]] == [frozenset([number]) for number in range(8)]
    shared = {unit.layers: len(unit.tensors) for unit in model.units[8:]}
    assert shared == {frozenset({0, 3, 7}): 1, frozenset({3, 7}): 1, frozenset({1, 4}): 1}
    assert {id(p) for p in model.trainable} <= set(seen)


# --- layers made by functions -------------------------------------------------------------------------


class Drawn(nn.Module):
    """Draws from a generator as it is made."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def made(layers: Layers) -> LayeredModel:
    model = LayeredModel(layers, seed=5, device=CPU)
    model.make_whole()
    return model


def lazy() -> list[Any]:
    return [partial(nn.Linear, 8, 8), nn.Tanh, partial(nn.Linear, 8, 8), lambda: nn.Sequential(nn.Linear(8, 8))]


def test_a_made_layer_takes_no_memory_before_it_is_held() -> None:
    model = LayeredModel(lazy(), seed=5, device=CPU)
    assert model.held == set()
    assert sum(storages(model).values()) <= FILLER * 6
    model.hold([2])
    assert sum(storages(model).values()) <= FILLER * 4 + needed(model, {2})


def test_first_values_are_those_of_the_place_whoever_makes_them_and_when() -> None:
    whole, part = made(lazy()), LayeredModel(lazy(), seed=5, device=CPU)
    torch.rand(9)
    part.hold([2, 3])
    part.make(part.units_of([3]))
    part.make(part.units_of([2]))
    for number in (2, 3):
        for a, b in zip(whole.layers[number].parameters(), part.layers[number].parameters(), strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(whole.layers[0].weight, whole.layers[2].weight), "places differ"


def test_making_layers_leaves_the_users_random_numbers_alone() -> None:
    torch.manual_seed(3)
    made(lazy())
    found = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), found)


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_first_values_may_come_from_any_generator(source: str) -> None:
    """They are made on each worker for itself, and must be the same there."""
    draws = {
        "torch": lambda: torch.rand(3),
        "numpy": lambda: torch.from_numpy(np.random.rand(3)),
        "python": lambda: torch.tensor([random.random() for _ in range(3)]),
    }
    models = []
    for drawn_before in range(2):
        np.random.rand(drawn_before)
        for _ in range(drawn_before):
            random.random()
        models.append(made([partial(Drawn, draws[source]), partial(Drawn, draws[source])]))
    assert torch.equal(models[0].layers[0].weight, models[1].layers[0].weight)
    assert not torch.equal(models[0].layers[0].weight, models[0].layers[1].weight)


def test_a_function_that_gives_the_same_layer_again_is_refused() -> None:
    """Its values are gone when it is asked for them."""
    block = nn.Linear(8, 8)
    with pytest.raises(UsageError):
        made([lambda: block, nn.Tanh()])


@pytest.mark.parametrize("kept", [{0}, {2}, {0, 2}, {0, 1, 2}])
@pytest.mark.parametrize(
    "layers",
    {
        "both are functions": lambda: [
            partial(nn.Linear, 8, 8),
            nn.Tanh(),
            tied(partial(nn.Linear, 8, 8), weight="0.weight"),
        ],
        "the second is": lambda: [nn.Linear(8, 8), nn.Tanh(), tied(partial(nn.Linear, 8, 8), weight="0.weight")],
        "the first is": lambda: [partial(nn.Linear, 8, 8), nn.Tanh(), tied(nn.Linear(8, 8), weight="0.weight")],
        "forward": lambda: [tied(partial(nn.Linear, 8, 8), weight="2.weight"), nn.Tanh(), partial(nn.Linear, 8, 8)],
    }.items(),
    ids=lambda pair: pair[0] if isinstance(pair, tuple) else None,
)
def test_tied_weights_of_made_layers_are_one(layers: tuple[str, Callable[[], list[Any]]], kept: set[int]) -> None:
    torch.manual_seed(0)
    model = made(layers[1]())
    model.release({0, 1, 2} - kept)
    assert all(p.isfinite().all() for number in kept for p in model.layers[number].parameters())
    assert model.layers[0].weight.data_ptr() == model.layers[2].weight.data_ptr()
    assert len(model.trainable) == 3


@pytest.mark.parametrize("maker", [lambda: None, lambda: 3, dict])
def test_a_function_that_makes_no_layer_is_refused(maker: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="layer 1"):
        LayeredModel([nn.Linear(1, 1), maker], seed=0, device=CPU)
