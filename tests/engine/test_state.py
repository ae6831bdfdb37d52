"""The state of a run: moved whole, hashed to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast import codec
from holdfast.engine.model import LayeredModel
from holdfast.engine.state import State
from holdfast.engine.update import Update


class Tied(nn.Module):
    """An embedding that is also the last layer's weight, a frozen layer, a buffer and a bf16 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.half = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.half(self.frozen(self.embedding(x)).bfloat16()).float() * self.scale)


def make_state(seed: int, **progress: Any) -> State:
    torch.manual_seed(seed)
    model = LayeredModel(Tied(), seed=0, device=torch.device("cpu"))
    return State(model, Update(model.trainable, lambda ps: torch.optim.AdamW(ps, lr=0.1)), progress)


def train(state: State, steps: range) -> State:
    for step in steps:
        for p in state.model.trainable:
            p.grad = torch.full_like(p, 0.1 * (step + 1))
        state.update.apply(step=step)
    return state


def move(source: State, target: State) -> None:
    assert len(source) == len(target)
    for part in range(len(source)):
        text, tensors = codec.flatten(source.read(part))
        target.write(part, codec.unflatten(text, [tensor.clone() for tensor in tensors]))


def test_a_moved_state_is_the_same_and_goes_on_the_same() -> None:
    source, target = train(make_state(0, step=3, evaluations={"2/0": 0.5}), range(3)), make_state(1, step=0)
    with torch.no_grad():
        source.model.module.scale.add_(1)
    assert source.sha256() != target.sha256()
    move(source, target)
    assert target.sha256() == source.sha256()
    assert target.progress == {"step": 3, "evaluations": {"2/0": 0.5}}
    assert train(target, range(3, 5)).sha256() == train(source, range(3, 5)).sha256()


def test_a_moved_state_keeps_weights_tied_and_frozen_weights_frozen() -> None:
    source, target = train(make_state(0), range(2)), make_state(1)
    module = target.model.module
    move(source, target)
    assert module.head.weight is module.embedding.weight
    assert torch.equal(module.frozen.weight, source.model.module.frozen.weight)
    before = module.frozen.weight.clone()
    train(target, range(2, 4))
    assert torch.equal(module.frozen.weight, before)


def test_a_state_before_the_first_step_wipes_the_receivers_slots() -> None:
    source, target = make_state(0), train(make_state(1), range(2))
    move(source, target)
    assert target.sha256() == source.sha256()


def flip_last_bit(tensor: torch.Tensor) -> None:
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(-1).view(bits)[-1] ^= 1


@pytest.mark.parametrize("name", ["embedding.weight", "frozen.bias", "half.weight", "scale"])
def test_one_bit_of_a_weight_or_buffer_changes_both_hashes(name: str) -> None:
    state = train(make_state(0), range(2))
    before = state.sha256(), state.sha256(weights_only=True)
    flip_last_bit(state.model.module.state_dict()[name])
    after = state.sha256(), state.sha256(weights_only=True)
    assert all(a != b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq", "step"])
def test_one_bit_of_an_optimizer_slot_changes_the_hash_but_not_that_of_the_weights(slot: str) -> None:
    state = train(make_state(0), range(2))
    before = state.sha256(), state.sha256(weights_only=True)
    for p in state.model.trainable:
        flip_last_bit(state.update.optimizer.state[p][slot])
        break
    assert state.sha256() != before[0]
    assert state.sha256(weights_only=True) == before[1]


def test_reading_and_hashing_change_nothing() -> None:
    state = train(make_state(0), range(2))
    first = state.sha256()
    for part in range(len(state)):
        state.read(part)
    assert state.sha256() == first


def test_equal_bytes_under_other_names_or_shapes_have_other_hashes() -> None:
    def of(*layers: nn.Module) -> str:
        model = LayeredModel(nn.Sequential(*layers), seed=0, device=torch.device("cpu"))
        for p in model.trainable:
            nn.init.zeros_(p)
        return State(model, Update(model.trainable, lambda ps: torch.optim.SGD(ps, lr=0.1)), {}).sha256()

    assert len({of(nn.Linear(2, 3)), of(nn.Linear(3, 2)), of(nn.ReLU(), nn.Linear(2, 3))}) == 3
