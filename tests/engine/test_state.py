"""The state of a run: moved whole, hashed to the last bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import codec
from holdfast.engine.holdings import Holdings
from holdfast.engine.model import LayeredModel
from holdfast.engine.progress import Progress
from holdfast.engine.state import State
from holdfast.engine.update import Update
from tests.run import parts


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
    return State(model, Update(model.trainable, lambda ps: torch.optim.AdamW(ps, lr=0.1)), Progress(**progress))


def train(state: State, steps: range) -> State:
    for step in steps:
        for p in state.model.trainable:
            p.grad = torch.full_like(p, 0.1 * (step + 1))
        state.update.apply(step=step)
    return state


def sent(value: Any) -> Any:
    text, tensors = codec.flatten(value)
    return codec.unflatten(text, [tensor.clone() for tensor in tensors])


def move(source: State, target: State) -> None:
    for theirs, mine in zip(source.model.units, target.model.units, strict=True):
        target.write(mine, sent(source.read(theirs)))
    target.set_common(sent(source.common()))


def test_a_moved_state_is_the_same_and_goes_on_the_same() -> None:
    source, target = train(make_state(0, step=3, results={"2/0": 0.5}), range(3)), make_state(1, step=0)
    with torch.no_grad():
        source.model.module.scale.add_(1)
    assert source.sha256() != target.sha256()
    move(source, target)
    assert target.sha256() == source.sha256()
    assert target.progress == Progress(step=3, results={"2/0": 0.5})
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
    state = train(make_state(0, step=2), range(2))
    first = state.sha256()
    for unit in state.model.units:
        state.read(unit)
    state.tree()
    assert state.sha256() == first


def test_equal_bytes_under_other_names_or_shapes_have_other_hashes() -> None:
    def of(*layers: nn.Module) -> str:
        model = LayeredModel(nn.Sequential(*layers), seed=0, device=torch.device("cpu"))
        for p in model.trainable:
            nn.init.zeros_(p)
        return State(model, Update(model.trainable, lambda ps: torch.optim.SGD(ps, lr=0.1)), Progress()).sha256()

    assert len({of(nn.Linear(2, 3)), of(nn.Linear(3, 2)), of(nn.ReLU(), nn.Linear(2, 3))}) == 3


# --- parts ----------------------------------------------------------------------------------------


def test_units_move_to_a_worker_that_holds_only_them() -> None:
    source, target = parts.whole(), parts.keep(parts.whole(seed=1, steps=0), [])
    target.model.hold([0, 1])
    for theirs, mine in zip(source.model.units, target.model.units, strict=True):
        if target.model.is_held(mine):
            target.write(mine, sent(source.read(theirs)))
    target.set_common(sent(source.common()))
    assert target.digests().items() <= source.digests().items()
    assert target.progress == source.progress
    assert target.update.settings() == source.update.settings()
    last = target.model.layers[6]
    assert torch.equal(last.weight, source.model.layers[6].weight), "the weight that the first layer shares"
    assert last.bias.isnan().all(), "and no more"


def test_writing_takes_the_memory_that_is_there() -> None:
    source, target = parts.whole(), parts.whole(seed=1)
    before = [tensor.data_ptr() for unit in target.model.units for tensor in unit.tensors]
    for theirs, mine in zip(source.model.units, target.model.units, strict=True):
        target.write(mine, sent(source.read(theirs)))
    assert [tensor.data_ptr() for unit in target.model.units for tensor in unit.tensors] == before


def test_what_is_not_here_is_neither_read_nor_written() -> None:
    state = parts.keep(parts.whole(), [0])
    unit = state.model.units[1]
    with pytest.raises(AssertionError, match="unit 1 is not here"):
        state.read(unit)
    with pytest.raises(AssertionError, match="unit 1 has no memory here"):
        state.write(unit, {})
    state._holdings = Holdings([])  # memory whose values never came
    with pytest.raises(AssertionError, match="unit 0 is not here"):
        state.read(state.model.units[0])
    assert state.digests() == {}


def test_slots_of_what_has_gone_are_forgotten() -> None:
    state = parts.whole(optimizer="Adagrad")  # which has slots before the first step
    state.model.release([1, 4])
    state.forget()
    slots = state.update.optimizer.state
    kept = [name for name, p in state.model.module.named_parameters() if p in slots]
    assert sorted({name[0] for name in kept}) == ["0", "5", "6"]
    assert len(kept) == len(slots)


def test_digests_are_of_what_is_held_and_tell_where_a_difference_is() -> None:
    whole, part = parts.whole(), parts.keep(parts.whole(), [4, 6])
    names = {name.split("/")[1].split(".")[0] for name in part.digests()}
    assert names == {"0", "4", "6"}, "the tied weight has a name in the first layer"
    assert {name for name in part.digests() if name.startswith("optimizer/6")} == {"optimizer/6.bias"}, "one key each"
    assert part.digests().items() <= whole.digests().items()
    flip_last_bit(whole.model.layers[4].low.weight)
    differing = {name for name, digest in part.digests().items() if whole.digests()[name] != digest}
    assert differing == {"model/4.low.weight"}


def test_the_order_of_workers_and_of_copies_does_not_matter() -> None:
    digests = [parts.keep(parts.whole(), layers).digests() for layers in (range(4), range(2, 7), range(3))]
    whole = parts.whole()
    assert {whole.combine(order) for order in itertools.permutations(digests)} == {whole.sha256()}
