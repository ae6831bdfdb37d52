"""Runs of adapters on a frozen base: checkpoints hold the base once for all, or never."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpoints, Data, HoldfastError, Placement, Run, UsageError
from holdfast.checkpoint import index, load, series
from holdfast.run import process
from tests.checkpoint.adapters import adapted, shared, written

BASE = 2 << 20  # bytes of the frozen weights


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    atexit.unregister(process._at_exit)  # a later run has removed the last checkpoint of an earlier one


class Numbers:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randn(512, generator=torch.Generator().manual_seed(i))


class Quiet(nn.Module):
    """Adapters on a frozen base, without a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = adapted(seed)
        for layer in self.layers:
            layer.calls = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.base(x) + layer.up(layer.down(x))
        return x


def train(steps: int, checkpoint: Checkpoints | None = None, seed: int = 0, **changes: Any) -> str:
    settings: dict[str, Any] = {
        "model": Quiet(seed),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "data": Data(Numbers()),
        "global_batch": 8,
        "micro_batch": 4,
        "checkpoint": checkpoint,
    }
    run = Run(**{**settings, **changes})
    for _ in run.steps(steps):
        pass
    run.fail_if_unsaved()
    return run.sha256()


def test_the_base_is_written_once_in_a_run(tmp_path: Path) -> None:
    undisturbed = train(9)
    settings = Checkpoints(folder=tmp_path, every=2, keep=2)
    train(5, settings)
    (file,) = shared(tmp_path)
    assert train(9, settings) == undisturbed
    assert shared(tmp_path) == [file], "also after a resume"
    assert series.steps_in(tmp_path) == [7, 9], "those that wrote it are gone"
    assert all(written(series.folder_of(tmp_path, step)) < BASE / 10 for step in (7, 9))


def test_another_base_in_the_script_is_replaced_by_the_saved_one(tmp_path: Path) -> None:
    undisturbed = train(6)
    train(3, Checkpoints(folder=tmp_path))
    assert train(6, Checkpoints(folder=tmp_path), seed=5) == undisturbed


def test_trainable_only_in_a_run(tmp_path: Path) -> None:
    undisturbed = train(9)
    settings = Checkpoints(folder=tmp_path, every=2, trainable_only=True)
    train(5, settings)
    assert not shared(tmp_path)
    assert written(series.folder_of(tmp_path, 5)) < BASE / 10
    assert index.open(series.folder_of(tmp_path, 5)).left_out == [
        "model/layers.0.base.weight",
        "model/layers.1.base.weight",
    ]
    assert train(9, settings) == undisturbed


def test_another_base_is_refused(tmp_path: Path) -> None:
    settings = Checkpoints(folder=tmp_path, trainable_only=True)
    train(3, settings)
    with pytest.raises(HoldfastError, match="frozen weights are not those of the save") as caught:
        train(6, settings, seed=5)
    assert caught.value.exit_code == 4


def test_the_word_may_come_later_but_not_go(tmp_path: Path) -> None:
    """A run with its base in checkpoints may go on without; one whose checkpoints lack it needs the word."""
    undisturbed = train(9)
    train(3, Checkpoints(folder=tmp_path))
    train(6, Checkpoints(folder=tmp_path, trainable_only=True, keep=1))
    assert not shared(tmp_path), "nobody refers to it any more"
    with pytest.raises(HoldfastError, match="trainable_only=True"):
        train(9, Checkpoints(folder=tmp_path))
    assert train(9, Checkpoints(folder=tmp_path, trainable_only=True)) == undisturbed


def test_a_checkpoint_of_a_run_in_a_script(tmp_path: Path) -> None:
    train(3, Checkpoints(folder=tmp_path, trainable_only=True))
    model = Quiet()
    state = load(tmp_path, {"model": model, "step": 0}, trainable_only=True)
    assert state["step"] == 3
    assert not torch.equal(model.layers[0].up.weight, Quiet().layers[0].up.weight)


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(512, 512, bias=False).requires_grad_(False), nn.Linear(512, 512, bias=False))


@pytest.mark.parametrize("made", [False, True], ids=["modules", "functions"])
def test_layers_with_frozen_weights(tmp_path: Path, made: bool) -> None:
    def parts() -> dict[str, Any]:
        torch.manual_seed(0)
        layers = [(lambda n=n: layer(n)) if made else layer(n) for n in range(2)]
        return {"model": None, "layers": layers, "loss": lambda out, target: out.square().mean(), "data": Data(Pairs())}

    undisturbed = train(5, **parts())
    settings = Checkpoints(folder=tmp_path, trainable_only=True)
    train(3, settings, **parts())
    assert train(5, settings, **parts()) == undisturbed


class Pairs(Numbers):
    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i), 0


def test_what_does_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trainable_only"):
        Checkpoints(folder=tmp_path, trainable_only=1)
    settings = Checkpoints(folder=tmp_path, trainable_only=True)
    pipelines: dict[str, Any] = {"model": None, "layers": [layer(0), layer(1)], "placement": Placement(stages=2)}
    with pytest.raises(UsageError, match="whole model"):
        train(3, settings, **pipelines)
    with pytest.raises(UsageError, match="whole model"):
        train(3, Checkpoints(folder=tmp_path, trainable_only=True, log=True))


def test_changed_settings_are_shown_as_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(2, Checkpoints(folder=tmp_path))
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        train(3, Checkpoints(folder=tmp_path), clip_norm=0.5)
    (text,) = [message for message in caplog.messages if "changed setting" in message]
    sentence, head, *rows = text.splitlines()
    assert "resumed with 2 changed settings" in sentence
    assert head.split() == ["setting", "then", "now"]
    assert ["clip_norm", "None", "0.5"] in [row.split() for row in rows]
    assert len(rows) == 2, "and the probe of updates that are clipped"


def test_values_of_the_optimizer_are_those_of_the_checkpoint_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = train(3)
    train(2, Checkpoints(folder=tmp_path))
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        other = train(3, Checkpoints(folder=tmp_path), optimizer=lambda params: torch.optim.AdamW(params, lr=0.5))
    assert other == undisturbed, "as with torch's load_state_dict"
    assert not any("which may change the weights" in message for message in caplog.messages)
    (text,) = [message for message in caplog.messages if "values of the checkpoint" in message]
    assert text.splitlines()[2].split() == ["the", "optimizer's", "lr", "0.01", "0.5"]
