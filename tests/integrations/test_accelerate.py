"""A loop for Accelerate, on real workers: the bits of the same program as a ``Loop``, with kills, joins, a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from holdfast.errors import UsageError
from tests.faults.judge import covered
from tests.harness import Result
from tests.integrations import judge
from tests.integrations.judge import lost, reported
from tests.s3_server import needs_seaweed, stored

pytest.importorskip("accelerate", reason="this test needs accelerate")
SCRIPT = Path(__file__).with_name("accelerate_train.py")
STEPS = 12


def train(folder: Path, **settings: Any) -> Result:
    return judge.train(folder, SCRIPT, preload=("accelerate",), **settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker reports, undisturbed."""
    return reported(train(tmp_path_factory.mktemp("alone"), workers=1))


def test_it_has_the_bits_of_a_loop(tmp_path: Path, alone: dict[str, Any]) -> None:
    loop = reported(train(tmp_path, workers=1, FORM="loop"))
    assert (loop["weights"], loop["step"]) == (alone["weights"], STEPS)


def test_what_the_page_shows(tmp_path: Path) -> None:
    """The code of docs/accelerate.md."""
    assert reported(train(tmp_path, workers=2, FORM="documented"))["step"] == 3 * 2  # epochs of two steps


def test_kills_and_joins(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Two are left, then one; whoever joins begins in the third epoch."""
    kills = ["0.0 step=2 phase=backward", "0.1 step=3 phase=voted", "0.2 step=10 phase=data"]
    faults = "; ".join(f"kill worker={each}" for each in kills)
    result = train(tmp_path, workers=3, faults=faults, WANTED=2, PATIENT=8)
    assert lost(result) == {"0.0", "0.1", "0.2"}
    assert reported(result) == alone
    rows = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == STEPS
    assert '"count": 12' in rows[-1]


def test_more_workers_than_micro_batches(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Those that have none in a step run its body all the same."""
    result = train(tmp_path, workers=5, faults="kill worker=0.1 step=3 phase=vote")
    assert lost(result) == {"0.1"}
    assert reported(result) == alone


@pytest.mark.parametrize("steps", [5, covered("in the middle of an epoch is harder", 4)])
def test_a_resume_on_more_workers(tmp_path: Path, alone: dict[str, Any], steps: int) -> None:
    kept = tmp_path / "kept"
    train(tmp_path / "first", workers=1, STEPS=steps, CHECKPOINT=kept)
    second = train(tmp_path / "second", workers=2, faults="kill worker=0.0 step=7 phase=vote", CHECKPOINT=kept)
    assert {event["step"] for event in second.of("resumed")} == {steps}
    assert reported(second) == alone


@needs_seaweed
def test_a_resume_from_a_store(tmp_path: Path, alone: dict[str, Any]) -> None:
    with stored(tmp_path) as around:
        train(tmp_path, workers=1, STEPS=4, **around)
        (tmp_path / "results.jsonl").unlink()
        second = train(tmp_path, workers=2, faults="kill worker=0.0 step=7 phase=vote", **around)
    assert {event["step"] for event in second.of("resumed")} == {4}
    assert reported(second) == alone


def test_control_a_gradient_that_is_missing_is_seen(tmp_path: Path, alone: dict[str, Any]) -> None:
    result = train(tmp_path, workers=2, faults="skip-gradient worker=0.1 step=2")
    assert reported(result)["sha256"] != alone["sha256"]


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
