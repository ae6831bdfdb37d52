"""A run that is measured neither trains nor writes, whatever its script does about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from holdfast import Run
from holdfast.engine.profile.hook import ScriptMeasured, instead_of_training
from tests.engine.profile.runs import WIDTH, linear, make_run

DATA = TensorDataset(torch.randn(8, WIDTH), torch.randn(8, WIDTH))


def test_a_run_that_is_measured_does_not_train() -> None:
    run, other = make_run(linear()), make_run(linear())
    before, seen = run.sha256(), []
    with instead_of_training(seen.append), pytest.raises(ScriptMeasured):
        next(run.steps(3))
    assert seen == [run]
    assert (run.step, run.sha256()) == (0, before)
    assert [step.number for step in other.steps(2)] == [0, 1]  # and otherwise it does


USES: list[Callable[[Run, Path], object]] = [
    lambda run, path: run.save_model(path),
    lambda run, path: next(run.steps(3)),
    lambda run, path: run.evaluate(DATA),
]


@pytest.mark.parametrize("use", USES)
def test_a_run_that_was_measured_is_used_up(use: Callable[[Run, Path], object], tmp_path: Path) -> None:
    run, other = make_run(linear()), make_run(linear())
    with instead_of_training(lambda run: None):
        with pytest.raises(ScriptMeasured):
            next(run.steps(3))
        for one in (run, other):  # the script is at its end, whatever else it has
            with pytest.raises(ScriptMeasured):
                use(one, tmp_path / "model.safetensors")
    with pytest.raises(ScriptMeasured):  # as from atexit
        use(run, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
    use(other, tmp_path / "model.safetensors")  # a run that nobody measured is as ever


def test_before_it_is_measured_nothing_is_written_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, target = make_run(linear()), tmp_path / "first.safetensors"
    with instead_of_training(lambda run: None):
        assert run.evaluate(DATA) > 0
        run.save_model(target)
    assert "first.safetensors is not written: the script is only measured" in caplog.text
    assert not target.exists()
    run.save_model(target)
    assert target.exists()
