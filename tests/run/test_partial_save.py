"""Checkpoints of workers that hold parts: the same as that of one that holds everything, for everybody to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import load, open_checkpoint, save
from holdfast.checkpoint.objects import Absent, PartialModule, describe
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.engine.holdings import Holdings
from holdfast.engine.state import State
from holdfast.errors import CheckpointError, UsageError
from tests.run.parts import LAYERS, OPTIMIZERS, PARTS, Parts, bytes_in, holds_nan, plain, save_parts, whole


def ordered(node: Any) -> Any:
    """A tree in which the order of keys counts."""
    if isinstance(node, dict):
        return [(key, ordered(value)) for key, value in node.items()]
    return [ordered(item) for item in node] if isinstance(node, list | tuple) else node


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_parts_save_what_the_whole_saves(tmp_path: Path, parts: Parts, optimizer: str) -> None:
    found = save_parts(tmp_path / "parts", parts, optimizer=optimizer)
    save(tmp_path / "whole", whole(optimizer=optimizer).tree())
    expected = open_checkpoint(tmp_path / "whole")
    assert ordered({**found.tree, "model": sorted(found.tree["model"])}) == ordered(
        {**expected.tree, "model": sorted(expected.tree["model"])}
    )
    tensors = [name for name in found.tree["model"] if not name.endswith("_extra_state")]
    assert tensors == [name for name in expected.tree["model"] if not name.endswith("_extra_state")]
    assert found.tree["model"] == expected.tree["model"], "extra state comes from who has it"
    assert bytes_in(found) == bytes_in(expected)
    assert found.tied == expected.tied == {"6.weight": "0.weight"}
    assert (found.frozen, found.buffers) == (expected.frozen, expected.buffers)
    assert not holds_nan(found)
    written = sum(piece.box.numel for entry in found.tensors.values() for piece in entry.pieces)
    assert written == sum(read_tensor(found, name).numel() for name in found.tensors)


def test_control_a_filler_that_is_taken_for_a_weight_is_seen_here(tmp_path: Path) -> None:
    def lie(rank: int, state: State) -> None:
        state._holdings = Holdings(range(100))

    assert holds_nan(save_parts(tmp_path, Parts([range(5)]), meddle=lie))


def test_a_filler_beside_a_real_copy_is_refused(tmp_path: Path) -> None:
    def lie(rank: int, state: State) -> None:
        if rank:
            state._holdings = Holdings(range(100))

    with pytest.raises((UsageError, CheckpointError), match="workers 0 and 1 have different values of model/"):
        save_parts(tmp_path, Parts([range(5), range(5, 7)]), meddle=lie)


def test_memory_whose_values_never_came_is_not_saved(tmp_path: Path) -> None:
    """A copy that broke half-way leaves a layer with memory, and with whatever was in it."""

    def break_off(rank: int, state: State) -> None:
        held = {unit.number for unit in state.model.units if state.model.is_held(unit)}
        state.model.hold(range(LAYERS))
        state._holdings = Holdings(held)

    found = save_parts(tmp_path / "a", PARTS[1], meddle=break_off)
    assert bytes_in(found) == bytes_in(save_parts(tmp_path / "b", PARTS[0]))


def test_slots_that_were_left_behind_are_not_saved(tmp_path: Path) -> None:
    """An optimizer may make slots for all parameters at once, also for those that are elsewhere."""

    def leave(rank: int, state: State) -> None:
        p = state.model.layers[4 if rank == 0 else 1].linear.weight
        state.update.optimizer.state[p] = {"exp_avg": torch.zeros(p.shape), "stale": 1}

    found = save_parts(tmp_path / "a", PARTS[1], meddle=leave)
    assert bytes_in(found) == bytes_in(save_parts(tmp_path / "b", PARTS[0]))


def test_what_stands_in_for_tensors_that_are_elsewhere_may_be_in_one_place() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nothing = torch.full((), float("nan"))
    for p in module.parameters():
        p.data = nothing.expand(p.shape)
    absent = {name: Absent(tensor=p) for name, p in module.named_parameters()}
    described = describe({"model": PartialModule(module=module, absent=absent)})
    assert len(described.held) == 4
    assert described.tied == {}
    assert not any(held.parts for held in described.held.values())


@pytest.mark.parametrize(("missing", "name"), [([3], "3.weight"), ([1, 2], "1.scale"), ([0, 6], "0.weight")])
def test_what_nobody_holds_is_refused_by_name(tmp_path: Path, missing: list[int], name: str) -> None:
    left = [layer for layer in range(LAYERS) if layer not in missing]
    with pytest.raises((UsageError, CheckpointError), match=f"no worker holds model/{name} "):
        save_parts(tmp_path, Parts([left[:3], left[3:]]))
    assert not list(tmp_path.glob("*/index.json"))


@pytest.mark.parametrize("layer", [0, 6])
def test_one_of_the_layers_that_share_a_weight_is_enough_for_the_weight(tmp_path: Path, layer: int) -> None:
    left = [one for one in range(LAYERS) if one not in (0, 6)]
    if layer == 6:  # the first has nothing beside the weight
        assert bytes_in(save_parts(tmp_path, Parts([left, [6]])))["model/0.weight"]
    else:
        with pytest.raises((UsageError, CheckpointError), match=r"no worker holds model/6\.bias "):
            save_parts(tmp_path, Parts([left, [0]]))


def test_copies_that_differ_are_refused_also_if_the_first_worker_has_none(tmp_path: Path) -> None:
    def spoil(rank: int, state: State) -> None:
        if rank == 2:
            with torch.no_grad():
                state.model.layers[1].linear.weight.view(-1)[0] += 1

    with pytest.raises(
        (UsageError, CheckpointError), match=r"workers 1 and 2 have different values of model/1\.linear"
    ):
        save_parts(tmp_path, Parts([range(3, 7), range(3), range(3)]), meddle=spoil)


def test_a_plain_model_loads_what_parts_have_saved(tmp_path: Path) -> None:
    save_parts(tmp_path, PARTS[5])
    module, expected = plain(seed=1), whole()
    optimizer = OPTIMIZERS["AdamW"]([p for p in module.parameters() if p.requires_grad])
    read = load(tmp_path, {"model": module, "optimizer": optimizer, "step": 0})
    assert read["step"] == 3
    assert module[6].weight is module[0].weight
    for name, value in expected.model.module.state_dict().items():
        other = module.state_dict()[name]
        assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, name
    for mine, theirs in zip(optimizer.param_groups[0]["params"], expected.model.trainable, strict=True):
        slots = expected.update.optimizer.state[theirs]
        assert all(torch.equal(optimizer.state[mine][key], value) for key, value in slots.items())
