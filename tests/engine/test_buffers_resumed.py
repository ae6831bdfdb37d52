"""Buffers that modules do not save, in fast mode: a resumed run goes on with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from holdfast import Checkpoints
from holdfast.engine.state import State
from holdfast.run.run import Run
from tests.engine.pipelines import WIDTH, linear, numbers, same_bits
from tests.engine.writers import Counts


class Rotary(nn.Module):
    """A table that is made with the layer, as rotary embeddings have it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear()
        self.register_buffer("table", torch.arange(1.0, 1.0 + WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.table / WIDTH


def make(folder: Path | None, layers: Any) -> Run:
    torch.manual_seed(0)
    return Run(
        layers=layers(),
        loss=mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=numbers(12),
        global_batch=4,
        micro_batch=2,
        numerics="fast",
        checkpoint=None if folder is None else Checkpoints(folder=folder, every=3),
    )


def buffers(run: Run) -> dict[str, Tensor]:
    return dict(run.engine.model.module.named_buffers())


def resumed(folder: Path, layers: Any) -> Run:
    first = make(folder, layers)
    list(first.steps(3))
    first.leave()
    return make(folder, layers)


@pytest.mark.parametrize("layers", [lambda: [linear(), Counts()], lambda: [linear, Counts]], ids=["given", "made"])
def test_a_resumed_run_has_the_buffers_of_a_whole_one(tmp_path: Path, layers: Any) -> None:
    whole, second = make(None, layers), resumed(tmp_path, layers)
    list(whole.steps(5))
    assert [step.number for step in second.steps(5)] == [3, 4]
    assert second.sha256() == whole.sha256()
    assert [name for name, buffer in buffers(whole).items() if not same_bits(buffer, buffers(second)[name])] == []
    second.leave()


def test_a_checkpoint_without_them_still_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were written before: then the buffers are those that the layers begin with."""

    def layers() -> Any:
        return [linear, Rotary]

    with monkeypatch.context() as before:
        before.setattr(State, "_transient", lambda self, held: {})
        first = make(tmp_path, layers)
        list(first.steps(3))
        first.leave()
    second = make(tmp_path, layers)
    second.engine.model.hold([0, 1])
    with torch.no_grad():
        buffers(second)["1.table"].fill_(float("nan"))  # memory that nobody has written into may have any values
    list(second.steps(4))
    assert second.step == 4
    assert buffers(second)["1.table"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    second.leave()
