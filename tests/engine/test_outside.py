"""What an optimizer keeps outside its parameters' state: carried to joiners and checkpoints, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as lrs

from holdfast import Checkpoints
from holdfast.engine.update import Update
from holdfast.errors import UsageError
from holdfast.run.run import Run
from holdfast.undo.undo import undo_step
from tests.engine import optimizers
from tests.engine.memory_group import on_workers
from tests.engine.optimizers import CARRIED, REFUSED, FromTheFourthStep, GradientsInGroup, InGroup, Make, TensorInGroup
from tests.engine.pipelines import Job, assert_same_everywhere, each_alone, linear, mlp, numbers, one_step, take_place
from tests.engine.test_update import assert_same_bits, move, parameters, train

# All that torch has, but for what cannot be used at all: sparse gradients, and a closure.
OF_TORCH = [
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type)
    and issubclass(found, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]
POLICY = {"global_batch": 4, "micro_batch": 2, "loss": mse_loss}


def of_torch(name: str) -> Make:
    if name == "Muon":  # it takes matrices only
        return lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.1)
    return lambda ps: getattr(torch.optim, name)(ps, lr=0.1)


def make_run(optimizer: Make, **settings: Any) -> Run:
    torch.manual_seed(0)
    return Run(layers=mlp(), optimizer=optimizer, data=numbers(8), **POLICY, **settings)


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_is_not_carried_is_refused_by_name_in_the_first_step(make: Make) -> None:
    update = Update(parameters(), make)
    with pytest.raises(UsageError) as caught:
        train(update, range(1))
    assert caught.value.exit_code == 2
    assert f"optimizer {make.__name__} keeps {REFUSED[make]}" in str(caught.value)  # type: ignore[attr-defined]
    assert "state[parameter]" in str(caught.value)


def test_a_counter_that_begins_late_is_refused_when_it_begins() -> None:
    update = Update(parameters(), FromTheFourthStep)
    train(update, range(3))
    with pytest.raises(UsageError, match="FromTheFourthStep keeps 'k'"):
        train(update, range(3, 4))


def test_a_replayed_step_refuses_the_same() -> None:
    update = Update(parameters(), optimizers.InAttribute)
    for p in update.parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises(UsageError, match="InAttribute keeps 'k'"):
        update.repeat(update.terms())


@pytest.mark.parametrize(
    "schedule", [None, lambda o: lrs.StepLR(o, step_size=2, gamma=0.5)], ids=["constant", "StepLR"]
)
@pytest.mark.parametrize("make", [*CARRIED, *OF_TORCH], ids=lambda make: getattr(make, "__name__", make))
def test_a_joiner_goes_on_bit_for_bit_with_what_is_carried(make: Make | str, schedule: Any) -> None:
    chosen = of_torch(make) if isinstance(make, str) else make
    stayed, joined = (Update(parameters(), chosen, schedule=schedule) for _ in range(2))
    train(stayed, range(4))
    move(stayed, joined)
    train(stayed, range(4, 7))
    train(joined, range(4, 7))
    assert_same_bits(stayed, joined)


@pytest.mark.parametrize("make", [*CARRIED, *OF_TORCH], ids=lambda make: getattr(make, "__name__", make))
def test_a_resumed_run_goes_on_bit_for_bit(make: Make | str, tmp_path: Path) -> None:
    chosen = of_torch(make) if isinstance(make, str) else make
    kept = Checkpoints(folder=tmp_path, every=3)
    whole, first = make_run(chosen), make_run(chosen, checkpoint=kept)
    list(whole.steps(6))
    list(first.steps(3))
    first.leave()
    second = make_run(chosen, checkpoint=kept)
    assert [step.number for step in second.steps(6)] == [3, 4, 5]
    assert second.sha256() == whole.sha256()
    second.leave()


def test_a_step_that_needs_a_closure_is_refused_before_training() -> None:
    with pytest.raises(UsageError, match="LBFGS computes the loss several times"):
        Update(parameters(), torch.optim.LBFGS)


def test_parameters_of_nobody_are_refused_before_training() -> None:
    """Their gradients would be summed by nobody, and their state would be sent to nobody."""
    with pytest.raises(UsageError, match="SGD has parameters that are not the model's"):
        Update(parameters(), lambda ps: torch.optim.SGD([*ps, *linear().parameters()]))


def test_terms_can_be_repeated_twice() -> None:
    """A step that writes into a tensor of a group does not write into the terms that it was given."""
    update = Update(parameters(), TensorInGroup)
    train(update, range(2))
    terms = update.terms()
    for _ in range(2):
        update.repeat(terms)
        assert float(update.optimizer.param_groups[0]["k"]) == 3.0


# --- where workers hold different layers ---------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("make", [InGroup, TensorInGroup])
def test_a_counter_in_the_groups_is_the_same_in_every_layout(make: Make, clip: float | None) -> None:
    assert_same_everywhere(Job(layers=mlp, optimizer=make, steps=3, clip_norm=clip))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_group_that_depends_on_the_layers_held_is_refused_by_name(clip: float | None) -> None:
    job = Job(layers=lambda: [linear(), linear()], optimizer=GradientsInGroup, clip_norm=clip)

    def work(group: Any) -> str:
        engine = job.engine()
        take_place(engine, each_alone(2), group)
        one_step(engine, group, 0)
        with pytest.raises(UsageError) as caught:
            engine.attempt(1, group)
        return str(caught.value)

    for said in on_workers(2, work):
        assert "GradientsInGroup has different values in param_groups[0]['d']" in said


def test_where_everybody_holds_all_layers_the_same_group_is_welcome() -> None:
    """The control of the test above: all have the same gradients, so all come to the same value."""
    run = make_run(GradientsInGroup)
    assert len(list(run.steps(3))) == 3


def test_eager_updates_refuse_a_group_that_a_step_changes() -> None:
    class Undoable(InGroup):
        def undo(self, p: Any, grad: Any, state: Any, group: Any) -> None: ...

    engine = Job(layers=mlp, optimizer=Undoable, inverse=undo_step).engine()
    engine.attempt(0, on_workers(1, lambda group: group)[0])
    with pytest.raises(UsageError, match=r"Undoable changes param_groups\[0\]\['k'\].*update='eager'"):
        engine.apply(0)
