"""Copies to go back to: everything comes back to the bit, and the copy is nobody else's memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast import codec
from holdfast.engine.state import State
from holdfast.errors import Broken, UsageError
from holdfast.plan.layout import side_by_side
from holdfast.recovery.copies import Copies, Together
from tests.engine.memory_group import MemoryGroup, on_workers
from tests.engine.pipelines import Job, mlp, state_of, take_place
from tests.recovery.parts import OPTIMIZERS, keep, train, whole


def everything(state: State) -> tuple[bytes, bytes]:
    """Every bit of it: values, and what is common to all workers."""
    text, tensors = codec.flatten([state.common(), [state.read(unit) for unit in state.model.units]])
    raw = [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return text, b"".join(raw)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_everything_comes_back(optimizer: str, steps: int) -> None:
    """Also from before the first step, when the optimizer had nothing; and a second time."""
    state = whole(steps=steps, optimizer=optimizer)
    copies = Copies(state)
    copies.take()
    before = everything(state)
    for _ in range(2):
        train(state, 2)
        state.progress["results"]["after 0/1"] = 0.25
        assert everything(state) != before, "the control"
        copies.restore()
        assert everything(state) == before


def addresses(copies: Copies) -> set[int]:
    return {tensor.data_ptr() for _, tensors in copies._kept.values() for tensor in tensors}


def test_a_copy_is_taken_again_in_the_same_memory() -> None:
    state = whole()
    copies = Copies(state)
    copies.take()
    memory = addresses(copies)
    train(state, 1)
    copies.take()
    assert addresses(copies) == memory
    train(state, 1)
    copies.restore()
    assert state.progress["step"] == 4
    own = {tensor.data_ptr() for tensor in codec.flatten([state.read(unit) for unit in state.model.units])[1]}
    assert not own & memory, "what the optimizer has got it writes into"


def test_it_needs_as_much_memory_as_the_state() -> None:
    state = whole()
    copies = Copies(state)
    copies.take()
    units = codec.flatten([state.read(unit) for unit in state.model.units])[1]
    assert copies.nbytes == sum(tensor.nbytes for tensor in units)


def test_a_worker_without_a_place_copies_what_it_has() -> None:
    state = keep(whole(), [])
    copies = Copies(state)
    copies.take()
    state.progress["step"] = 9
    copies.restore()
    assert state.progress["step"] == 3


# --- steps that are committed together ------------------------------------------------------------------

JOB = Job(layers=mlp, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.05), steps=6)


class Numbered:
    """A group that breaks in the middle of step ``breaks``, once."""

    def __init__(self, group: MemoryGroup, breaks: int | None) -> None:
        self._group, self.breaks = group, breaks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def vote(self, ballot: torch.Tensor) -> None:
        if self.breaks == 0:
            self.breaks = None
            raise Broken("lost")
        if self.breaks is not None:
            self.breaks -= 1
        self._group.vote(ballot)


def together(group: MemoryGroup, every: int, breaks: int | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """As the cohort does: until the operation succeeds."""
    engine = JOB.engine()
    progress: dict[str, Any] = {"step": 0}
    state = State(engine.model, engine.update, progress)
    steps = Together(engine, state, engine.attempt, every)
    breaking: Any = Numbered(group, breaks)
    losses: list[float] = []
    while progress["step"] < JOB.steps:
        operation = steps.operation(progress["step"], JOB.steps)
        try:
            operation.attempt(breaking)
        except Broken:
            before = progress["step"]
            operation.drop()
            assert progress["step"] == len(losses) <= before
            continue
        operation.apply()
        losses += steps.losses
    return state_of(engine), losses


@pytest.mark.parametrize("every", [1, 2, 4, 10])
def test_steps_that_were_lost_come_out_the_same_again(every: int) -> None:
    """The last block is shorter; whichever step breaks, it is done again with those before it."""
    ((expected, losses),) = on_workers(1, lambda group: together(group, 1, None))
    for breaks in [None, *range(JOB.steps)]:
        for found, again in on_workers(1, lambda group, b=breaks: together(group, every, b)):
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert again == losses


def test_without_the_copy_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: only the step goes back."""
    ((expected, _),) = on_workers(1, lambda group: together(group, 3, None))

    def only_the_step(copies: Copies) -> None:
        copies._state.progress["step"] = 0

    monkeypatch.setattr(Copies, "restore", only_the_step)
    ((found, _),) = on_workers(1, lambda group: together(group, 3, 2))
    assert not all(torch.equal(found[name], expected[name]) for name in expected)


def side_by_side_steps(group: MemoryGroup) -> dict[str, torch.Tensor]:
    """Blocks of three on several workers."""
    engine = JOB.engine()
    progress: dict[str, Any] = {"step": 0}
    take_place(engine, side_by_side(len(engine.model.layers), group.size), group)
    steps = Together(engine, State(engine.model, engine.update, progress), engine.attempt, 3)
    while progress["step"] < JOB.steps:
        steps.operation(progress["step"], JOB.steps).attempt(group)
    group.vote(torch.zeros(1))
    return state_of(engine)


class Hasty(MemoryGroup):
    """Tells its own losses and waits for nobody, until the last step."""

    def vote(self, ballot: torch.Tensor) -> None:
        if ballot.numel() == 1:
            super().vote(ballot)


def test_between_two_steps_all_that_was_sent_has_arrived() -> None:
    ((expected, _),) = on_workers(1, lambda group: together(group, 1, None))
    for found in on_workers(3, side_by_side_steps):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_the_exchange_it_is_written_over() -> None:
    """The control. Who is how far depends on the threads, so one is held back before it reads."""
    ((expected, _),) = on_workers(1, lambda group: together(group, 1, None))

    class Slow(Hasty):
        def wait(self, work: Any) -> None:
            time.sleep(0.02 * (self.rank == 1))
            super().wait(work)

    def alike() -> bool:
        made: list[Slow] = []

        def work(group: MemoryGroup) -> dict[str, torch.Tensor]:
            made.append(Slow(group.rank, group.network))
            return side_by_side_steps(made[-1])

        found = on_workers(3, work)
        return all(torch.equal(each[name], expected[name]) for each in found for name in expected)

    assert not all(alike() for _ in range(5))


# --- what a user may ask for ----------------------------------------------------------------------------


def make_run(**settings: Any) -> holdfast.Run:
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    defaults = {"loss": nn.functional.mse_loss, "data": data, "global_batch": 4, "micro_batch": 2}
    given = {"layers": nn.Linear(2, 1), "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)}
    return holdfast.Run(**{**defaults, **given, **settings})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"update": "later"}, r"update='later' is not known.*'eager'"),
        ({"update": "eager", "clip_norm": 1.0}, r"clip_norm needs all gradients"),
        ({"update": "eager", "optimizer": lambda ps: torch.optim.RMSprop(ps)}, r"RMSprop cannot be undone"),
        ({"update": "commit-copy", "every": 3}, r"hold the whole model.*stages=1"),
        ({"update": "commit-copy", "stages": 2, "every": 3}, r"hold the whole model.*stages=1"),
        ({"update": "commit-copy", "stages": 1}, r"number of steps between two copies"),
        ({"update": "commit-copy", "stages": 1, "every": 0}, r"number of steps between two copies"),
    ],
)
def test_what_cannot_be_is_refused_at_once(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        make_run(**settings)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_each_step_is_yielded_once_with_its_loss(tmp_path: Path, checkpoint: bool) -> None:
    found = []
    for number, settings in enumerate([{}, {"update": "commit-copy", "every": 3}, {"update": "eager"}]):
        torch.manual_seed(0)
        more: dict[str, Any] = {"checkpoint": tmp_path / str(number)} if checkpoint else {}
        run = make_run(stages=1, **{"every": 3, **more, **settings})
        steps = [(step.number, step.loss) for step in run.steps(5)]
        steps += [(step.number, step.loss) for step in run.steps(7)]
        found.append((steps, run.sha256(), run.step))
        run.finish()
    assert found[0] == found[1] == found[2]
