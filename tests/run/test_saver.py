"""The saver of a run: in which order the threads that write checkpoints commit them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast.checkpoint import series
from holdfast.checkpoint.background import Work
from holdfast.run import saver


def test_checkpoints_are_committed_in_the_order_of_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow one keeps the next waiting. Else each would count, and remove, as if the other were not there."""
    goes_on = threading.Event()  # the commit of step 3 is done, or waits for that of step 2
    collect, commit, join = saver.collect, saver.Saver._commit, Work.join

    def slow(save: Any, *args: Any, **signs: Any) -> Any:
        if save.path.name == "step-00000002":
            goes_on.wait()
        return collect(save, *args, **signs)

    def committing(self: Any, save: Any, step: int, reports: Any) -> None:
        commit(self, save, step, reports)
        if step == 3:
            goes_on.set()

    def joining(self: Work, seconds: float | None = None) -> None:
        if threading.current_thread().name == "checkpoint 3":
            goes_on.set()
        join(self, seconds)

    monkeypatch.setattr(saver, "collect", slow)
    monkeypatch.setattr(saver.Saver, "_commit", committing)
    monkeypatch.setattr(Work, "join", joining)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    run = holdfast.Run(
        layers=torch.nn.Linear(2, 1),
        loss=torch.nn.functional.mse_loss,
        data=data,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        global_batch=4,
        micro_batch=2,
        checkpoint=holdfast.Checkpoints(folder=tmp_path, every=1, keep=2),
    )
    for _ in run.steps(3):
        pass
    run.finish()
    assert series.steps_in(tmp_path) == [2, 3]
