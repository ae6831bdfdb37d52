"""Loading into something else than what was saved: by name, or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from holdfast.checkpoint import load, save
from holdfast.errors import CheckpointError, UsageError


def model(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Linear(4, 2, bias=bias))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, dtype=p.dtype)
    optimizer.step()
    return optimizer


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


# --- names, shapes, dtypes ------------------------------------------------------------------------


@pytest.mark.parametrize("into", [None, nn.Linear(2, 1), ["model"]])
def test_what_is_filled_is_a_dict(tmp_path: Path, into: Any) -> None:
    save(tmp_path, {"model": nn.Linear(2, 1)})
    with pytest.raises(UsageError, match="is no dict"):
        load(tmp_path, into)


def test_missing_names_are_always_an_error_and_others_unless_told(tmp_path: Path) -> None:
    saved = model(bias=False)
    save(tmp_path, {"model": saved, "step": 7})
    with pytest.raises(CheckpointError, match=r"0\.bias, 1\.bias"):
        load(tmp_path, {"model": model()}, strict=False)
    with pytest.raises(CheckpointError, match=r"'ema'.*'model', 'step'"):
        load(tmp_path, {"ema": model(bias=False)})
    with pytest.raises(CheckpointError, match=r"1\.weight"):
        load(tmp_path, {"model": saved[:1]})
    first = model(bias=False)[:1]
    load(tmp_path, {"model": first}, strict=False)
    assert torch.equal(first[0].weight, saved[0].weight)


def test_another_shape_is_refused_and_another_dtype_cast_only_if_told(tmp_path: Path) -> None:
    saved = model()
    save(tmp_path, {"model": saved})
    with pytest.raises(CheckpointError, match=r"model/0\.weight.*\(4, 3\).*\(5, 3\)"):
        load(tmp_path, {"model": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))})
    other = model().to(torch.bfloat16)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r"model/0\.weight.*float32.*bfloat16.*cast=True"):
        load(tmp_path, {"model": other})
    assert same(before, other.state_dict())
    load(tmp_path, {"model": other}, cast=True)
    assert same({k: v.to(torch.bfloat16) for k, v in saved.state_dict().items()}, other.state_dict())


def test_nothing_is_changed_when_something_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path, {"model": model(), "extra": {"a": torch.ones(2), "b": 3}, "last": torch.ones(2)})
    extra = {"a": torch.zeros(2), "b": 0}
    into = {"model": model(), "extra": extra, "last": torch.ones(3)}
    before = copy.deepcopy(into["model"].state_dict())
    with pytest.raises(CheckpointError, match="last"):
        load(tmp_path, into)
    assert same(before, into["model"].state_dict())
    assert (extra["a"].tolist(), extra["b"]) == ([0, 0], 0)


def test_a_module_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"model": model()})
    with torch.device("meta"):
        hollow = model()
    with pytest.raises(UsageError, match=r"model/0\.weight.*meta"):
        load(tmp_path, {"model": hollow})
    load(tmp_path, {"model": hollow.to_empty(device="cpu")})


# --- values ---------------------------------------------------------------------------------------


class Scaler:
    """Has a state as a GradScaler does."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"scale": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_arrays_objects_and_nested_dicts_come_back_as_they_were(tmp_path: Path) -> None:
    scaler = Scaler()
    scaler.state = {"scale": 1024.0, "history": [np.arange(6).reshape(2, 3).T, np.array(2.5)], "none": None}
    frozen = np.arange(3)
    frozen.flags.writeable = False
    extra = {"keys": np.array([7, 8], dtype=np.uint32), "frozen": frozen, "betas": (0.9, 0.99), 3: b"bytes"}
    save(tmp_path, {"scaler": scaler, "extra": extra, "number": np.int64(4)})
    there: dict[Any, Any] = {"keys": None, "frozen": None, "betas": None, 3: None}
    into = load(tmp_path, {"scaler": Scaler(), "extra": there, "number": 0})
    transposed, scalar = into["scaler"].state["history"]
    assert np.array_equal(transposed, [[0, 3], [1, 4], [2, 5]])
    assert (scalar.shape, scalar.item(), into["scaler"].state["none"]) == ((), 2.5, None)
    assert into["extra"] is there
    assert there["keys"].dtype == np.uint32
    assert np.array_equal(there["keys"], [7, 8])
    assert np.array_equal(there["frozen"], [0, 1, 2])
    assert (there["betas"], there[3], into["number"]) == ((0.9, 0.99), b"bytes", 4)


def test_what_is_in_lists_is_filled_in_place(tmp_path: Path) -> None:
    saved = [model(), model()]
    save(tmp_path, {"models": saved, "optimizers": [stepped(torch.optim.SGD(m.parameters(), lr=0.1)) for m in saved]})
    others = [model(), model()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in others]
    load(tmp_path, {"models": others, "optimizers": optimizers})
    assert all(same(a.state_dict(), b.state_dict()) for a, b in zip(saved, others, strict=True))
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.1, 0.1]
    with pytest.raises(CheckpointError, match="models"):
        load(tmp_path, {"models": [*others, model()]})


def test_a_scheduler_goes_on_where_it_was(tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, StepLR]:
        optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
        return optimizer, StepLR(optimizer, step_size=2, gamma=0.5)

    optimizer, scheduler = make()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    save(tmp_path, {"optimizer": optimizer, "scheduler": scheduler})
    other, following = make()
    load(tmp_path, {"optimizer": other, "scheduler": following})
    other.step()
    following.step()
    assert (other.param_groups[0]["lr"], following.last_epoch) == (0.25, 4)


def _double(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = module.weight.detach() * 2


class Extra(nn.Module):
    """A module with a state of its own, and with one that a hook makes up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.told: Any = torch.zeros(3)
        self.register_state_dict_post_hook(_double)

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


def test_what_a_module_makes_up_for_its_state_goes_through_the_module(tmp_path: Path) -> None:
    saved = nn.Sequential(Extra())
    saved[0].told = torch.arange(3.0)
    with torch.no_grad():
        saved[0].weight += 1
    save(tmp_path, {"model": saved, "optimizer": torch.optim.SGD(saved.parameters(), lr=0.1)})
    other = nn.Sequential(Extra())
    other[0] = torch.compile(other[0])
    load(tmp_path, {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)})
    assert other[0].told.tolist() == [0, 1, 2]
    assert other[0].weight.tolist() == [2, 2]  # as load_state_dict would have it
