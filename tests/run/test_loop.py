"""``holdfast.Loop`` in one process: the bits of a ``Run``, and a sentence for each bad use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import holdfast
from holdfast import Loop, UsageError
from holdfast.engine.progress import Progress
from holdfast.engine.script_state import ScriptState
from holdfast.engine.update import Update
from holdfast.run.body import LARGE, Body

MICRO_BATCHES = 4
Do = Callable[[Loop, Any, nn.Module, Any], object]  # what the body of a loop does: loop, step, model, optimizer


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(16, 2, generator=draw), torch.randn(16, 1, generator=draw))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Linear(3, 1))


def make(model: Any = None, optimizer: Any = None, **settings: Any) -> Loop:
    model = net() if model is None else model
    optimizer = AdamW(model.parameters(), lr=0.1) if optimizer is None else optimizer
    given = {"data": data(), "global_batch": 2 * MICRO_BATCHES, "micro_batch": 2, **settings}
    return Loop(model=model, optimizer=optimizer, **given)


def loss_of(model: Any, batch: Any) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def compute(step: Any, model: nn.Module) -> None:
    for batch in step.micro_batches():
        step.backward(loss_of(model, batch))


def train(loop: Loop, do: Do, steps: int = 3) -> None:
    model = loop.engine.model.module
    for step in loop.steps(steps):
        do(loop, step, model, loop.engine.update.optimizer)


# --- the bits of a Run ----------------------------------------------------------------------------------


def in_turn(loop: Loop, step: Any, model: nn.Module, optimizer: Any) -> None:
    compute(step, model)
    step.commit(clip_norm=0.1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"schedule": lambda step: 0.1 / (1 + step)}, {"weight": lambda batch: len(batch[0]) + batch[0][0, 0].abs()}],
    ids=["plain", "schedule", "weight"],
)
def test_a_run_and_a_loop_have_the_same_hash(settings: dict[str, Any]) -> None:
    more: dict[str, Any] = {"data": data(), "global_batch": 8, "micro_batch": 2, **settings}
    run = holdfast.Run(model=net(), loss=loss_of, optimizer=lambda params: AdamW(params, lr=0.1), clip_norm=0.1, **more)
    losses = [step.loss for step in run.steps(3)]
    model = net()
    loop, found = make(model, AdamW(model.parameters(), lr=0.1), **settings), []
    for step in loop.steps(3):
        in_turn(loop, step, model, None)
        found.append(step.made.loss)
    assert found == losses
    assert loop.sha256() == run.sha256()


def test_control_another_loss_is_another_hash() -> None:
    one, other = make(), make()
    train(one, in_turn)
    train(other, lambda loop, step, model, optimizer: (compute(step, model), step.commit()))
    assert one.sha256() != other.sha256(), "gradients were clipped in one of them"


def test_random_numbers_of_the_body_are_those_of_the_step() -> None:
    def drawn(before: int) -> list[float]:
        loop, found = make(), []
        for step in loop.steps(2):
            torch.rand(before)
            compute(step, loop.engine.model.module)
            found.append(float(torch.rand(())))
            step.commit()
            found.append(float(torch.rand(())))
        return found

    assert drawn(0) == drawn(3)
    assert len({*drawn(0)}) == 4


# --- where the body ends --------------------------------------------------------------------------------


def test_a_loop_that_was_left_after_a_commit_goes_on_at_the_next_step() -> None:
    loop, seen = make(), []
    model = loop.engine.model.module
    for total in (8, 5):
        for step in loop.steps(total):
            compute(step, model)
            assert step.commit()
            seen.append(step.number)
            if total == 8 and step.number == 1:
                break
    assert seen == [0, 1, 2, 3, 4]
    assert loop.step == 5


@pytest.mark.parametrize("inside", [False, True])
def test_the_loop_over_batches_may_end_at_the_last_one(inside: bool) -> None:
    loop, other = make(), make()

    def do(loop: Loop, step: Any, model: nn.Module, optimizer: Any) -> None:
        for number, batch in enumerate(step.micro_batches()):
            step.backward(loss_of(model, batch))
            if number == MICRO_BATCHES - 1:
                if inside:
                    step.commit(clip_norm=0.1)
                break
        if not inside:
            step.commit(clip_norm=0.1)

    train(loop, do)
    train(other, in_turn)
    assert loop.sha256() == other.sha256()


def test_steps_of_several_updates_count_once() -> None:
    models = {"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}
    optimizers = {name: SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    loop, losses = make(models, optimizers), []
    for step in loop.steps(2):
        for name in ("a", "a", "b"):
            before = [p.clone() for other in models for p in models[other].parameters() if other != name]
            compute(step, models[name])
            losses.append(step.commit(name).loss)
            after = [p for other in models for p in models[other].parameters() if other != name]
            assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True)), "others stay"
    assert loop.step == 2
    assert len({*losses}) == 6, "each update has samples of its own"
    assert not hasattr(loop.last, "part")


def test_progress_keeps_the_updates_of_a_step() -> None:
    progress = Progress()
    progress.made(0.5, {}, in_parts=True)
    progress.made(0.25, {}, in_parts=True)
    assert (progress.step, progress.update, progress.commits) == (1, 2, 2)
    assert [part["loss"] for part in progress.parts] == [0.5, 0.25]


# --- a body that runs again -----------------------------------------------------------------------------


class Counts(SGD):
    """An optimizer that counts in its groups, as some that need no schedule do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_what_a_broken_body_has_changed_is_taken_back() -> None:
    p = nn.Parameter(torch.ones(1))
    update = Update([p], lambda params: Counts(params, lr=1.0))
    state = ScriptState({"seen": [1], "mean": torch.ones(2)})
    body = Body(state, update)
    body.begin()
    state["seen"].append(2)
    state["mean"].add_(1)
    update.optimizer.step()  # a part that is committed
    body.committed()
    update.optimizer.param_groups[0]["lr"] = 0.5
    body.stop()
    body.take_back()
    assert state["seen"] == [1]
    assert state["mean"].tolist() == [1.0, 1.0]
    assert update.optimizer.param_groups[0]["lr"] == 1.0
    update.optimizer.param_groups[0]["lr"] = 0.25  # the body again, up to the part that is committed
    body.passed(1)
    assert update.optimizer.param_groups[0]["k"] == 1
    assert update.optimizer.param_groups[0]["lr"] == 1.0


def test_a_large_value_is_not_copied_and_must_not_change_before_the_commit() -> None:
    state = {"large": torch.zeros(LARGE // 4 + 1)}
    after, before = make(state=state), make(state={"large": state["large"].clone()})

    def late(loop: Loop, step: Any, model: nn.Module, optimizer: Any) -> None:
        in_turn(loop, step, model, optimizer)
        loop.state["large"].add_(1)

    def early(loop: Loop, step: Any, model: nn.Module, optimizer: Any) -> None:
        loop.state["large"].add_(1)
        in_turn(loop, step, model, optimizer)

    train(after, late)
    with pytest.raises(UsageError, match=r"state\['large'\]"):
        train(before, early)


# --- bad use: a sentence for each -----------------------------------------------------------------------


def body_of(*parts: str) -> Do:
    """A body that does these things in turn."""

    def do(loop: Loop, step: Any, model: nn.Module, optimizer: Any) -> None:
        for part in parts:
            DEEDS[part](loop, step, model, optimizer)

    return do


def with_each(deed: Callable[[Loop, Any, nn.Module, Any, Tensor], object]) -> Do:
    """A loop over the batches that does something with each loss."""

    def do(loop: Loop, step: Any, model: nn.Module, optimizer: Any) -> None:
        for batch in step.micro_batches():
            deed(loop, step, model, optimizer, loss_of(model, batch))

    return do


def beside(model: nn.Module) -> None:
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]


def left_early(loop: Loop, step: Any, model: nn.Module, optimizer: Any) -> None:
    for batch in step.micro_batches():
        step.backward(loss_of(model, batch))
        break


DEEDS: dict[str, Do] = {
    "compute": lambda loop, step, model, optimizer: compute(step, model),
    "commit": lambda loop, step, model, optimizer: step.commit(),
    "commit x": lambda loop, step, model, optimizer: step.commit("x"),
    "step": lambda loop, step, model, optimizer: optimizer.step(),
    "zero_grad": lambda loop, step, model, optimizer: optimizer.zero_grad(),
    "clip": lambda loop, step, model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "beside": lambda loop, step, model, optimizer: beside(model),
    "evaluate": lambda loop, step, model, optimizer: loop.evaluate(data(), loss_of),
    "hash": lambda loop, step, model, optimizer: loop.sha256(),
    "log": lambda loop, step, model, optimizer: loop.log({"x": 1}),
    "loss alone": lambda loop, step, model, optimizer: step.backward(torch.zeros((), requires_grad=True)),
    "leave early": left_early,
    "twice": with_each(lambda loop, step, model, optimizer, loss: (step.backward(loss), step.backward(loss))),
    "never": with_each(lambda loop, step, model, optimizer, loss: None),
    "directly": with_each(lambda loop, step, model, optimizer, loss: loss.backward()),
    "more": with_each(lambda loop, step, model, optimizer, loss: (step.backward(loss), beside(model))),
    "in place": with_each(
        lambda loop, step, model, optimizer, loss: (optimizer.zero_grad(set_to_none=False), step.backward(loss))
    ),
    "in between": with_each(lambda loop, step, model, optimizer, loss: (optimizer.zero_grad(), step.backward(loss))),
    "detached": with_each(lambda loop, step, model, optimizer, loss: step.backward(loss.detach())),
    "middle": with_each(lambda loop, step, model, optimizer, loss: loop.evaluate(data(), loss_of)),
    "all at once": lambda loop, step, model, optimizer: [*step.micro_batches()],
}  # fmt: skip

BAD = {
    "a step without a commit": (["compute"], "was not committed"),
    "a second part without a commit": (["compute", "commit", "compute"], "was not committed"),
    "a commit without a backward pass": (["commit"], "without a backward"),
    "a commit too many": (["compute", "commit", "commit"], "without a backward"),
    "a loop that breaks out in mid-step": (["leave early", "commit"], "before all of its micro-batches"),
    "batches twice": (["compute", "compute", "commit"], "has its micro-batches already"),
    "backward twice": (["twice"], "or twice"),
    "a batch without backward": (["never", "commit"], "had no backward"),
    "all batches at once": (["all at once"], "had no backward"),
    "a backward without a batch": (["loss alone"], "without a batch"),
    "loss.backward": (["directly"], r"step\.backward"),
    "loss.backward as well": (["more"], r"step\.backward"),
    "loss.backward before": (["beside", "compute"], "before the first backward"),
    "loss.backward before the commit": (["compute", "beside"], r"step\.backward"),
    "a step by hand": (["compute", "commit", "step"], "stepped by hand"),
    "a step in place of a commit": (["compute", "step"], "stepped by hand"),
    "zero_grad between batches": (["in between"], "zero_grad"),
    "zero_grad in place": (["in place"], "zero_grad"),
    "zero_grad before the commit": (["compute", "zero_grad", "commit"], "zero_grad"),
    "gradients clipped by hand": (["compute", "clip", "commit"], "clip_norm"),
    "an unknown optimizer": (["compute", "commit x"], "'x'"),
    "a loss of nothing": (["detached"], "does not depend on any parameter"),
    "an evaluation in the middle": (["middle"], "in the middle of a step"),
    "a hash before the commit": (["compute", "hash"], "in the middle of a step"),
    "a log before the commit": (["log"], "before the commit"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_use_is_a_sentence(name: str) -> None:
    parts, words = BAD[name]
    with pytest.raises(UsageError, match=words):
        train(make(), body_of(*parts))


def test_what_only_looks_bad_is_as_good() -> None:
    one, other = make(), make()
    train(one, body_of("evaluate", "zero_grad", "compute", "commit", "zero_grad", "log", "hash"))
    train(other, body_of("compute", "commit"))
    assert one.sha256() == other.sha256()


@pytest.mark.parametrize("then", [lambda loop: loop.sha256(), lambda loop: loop.steps(5), lambda loop: loop.finish()])
def test_a_loop_that_was_left_in_mid_step_is_of_no_use(then: Callable[[Loop], object]) -> None:
    """On other workers it may have been left where they wait for this one."""
    loop = make()
    for step in loop.steps(3):
        compute(step, loop.engine.model.module)
        break
    with pytest.raises(UsageError, match="in the middle of step 0"):
        then(loop)


def test_a_parameter_without_a_gradient_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "left": nn.Linear(2, 1)})
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(make(model), lambda loop, step, model, optimizer: (compute(step, model["used"]), step.commit()))  # type: ignore[index]
        train(make(), in_turn)
    assert [record.getMessage().partition(" got no gradient")[0] for record in caplog.records] == [
        "left.weight and 1 more parameters"
    ]


def test_notes_of_micro_batches_come_with_the_step() -> None:
    model = net()
    loop = make(model)
    for step in loop.steps(2):
        compute(step, model)
        made = step.commit(notes=[{"place": place} for place in range(MICRO_BATCHES)])
        assert made
        assert made.notes == [{"place": place} for place in range(MICRO_BATCHES)]
    assert loop.last
    assert loop.last.notes == made.notes


@pytest.mark.parametrize(
    ("notes", "words"), [([1], "1 notes of 4 micro-batches"), ([torch.ones(1)] * MICRO_BATCHES, "cannot be sent")]
)
def test_notes_that_are_none_are_a_sentence(notes: list[Any], words: str) -> None:
    model = net()
    for step in make(model).steps(1):
        compute(step, model)
        with pytest.raises(UsageError, match=words):
            step.commit(notes=notes)
        return


def test_a_scheduler_of_the_scripts_is_in_its_state() -> None:
    def with_scheduler(kept: bool) -> Any:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1, 0.5)
        loop = make(model, optimizer, state={"schedulers": [scheduler]} if kept else None)
        train(loop, lambda loop, step, model, optimizer: (compute(step, model), step.commit(), scheduler.step()))
        return optimizer

    assert with_scheduler(kept=True).param_groups[0]["lr"] == 0.1 * 0.5**3
    with pytest.raises(UsageError, match="scheduler"):
        with_scheduler(kept=False)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def frozen() -> nn.Module:
    model = net()
    next(model.parameters()).requires_grad_(False)
    return model


SHARED = nn.Linear(2, 1)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a loss": (lambda: make(loss=mse_loss), r"step\.backward"),
    "clip_norm": (lambda: make(clip_norm=1.0), r"step\.commit"),
    "layers": (lambda: make(layers=[net()]), "Run"),
    "no data": (lambda: Loop(model=net(), optimizer=sgd, global_batch=8, micro_batch=2), "data="),  # type: ignore[call-arg]
    "frozen": (lambda: make(model := frozen(), sgd(model)), "frozen"),
    "another's": (lambda: make(net(), sgd(net())), "not the model's"),
    "names": (lambda: make({"g": net()}, {"d": sgd}), "names of models"),
    "no optimizer": (lambda: make({"g": net()}, {"g": 0.1}), r"optimizer\['g'\]"),
    "shared": (lambda: make({"g": SHARED, "d": SHARED}, {"g": sgd(SHARED), "d": sgd(SHARED)}), "in common"),
    "a schedule": (lambda: make({"g": net()}, {"g": sgd}, schedule=lambda step: 0.1), "state="),
    "eager": (lambda: make(numerics=holdfast.Numerics(update="eager")), "Run"),
    "a policy and two commits": (
        lambda: train(make(sync=holdfast.LocalSGD(every=2)), body_of("compute", "commit", "compute", "commit")),
        "one commit",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_a_sentence(name: str) -> None:
    make_it, words = WRONG[name]
    with pytest.raises(UsageError, match=words):
        make_it()


def test_optimizers_may_be_functions_of_the_parameters_of_their_model() -> None:
    models = {"g": net(), "d": net()}
    given: dict[str, Any] = {
        "g": lambda named: SGD([{"params": [p for name, p in named if "bias" in name]}], lr=0.1),
        "d": lambda params: AdamW(params, lr=0.1),
    }
    loop = make(models, given)
    assert [len(group["params"]) for group in loop.engine.update.optimizer.param_groups] == [3, 6]
