"""Eager updates: the weights of an undisturbed run to the bit, early, and taken back when the step breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.engine import gradients
from holdfast.engine.engine import Engine
from holdfast.errors import Broken, UsageError
from holdfast.plan.layout import Layout, side_by_side
from holdfast.undo.undo import undo_step
from tests.engine.memory_group import MemoryGroup, Network, on_workers
from tests.engine.pipelines import Job, Layer, assert_same, each_alone, linear, mixed, state_of, take_place, train_alone

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
    "fused": lambda ps: torch.optim.Adam(ps, lr=0.05, weight_decay=0.1, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "groups": lambda ps: torch.optim.AdamW([{"params": ps[1::2], "lr": 0.2}, {"params": ps[::2]}], lr=0.05),
    "not all": lambda ps: torch.optim.SGD(ps[::2], lr=0.1, momentum=0.9),
}


def layers() -> list[nn.Module]:
    """The first and the last share a weight; one has a parameter that is never used."""
    first, last = linear(), linear()
    last.weight = first.weight
    idle = Layer(lambda x, used, _: used(x).tanh(), linear(), linear())
    return [first, nn.Tanh(), linear(), idle, nn.LayerNorm(6), last]


LAYERS = 6


def job(optimizer: str = "AdamW", *, eager: bool = True, **more: Any) -> Job:
    inverse = undo_step if eager else None
    return Job(layers=layers, optimizer=OPTIMIZERS[optimizer], inverse=inverse, **{"steps": 3, **more})


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each parameter or two."""
    monkeypatch.setattr(gradients, "SMALL_BYTES", 64)


# --- nothing breaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_undisturbed_run_has_the_bits_of_updates_at_the_commit(optimizer: str) -> None:
    expected = train_alone(job(optimizer, eager=False))
    layouts = [side_by_side(LAYERS, workers) for workers in (1, 2, 4)]
    assert_same(job(optimizer), *layouts, each_alone(LAYERS), mixed(LAYERS), expected=expected)


def test_fast_numerics_has_its_own_bits_too() -> None:
    layout = side_by_side(LAYERS, 3)
    for eager in (True, False):
        results = trained(job(eager=eager, exact=False), layout)
        if eager:
            expected = results
    for mine, theirs in zip(expected, results, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def trained(job: Job, layout: Layout, meddle: Callable[[Engine, int, Any], None] | None = None) -> list[dict[str, Any]]:
    """The state of each worker; ``meddle(engine, step, group)`` stands for the vote."""

    def work(group: MemoryGroup) -> dict[str, Tensor]:
        engine = job.engine()
        take_place(engine, layout, group)
        for step in range(job.steps):
            engine.attempt(step, group)
            group.vote(torch.zeros(1))
            if meddle is not None:
                meddle(engine, step, group)
            engine.apply(step)
        return state_of(engine)

    return on_workers(layout.size, work)


def test_a_schedule_counts_from_the_first_bucket_of_a_step() -> None:
    results = []
    for inverse in (undo_step, None):
        engine = job().engine()
        engine.update.inverse = None  # only the schedule is looked at
        rates: list[float] = []
        again = Engine(
            model=engine.model,
            update=type(engine.update)(
                engine.model.trainable,
                OPTIMIZERS["AdamW"],
                schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
                inverse=inverse,
            ),
            loss=engine.loss,
            feed=engine.feed,
            exact=True,
            autocast=None,
        )

        def work(group: Any, engine: Engine = again, rates: list[float] = rates) -> dict[str, Tensor]:
            for step in range(3):
                rates.append(engine.update.optimizer.param_groups[0]["lr"])
                engine.attempt(step, group)
                engine.apply(step)
            return state_of(engine)

        results += on_workers(1, work)
        assert rates == [0.05, 0.025, 0.0125]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[1])


class Gate(torch.autograd.Function):
    """The backward pass stops here until something else has happened."""

    opened = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert Gate.opened.wait(5.0), "the later layers are not updated while the backward pass goes on"
        return gradient


def gated(eager: bool) -> None:
    """Behind the gate a layer is updated; before it, one has yet to get its gradient."""
    Gate.opened.clear()
    gate = Layer(lambda x: Gate.apply(x))
    inverse = undo_step if eager else None
    engine = Job(layers=lambda: [linear(), gate, linear()], micro_batch=10, inverse=inverse).engine()
    real = engine.update.some

    def some(parameters: Any) -> None:
        real(parameters)
        if any(p is engine.model.layers[2].weight for p in parameters):
            Gate.opened.set()

    engine.update.some = some  # type: ignore[method-assign]
    on_workers(1, lambda group: engine.attempt(0, group))
    engine.drop()


def test_a_layer_is_updated_while_earlier_ones_are_still_computed() -> None:
    gated(eager=True)


def test_at_the_commit_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Gate.opened, "wait", lambda seconds: Gate.opened.is_set())
    with pytest.raises(AssertionError, match="not updated"):
        gated(eager=False)


# --- taken back ----------------------------------------------------------------------------------------


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-6) for name in a)


def note_undone(engine: Any, note: Any) -> None:
    """Have ``note(units, torn)`` called whenever a step is taken back."""
    take_back = engine.holdings.take_back

    def noted(undone: set[int], *, torn: set[int]) -> None:
        if undone or torn:
            note(undone, torn)
        take_back(undone, torn=torn)

    engine.holdings.take_back = noted


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", [side_by_side(LAYERS, 1), side_by_side(LAYERS, 3), each_alone(LAYERS)])
def test_a_dropped_step_is_undone(optimizer: str, layout: Layout) -> None:
    """Also the first one, after which the optimizer had kept nothing yet."""

    def work(group: MemoryGroup) -> None:
        engine = job(optimizer).engine()
        undone: list[set[int]] = []
        assert engine.eager is not None
        note_undone(engine, lambda units, torn: undone.extend([units, torn]))
        take_place(engine, layout, group)
        for step in range(3):
            before = state_of(engine)
            engine.attempt(step, group)
            group.vote(torch.zeros(1))
            changed = state_of(engine)
            touched = engine.eager.begun
            engine.drop()
            after = state_of(engine)
            assert close(before, after)
            assert undone == ([touched, set()] if touched else []), "nothing is torn"
            undone.clear()
            assert engine.eager.begun == set()
            if touched:
                assert before.keys() != changed.keys() or not close(before, changed), "the control: it was updated"
            engine.drop()
            engine.attempt(step, group)
            group.vote(torch.zeros(1))
            engine.apply(step)
            assert not undone, "nothing is left to be undone"

    on_workers(layout.size, work)


def test_a_step_that_was_taken_back_and_done_again_ends_close_by() -> None:
    expected = trained(job(), side_by_side(LAYERS, 2))

    def again(engine: Engine, step: int, group: Any) -> None:
        engine.drop()
        engine.attempt(step, group)
        group.vote(torch.zeros(1))

    for mine, theirs in zip(trained(job(), side_by_side(LAYERS, 2), again), expected, strict=True):
        assert close(mine, theirs)


def test_without_the_undo_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    expected = trained(job(), side_by_side(LAYERS, 2))

    def again(engine: Engine, step: int, group: Any) -> None:
        engine.update.inverse = lambda *args, **kwargs: None  # type: ignore[assignment]
        engine.drop()
        engine.attempt(step, group)
        group.vote(torch.zeros(1))

    for mine, theirs in zip(trained(job(), side_by_side(LAYERS, 2), again), expected, strict=True):
        assert not close(mine, theirs)


# --- in the middle -------------------------------------------------------------------------------------


class Stumbling(torch.optim.SGD):
    """Its step number ``stumbles`` changes a parameter or two, and fails."""

    stumbles, error = 2, RuntimeError("out of luck")

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()
        if self.steps == self.stumbles:
            raise self.error


def plain_undo(optimizer: torch.optim.Optimizer, grads: Any, *, first: Any) -> None:
    """Of a first step with momentum: enough here."""
    with torch.no_grad():
        for p, grad in grads.items():
            assert p in first
            p.add_(grad, alpha=0.1)
            del optimizer.state[p]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("error", [RuntimeError("out of luck"), Broken("lost")])
def test_an_error_of_the_optimizer_is_raised_where_training_is_and_leaves_a_torn_layer(
    workers: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stumbling, "error", error)
    found: list[tuple[set[int], set[int]]] = []

    def work(group: MemoryGroup) -> None:
        engine = Job(layers=layers, optimizer=Stumbling, inverse=plain_undo).engine()
        assert engine.eager is not None
        take_place(engine, side_by_side(LAYERS, workers), group)
        before = state_of(engine)
        note_undone(engine, lambda undone, torn: found.append((undone, torn)))
        with pytest.raises(type(error), match=str(error)):
            engine.attempt(1, group)  # not the first one, which could not be had from anybody else
        engine.drop()
        after = state_of(engine)
        (undone, torn) = found.pop()
        torn_layers = {number for unit in torn for number in engine.model.units[unit].layers}
        assert len(torn) == 1
        assert not undone & torn
        for name in before:
            if name[0].isdigit() and int(name[0]) not in torn_layers:
                assert torch.allclose(before[name], after[name]), name
        assert all(len(group["params"]) > 1 for group in engine.update.optimizer.param_groups), "it sees all again"

    if workers == 1:
        on_workers(1, work)
        return
    network = Network(workers)  # a failure of one must not be the others' end before they have looked
    on_workers(workers, work, network)


def test_what_cannot_be_undone_is_torn(caplog: pytest.LogCaptureFixture) -> None:
    """Then it comes from somebody else, or is lost: but it is not taken for what it was."""

    def refuses(optimizer: Any, grads: Any, *, first: Any) -> None:
        raise UsageError("it is not a number any more")

    engine = Job(layers=layers, inverse=refuses).engine()
    assert engine.eager is not None
    found: list[tuple[set[int], set[int]]] = []
    note_undone(engine, lambda undone, torn: found.append((undone, torn)))
    on_workers(1, lambda group: engine.attempt(1, group))
    touched = engine.eager.begun
    engine.drop()
    assert found == [(set(), touched)]
    assert "not a number" in caplog.text


def test_an_optimizer_with_a_hook_before_its_step_is_refused() -> None:
    """It would run for each layer: one that clips gradients would see some of them only."""

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda *args: None)
        return optimizer

    Job(layers=layers, optimizer=hooked).engine()
    with pytest.raises(UsageError, match="hook"):
        Job(layers=layers, optimizer=hooked, inverse=undo_step).engine()


def test_after_a_break_nothing_more_is_begun() -> None:
    """The others' sums come no more: what is updated by then is undone, and no more is."""

    class Breaking(MemoryGroup):
        """Lost after so many waits."""

        waits = 3

        def finish(self, works: Any) -> None:
            works = list(works)
            if works:
                self.waits -= 1
            if self.waits < 0:
                for work in works:
                    work.let_go()
                raise Broken("lost")
            super().finish(works)

    counts: list[int] = []

    def work(group: MemoryGroup) -> None:
        engine = job("momentum").engine()
        assert engine.eager is not None
        breaking = Breaking(group.rank, group.network)
        take_place(engine, side_by_side(LAYERS, 2), breaking)
        before = state_of(engine)
        with pytest.raises(Broken):
            engine.attempt(0, breaking)
        begun = engine.eager.begun
        engine.drop()
        assert close(before, state_of(engine))
        counts.append(len(begun))

    on_workers(2, work)
    assert all(count < LAYERS - 1 for count in counts)
