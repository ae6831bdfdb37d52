"""Names: the same for the same thing, whatever it is wrapped in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint import load, open_checkpoint, save
from holdfast.checkpoint.objects import describe
from holdfast.checkpoint.pieces import NUMPY, Ref
from holdfast.errors import UsageError
from tests.checkpoint.layouts import Model, content, mesh, optimizers
from tests.checkpoint.world import world

# --- modules --------------------------------------------------------------------------------------


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def wrapped() -> dict[str, list[str]]:
    """Names under every wrapper, of a module and of an optimizer made before or after it."""

    def compiled_inside() -> nn.Module:
        module = small()
        module[0] = torch.compile(module[0])
        return module

    models = {
        "compiled": torch.compile(small()),
        "a part compiled": compiled_inside(),
        "ddp": DistributedDataParallel(small()),
        "ddp of compiled": DistributedDataParallel(torch.compile(small())),
        "compiled ddp": torch.compile(DistributedDataParallel(small())),
    }
    found = {}
    for kind, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        described = describe({"model": model, "optimizer": optimizer})
        found[kind] = [*described.tree["model"], *described.tree["optimizer"]["param_groups"][0]["params"]]
    return found


def test_wrappers_do_not_change_names() -> None:
    plain = small()
    expected = [*plain.state_dict(), *(name for name, _ in plain.named_parameters())]
    for found in world(2).run(wrapped):
        for kind, names in found.items():
            assert names == expected, kind


def save_after_forward(folder: Path) -> Any:
    """Without a backward pass, FSDP2 leaves whole parameters in the module, which the optimizer does not have."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), mesh=mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(4, 3))
    save(folder, {"model": model, "optimizer": optimizer})
    expected = [content(p) for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model(torch.ones(4, 3))
    load(folder, {"model": model, "optimizer": optimizer})
    return expected == [content(p) for p in model.parameters()]


def test_fsdp_between_forward_and_backward(tmp_path: Path) -> None:
    assert world(2).run(save_after_forward, tmp_path) == [True, True]
    assert list(open_checkpoint(tmp_path).tree["optimizer"]["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_tied_frozen_and_buffers_are_known_by_the_names_in_the_model() -> None:
    described = describe({"model": Model()})
    assert described.tied == {"head.weight": "embed.weight"}
    assert described.tree["model"]["head.weight"] == Ref(name="model/embed.weight")
    assert "model/head.weight" not in described.held
    assert described.frozen == ["odd.frozen"]
    assert sorted(described.buffers) == ["layers.0.mean", "layers.1.mean", "odd.count"]


def test_one_tensor_in_two_sections_is_held_once() -> None:
    weight = torch.ones(3)
    described = describe({"a": weight, "b": {"again": weight, "part": weight[:2], "empty": weight[:0]}})
    assert described.tree["b"]["again"] == Ref(name="a")
    assert sorted(described.held) == ["a", "b/empty", "b/part"]
    assert described.tied == {}


# --- optimizers -----------------------------------------------------------------------------------


def test_parameters_are_named_by_module_by_themselves_or_by_number() -> None:
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    assert describe({"m": model, "o": plain}).tree["o"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert describe({"o": named}).tree["o"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert describe({"o": plain}).tree["o"]["param_groups"][0]["params"] == [0, 1]


def test_parameters_that_cannot_be_told_apart_are_refused() -> None:
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with pytest.raises(UsageError, match="in no saved module"):
        describe({"one": one, "optimizer": both})
    with pytest.raises(UsageError, match="weight"):
        describe({"one": one, "two": two, "optimizer": both})


def test_settings_that_are_tensors_are_one_where_they_are_equal() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(4)])
    rates = [torch.tensor(0.5), torch.tensor(0.5), torch.tensor(0.25), torch.tensor(0.5, dtype=torch.bfloat16)]
    groups = [{"params": m.parameters(), "lr": lr} for m, lr in zip(model, rates, strict=True)]
    described = describe({"model": model, "o": torch.optim.AdamW(groups, foreach=False)})
    found = [group["lr"] for group in described.tree["o"]["param_groups"]]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    assert all(described.held[ref.name].shape == () for ref in found)


def test_a_parameter_without_slots_has_none() -> None:
    model = Model()
    state = describe({"model": model, **optimizers(model)}).tree["adamw"]["state"]
    assert state == {}


# --- values ---------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.count = 3

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": np.arange(3)}


def test_values_of_all_kinds_have_names() -> None:
    tree = {"counter": Counter(), "list": [torch.ones(1), (2, None)], "a/b": torch.zeros(1), "kind": torch.bfloat16}
    described = describe({**tree, "number": np.float32(0.5)})
    assert described.tree["counter"] == {"count": 3, "seen": {NUMPY: Ref(name="counter/seen")}}
    assert described.tree["list"] == [Ref(name="list/0"), (2, None)]
    assert described.tree["a/b"] == Ref(name="a%2Fb")
    assert (described.tree["number"], described.tree["kind"]) == (0.5, torch.bfloat16)


def test_what_has_no_form_is_refused_by_name() -> None:
    for value, words in (
        ({"set": {1}}, "extra/set is a set"),
        ([1, 2j], "extra/1 is a complex"),
        (np.array(["text"]), "extra is a numpy array of <U4"),
        (np.array([object()]), "extra is a numpy array of object"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "two tensors are named extra/1"),
    ):
        with pytest.raises(UsageError, match=words):
            describe({"extra": value})


def test_outside_of_a_world_nothing_is_distributed() -> None:
    assert not dist.is_initialized()
