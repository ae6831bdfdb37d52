"""Models with running statistics, in runs whose loss calls the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from holdfast import Loop, Run

Loss = Callable[[nn.Module, Any], Tensor]


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def settings(trained: nn.Module) -> dict[str, Any]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return {
        "model": trained,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": data,
        "global_batch": 8,
        "micro_batch": 4,
    }


def train(trained: nn.Module, loss: Loss, *, steps: int = 3) -> str:
    run = Run(**settings(trained), loss=loss)
    for _ in run.steps(steps):
        pass
    return run.sha256()


def error(trained: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(trained(batch[0]), batch[1])


def computed_again(trained: nn.Module, batch: Any) -> Tensor:
    """The same loss; the backward pass calls the model once more, to save memory."""
    return nn.functional.mse_loss(checkpoint(trained, batch[0], use_reentrant=False), batch[1])


def test_a_pass_that_is_computed_again_counts_once() -> None:
    assert train(model(), computed_again) == train(model(), error)


def test_in_a_loop_of_the_script_too() -> None:
    trained = model()
    loop = Loop(**settings(trained))
    for step in loop.steps(3):
        for batch in step.micro_batches():
            step.backward(computed_again(trained, batch))
        step.commit()
    assert loop.sha256() == train(model(), error)


def test_a_part_in_eval_is_named_and_trains(caplog: pytest.LogCaptureFixture) -> None:
    trained = model()
    trained[1].eval()
    train(trained, error)
    assert [record.message for record in caplog.records if "'1' was in eval()" in record.message]
    assert trained[1].num_batches_tracked == 6


def test_a_part_stays_in_eval_where_the_loss_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def frozen(trained: nn.Module, batch: Any) -> Tensor:
        trained.get_submodule("1").eval()
        return error(trained, batch)

    trained = model()
    train(trained, frozen)
    assert trained[1].num_batches_tracked == 0
    assert trained[1].running_mean.count_nonzero() == 0
    train(model().eval(), error)  # as from_pretrained gives it: the user means to train all of it
    assert not [record for record in caplog.records if "eval()" in record.message]


def breaks_in(number: int, wrong: type[BaseException]) -> Loss:
    """Return the loss with a mistake, or an interrupt, in its call of a ``number``."""
    calls = 0

    def loss(trained: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            raise wrong("a mistake of the user's")
        return error(trained, batch)

    return loss


@pytest.mark.parametrize("wrong", [KeyError, KeyboardInterrupt])
def test_a_model_whose_run_an_exception_has_ended_trains_in_the_next(wrong: type[BaseException]) -> None:
    """As in a notebook, whose cell is mended and run again. Before, the new run counted statistics of the old one."""
    trained = model()
    with pytest.raises(wrong) as kept:  # the exception keeps the old run alive, as a notebook's last one does
        train(trained, breaks_in(2, wrong))
    assert train(trained, error) == train(model(), error)
    assert kept.value is not None
