"""The contestant that copies its state: the same weights, also after a kill in the middle of a block of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.pipelines.commit_copy import StateCopy
from holdfast import codec
from holdfast.engine.state import State
from tests.harness import assert_every_worker_commits_each_step_once, launch
from tests.run.parts import train, whole

STEPS, COPY_EVERY = 10, 4
SCRIPT = Path(__file__).parent / "commit_copy_train.py"


def everything(state: State) -> tuple[bytes, list[torch.Tensor]]:
    text, tensors = codec.flatten([state.common(), [state.read(unit) for unit in state.model.units]])
    return text, [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("steps", [0, 3])
def test_everything_comes_back_from_a_copy(steps: int) -> None:
    """Also from before the first step, when the optimizer had no slots; and a second time."""
    state = whole(steps=steps)
    copy = StateCopy(state)
    copy.take()
    text, tensors = everything(state)
    for _ in range(2):
        train(state, 2)
        changed, others = everything(state)
        assert changed != text or not all(map(torch.equal, others, tensors)), "the control"
        copy.restore()
        again, restored = everything(state)
        assert again == text
        assert all(map(torch.equal, restored, tensors))


@pytest.mark.parametrize("kill", ["", "kill worker=0.1 step=6 phase=backward"])
def test_it_ends_with_the_weights_of_a_plain_run(tmp_path: Path, undisturbed: Any, kill: str) -> None:
    result = launch(
        tmp_path, script=SCRIPT, faults=kill, environment={"STEPS": str(STEPS), "COPY_EVERY": str(COPY_EVERY)}
    )
    assert result.code == 0, result.said
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses
    assert_every_worker_commits_each_step_once(result)
    done = [(event["worker"], event["step"]) for event in result.of("block-step")]
    again = {step for worker, step in done if done.count((worker, step)) > 1}
    assert again >= ({4, 5} if kill else set()), "a block is lost as a whole"
    assert again <= ({4, 5, 6, 7} if kill else set())
