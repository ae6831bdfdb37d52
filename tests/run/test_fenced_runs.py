"""Runs of one process, as in a notebook, that use the same folder one after the other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.checkpoint import index, series
from holdfast.checkpoint.lease import Chain, Taken
from holdfast.errors import UsageError


def make(folder: Path, **more: Any) -> holdfast.Run:
    torch.manual_seed(0)
    return holdfast.Run(
        layers=nn.Linear(2, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(torch.ones(8, 2), torch.ones(8, 1)),
        global_batch=4,
        micro_batch=2,
        checkpoint=holdfast.Checkpoints(folder=folder, every=1, **more),
    )


def test_a_second_run_of_the_process_goes_on_at_once_and_the_first_one_cannot(tmp_path: Path) -> None:
    begin = time.monotonic()
    first, second = make(tmp_path), make(tmp_path)
    assert [step.number for step in first.steps(2)] == [0, 1]
    first.leave()
    assert [step.number for step in second.steps(4)] == [2, 3]
    with pytest.raises(Taken, match=r"given the folder .* back"):
        list(first.steps(6))
    second.leave()
    assert time.monotonic() - begin < 80.0, "nobody has waited for a lease of 90 s"
    newest = Chain(tmp_path).newest()
    assert newest is not None
    details = index.read(series.folder_of(tmp_path, 4)).details
    assert (details["run"], details["epoch"]) == (newest.claim.run, 1)
    assert details["term"] > index.read(series.folder_of(tmp_path, 2)).details["term"]


def test_runs_of_one_process_in_two_folders_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    for total in (1, 2, 3):
        for run in (first, second):
            assert [step.number for step in run.steps(total)] == [total - 1]


@pytest.mark.parametrize("lease", [0, -1.0, "90", True, None])
def test_a_lease_is_a_number_of_seconds(tmp_path: Path, lease: Any) -> None:
    with pytest.raises(UsageError, match="lease="):
        holdfast.Checkpoints(folder=tmp_path, lease=lease)
