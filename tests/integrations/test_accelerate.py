"""A loop for Accelerate, on real workers: the bits of the same program as a ``Loop``, with kills, joins, a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from holdfast.errors import UsageError
from holdfast.journal.rows import Row
from tests.faults.judge import covered
from tests.integrations.judge import STEPS, Program, TrainedAlike, lost, reported

pytest.importorskip("accelerate", reason="this test needs accelerate")
PROGRAM = Program(script=Path(__file__).with_name("accelerate_train.py"), preload=("accelerate",))


class TestLoop(TrainedAlike):
    """The form ``documented`` of the program is the code of docs/accelerate.md."""

    program = PROGRAM

    def check_journal(self, found: list[Row]) -> None:
        assert len(found) == STEPS
        assert found[-1]["count"] == 12


def test_more_workers_than_micro_batches(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Those that have none in a step run its body all the same."""
    result = PROGRAM.train(tmp_path, workers=5, faults="kill worker=0.1 step=3 phase=vote")
    assert lost(result) == {"0.1"}
    assert reported(result) == alone


@pytest.mark.parametrize("steps", [5, covered("in the middle of an epoch is harder", 4)])
def test_a_resume_on_more_workers(tmp_path: Path, alone: dict[str, Any], steps: int) -> None:
    kept = tmp_path / "kept"
    PROGRAM.train(tmp_path / "first", workers=1, STEPS=steps, CHECKPOINT=kept)
    second = PROGRAM.train(tmp_path / "second", workers=2, faults="kill worker=0.0 step=7 phase=vote", CHECKPOINT=kept)
    assert {event["step"] for event in second.of("resumed")} == {steps}
    assert reported(second) == alone


# --- bad use --------------------------------------------------------------------------------------------


def prepared(**given: Any) -> tuple[Any, Any, Any, Any]:
    from holdfast.integrations.accelerate import Accelerator

    accelerator = Accelerator(global_batch=4, cpu=True, **given)
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


@pytest.mark.parametrize(
    "given",
    [{"fsdp_plugin": None}, {"log_with": "wandb"}, {"gradient_accumulation_steps": 4}, {"split_batches": True}],
    ids=lambda given: next(iter(given)),
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"Accelerator\({next(iter(given))}="):
        prepared(**given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("drop_last", {"drop_last": True}),
        ("generator", {"shuffle": True, "generator": torch.Generator()}),
        ("WeightedRandomSampler", {"sampler": WeightedRandomSampler([1.0] * 8, 8)}),
    ],
)
def test_a_loader_that_cannot_be_honoured_is_refused_by_name(name: str, given: dict[str, Any]) -> None:
    accelerator, *_ = prepared()
    accelerator._data = None
    with pytest.raises(UsageError, match=name):
        accelerator.prepare(DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2, **given))


def test_methods_that_cannot_be_honoured_are_refused_by_name() -> None:
    accelerator, model, *_ = prepared()
    for name, *arguments in [("save_state",), ("load_state", "x"), ("clip_grad_value_", [], 1.0), ("set_trigger",)]:
        with pytest.raises(UsageError, match=name):
            getattr(accelerator, name)(*arguments)
    with pytest.raises(UsageError, match="2-norm"):
        accelerator.clip_grad_norm_([model.weight], 1.0)


def body(accelerator: Any, model: Any, optimizer: Any, loader: Any, *, without: str = "", twice: str = "") -> None:
    for _epoch in accelerator.epochs(2):
        for (x,) in loader:
            loss = model(x).square().mean()
            if without != "backward":
                accelerator.backward(loss)
            if twice == "backward":
                accelerator.backward(loss)
            if without == "accelerator.backward":
                loss.backward()
            if without != "step":
                optimizer.step()
            if twice == "step" and accelerator.sync_gradients:
                optimizer.step()
            if without == "rest":
                break
            if without == "gather" and accelerator.sync_gradients is False:
                accelerator.gather(loss)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"without": "backward"}, "no backward pass"),
        ({"twice": "backward"}, "backward was called"),
        ({"without": "step"}, "was not committed"),
        ({"twice": "step"}, "is committed already"),
        ({"without": "rest"}, "left in its middle"),
        ({"without": "gather"}, "between a batch and the commit"),
    ],
    ids=str,
)
def test_bad_use_is_a_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        body(*prepared(), **given)


def test_the_loader_belongs_into_an_epoch() -> None:
    _, _, _, loader = prepared()
    with pytest.raises(UsageError, match="outside of an epoch"):
        next(iter(loader))


def test_an_optimizer_that_is_stepped_by_hand() -> None:
    accelerator, _model, optimizer, loader = prepared()
    for _epoch in accelerator.epochs(1):
        for _batch in loader:
            with pytest.raises(UsageError, match="stepped by hand"):
                optimizer.optimizer.step()
            return
