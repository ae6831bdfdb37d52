"""Optimizers: slots and settings find their parameters, however these are grouped, named or tied here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint import load, open_checkpoint, save
from holdfast.errors import CheckpointError
from tests.checkpoint.layouts import Model, blank, differences, logical, optimizers, trained, view
from tests.checkpoint.test_loading import model, same, stepped


def decayed(module: nn.Module, *, backwards: bool = False) -> torch.optim.AdamW:
    """Two groups, of weights and of biases; or the other way round, and each of them too."""
    parameters = list(module.parameters())[:: -1 if backwards else 1]
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1, "lr": 0.5},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 0.25},
    ]
    return torch.optim.AdamW(groups[:: -1 if backwards else 1])


def slots(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    return {name: optimizer.state[p] for name, p in module.named_parameters()}


# --- groups ---------------------------------------------------------------------------------------


def test_groups_in_another_order(tmp_path: Path) -> None:
    here, there = model(), model()
    saved = stepped(decayed(here))
    save(tmp_path, {"model": here, "optimizer": saved})
    other = decayed(there, backwards=True)
    for group in other.param_groups:
        group["lr"] = group["weight_decay"] = 9.0
    load(tmp_path, {"model": there, "optimizer": other})
    assert same(slots(saved, here), slots(other, there))
    assert [(g["lr"], g["weight_decay"]) for g in other.param_groups] == [(0.25, 0.0), (0.5, 0.1)]


def test_finer_groups_take_the_settings_and_coarser_ones_are_refused(tmp_path: Path) -> None:
    here, there = model(), model()
    save(tmp_path, {"model": here, "optimizer": stepped(decayed(here))})
    finer = torch.optim.AdamW([{"params": [p]} for p in there.parameters()])
    load(tmp_path, {"model": there, "optimizer": finer})
    assert [group["lr"] for group in finer.param_groups] == [0.5, 0.25, 0.5, 0.25]
    coarser = torch.optim.AdamW(there.parameters())
    with pytest.raises(CheckpointError, match=r"0\.bias"):
        load(tmp_path, {"model": there, "optimizer": coarser})
    assert coarser.param_groups[0]["lr"] == 0.001


def test_parameters_that_one_side_lacks_are_named(tmp_path: Path) -> None:
    here = model()
    only = torch.optim.SGD(here[0].parameters(), lr=0.1)
    save(tmp_path / "less", {"model": here, "optimizer": only})
    save(tmp_path / "more", {"model": here, "optimizer": torch.optim.SGD(here.parameters(), lr=0.1)})
    with pytest.raises(CheckpointError, match=r"1\.weight, 1\.bias"):
        load(tmp_path / "less", {"model": here, "optimizer": torch.optim.SGD(here.parameters(), lr=0.1)})
    with pytest.raises(CheckpointError, match=r"1\.weight, 1\.bias"):
        load(tmp_path / "more", {"model": here, "optimizer": only})
    load(tmp_path / "more", {"model": here, "optimizer": only}, strict=False)


def test_slots_that_were_not_saved_are_dropped(tmp_path: Path) -> None:
    here = model()
    save(tmp_path, {"model": here, "optimizer": decayed(here)})
    other = stepped(decayed(here))
    load(tmp_path, {"model": here, "optimizer": other})
    assert not other.state


# --- numbers --------------------------------------------------------------------------------------


def test_torch_saved_slots_without_names_go_by_the_order(tmp_path: Path) -> None:
    here, there = model(), model()
    saved = stepped(decayed(here))
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": here.state_dict(), "optimizer": saved.state_dict(), "step": 3}, path)
    other = decayed(there)
    assert load(path, {"model": there, "optimizer": other, "step": 0})["step"] == 3
    assert same(slots(saved, here), slots(other, there))
    assert torch.equal(here[1].weight, there[1].weight)
    with pytest.raises(CheckpointError, match=r"\[2, 2\].*\[4\]"):
        load(path, {"model": there, "optimizer": torch.optim.AdamW(there.parameters())})
    with pytest.raises(CheckpointError, match=r"optimizer/state/1\.weight/exp_avg.*\(4, 3\)"):
        load(path, {"model": there, "optimizer": decayed(nn.Sequential(there[1], there[0]))}, strict=False)


def test_an_optimizer_alone_goes_by_the_order_too(tmp_path: Path) -> None:
    here, there = model(), model()
    saved = stepped(decayed(here))
    save(tmp_path, {"optimizer": saved})
    other = decayed(there)
    load(tmp_path, {"optimizer": other})
    assert same(slots(saved, here), slots(other, there))


# --- kinds of slots -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.Muon,
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_optimizer_of_torch_goes_on_as_before(kind: Any, tmp_path: Path) -> None:
    here, there = model(bias=False), model(bias=False)
    saved = stepped(kind(here.parameters()))
    save(tmp_path, {"model": here, "optimizer": saved})
    other = kind(there.parameters())
    load(tmp_path, {"model": there, "optimizer": other})
    assert same(slots(saved, here), slots(other, there))
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        a.grad = b.grad = torch.ones_like(a)
    saved.step()
    other.step()
    assert same(here.state_dict(), there.state_dict())


def test_counters_of_a_scalar_parameter_are_not_laid_out_as_it_is(tmp_path: Path) -> None:
    here = nn.ParameterDict({"scale": nn.Parameter(torch.ones((), dtype=torch.bfloat16))})
    save(tmp_path, {"model": here, "optimizer": stepped(torch.optim.AdamW(here.parameters()))})
    other = torch.optim.AdamW(here.parameters())
    load(tmp_path, {"model": here, "optimizer": other})
    found = other.state[here["scale"]]
    assert {key: value.dtype for key, value in found.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }


def test_slots_are_filled_where_they_are(tmp_path: Path) -> None:
    tree = trained()
    save(tmp_path, tree)
    expected = logical([view(tree)])
    there = {**trained()}
    kept = there["adamw"].state[there["model"].odd.one]["exp_avg"]
    with torch.no_grad():
        kept.zero_()
    load(tmp_path, there)
    assert there["adamw"].state[there["model"].odd.one]["exp_avg"] is kept
    assert differences(logical([view(there)]), expected) == []


# --- tied parameters ------------------------------------------------------------------------------


def untied() -> dict[str, Any]:
    """As two stages of a pipeline have it: a copy each, with slots each."""
    torch.manual_seed(1)
    module = Model()
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())
    tree = {"model": module, **optimizers(module)}
    for p in (module.embed.weight, module.head.weight):
        p.grad = torch.ones_like(p)
    tree["adamw"].step()
    return tree


def test_equal_copies_become_one(tmp_path: Path) -> None:
    tree = untied()
    save(tmp_path, tree)
    assert open_checkpoint(tmp_path).tied == {}
    there = blank(Model())
    load(tmp_path, {key: there[key] for key in tree})
    assert torch.equal(there["model"].head.weight, tree["model"].head.weight)
    embed = there["model"].embed.weight
    assert same(there["adamw"].state[embed], tree["adamw"].state[tree["model"].embed.weight])


def test_one_becomes_two_copies(tmp_path: Path) -> None:
    tree = trained()
    save(tmp_path, tree)
    there = untied()
    load(tmp_path, there)
    expected = tree["adamw"].state[tree["model"].embed.weight]
    for p in (there["model"].embed.weight, there["model"].head.weight):
        assert torch.equal(p, tree["model"].embed.weight)
        assert same(there["adamw"].state[p], expected)


@pytest.mark.parametrize("what", ["weight", "slot", "step", "none", "setting"])
def test_copies_that_differ_are_not_tied_by_force(what: str, tmp_path: Path) -> None:
    tree = untied()
    head = tree["model"].head.weight
    state = tree["adamw"].state[head]
    with torch.no_grad():
        if what == "weight":
            head[0, 0] += 1
        elif what == "slot":
            state["exp_avg"][3, 3] += 1
        elif what == "step":
            state["step"] += 1
        elif what == "none":
            del tree["adamw"].state[head]
        else:
            first, *others = tree["adamw"].param_groups
            first["params"] = [p for p in first["params"] if p is not head]
            tree["adamw"].param_groups = [first, *others, {**first, "params": [head], "lr": 8.0}]
    save(tmp_path, tree)
    there = blank(Model())
    with pytest.raises(CheckpointError, match=r"(head|embed)\.weight"):
        load(tmp_path, {key: there[key] for key in tree})
