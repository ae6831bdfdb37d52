"""Models that ``torch.compile`` has wrapped: names, files and hashes are those of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from holdfast import Checkpoints, Loop, Run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x))) * self.scale


def partly(model: Net) -> nn.Module:
    model.first = torch.compile(model.first, backend="eager")  # type: ignore[assignment]
    return model


FORMS: dict[str, Callable[[Net], Any]] = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "partly": partly,
}
NAMES = list(dict(Net().named_parameters()))


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def settings(form: str) -> dict[str, Any]:
    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        assert [name for name, _ in named] == NAMES
        return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    model, x = FORMS[form](Net()), torch.randn(32, 2)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return {"model": model, "optimizer": optimizer, "data": data, "global_batch": 8, "micro_batch": 4}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(form: str, folder: Path, steps: int) -> str:
    run = Run(**settings(form), loss=loss, checkpoint=Checkpoints(folder=folder / "kept", every=3))
    average = run.ema(0.5)
    for _ in run.steps(steps):
        pass
    for weights in (None, average):
        run.save_model(folder / "model.safetensors", weights=weights)
        assert set(load_file(folder / "model.safetensors")) == set(Net().state_dict())
    sha256 = run.sha256()
    run.finish()
    return sha256


@pytest.mark.parametrize(("first", "then"), [("compiled", "plain"), ("plain", "partly"), ("partly", "compiled")])
def test_a_checkpoint_loads_into_either(tmp_path: Path, first: str, then: str) -> None:
    undisturbed = train("plain", tmp_path / "undisturbed", 6)
    train(first, tmp_path / "run", 3)
    assert train(then, tmp_path / "run", 6) == undisturbed


@pytest.mark.parametrize("form", FORMS)
def test_the_names_that_a_loop_gives_its_optimizers(form: str) -> None:
    given = settings(form)
    Loop(**given).finish()
    Loop(**given | {"model": {"net": given["model"]}, "optimizer": {"net": given["optimizer"]}}).finish()
