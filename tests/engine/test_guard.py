"""Writes of a forward pass into the model: refused by name in exact mode, equal everywhere or refused in fast mode."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from holdfast.checkpoint import save
from holdfast.checkpoint.series import folder_of
from holdfast.cluster.events import Events
from holdfast.cluster.group import alone
from holdfast.engine.buffers import ChangingBuffers
from holdfast.engine.engine import Engine
from holdfast.engine.guard import LOOK, ROUND, Guard
from holdfast.engine.measures import evaluate
from holdfast.engine.model import LayeredModel
from holdfast.engine.progress import Progress
from holdfast.engine.state import State
from holdfast.errors import Broken, UsageError
from holdfast.plan.layout import side_by_side
from holdfast.recovery.resume import Checkpoints, Resumer
from holdfast.run.run import Run
from holdfast.sync.selsync import SelSync
from tests.engine.memory_group import on_workers
from tests.engine.pipelines import (
    CPU,
    WIDTH,
    Job,
    Layer,
    each_alone,
    lay,
    linear,
    mlp,
    one_step,
    same_bits,
    take_place,
)
from tests.engine.writers import Counts, CountsEvaluations, How, MakesBuffers, What, Writer

KINDS: dict[What, str] = {"buffer": "buffer", "frozen": "frozen parameter", "trained": "parameter"}


def job_of(*layers: nn.Module, exact: bool = True, **settings: Any) -> Job:
    return Job(layers=lambda: [linear(), *layers, linear()], exact=exact, **settings)


def step(engine: Engine, number: int) -> None:
    engine.attempt(number, alone())
    engine.apply(number)


# --- exact mode: refused by name ----------------------------------------------------------------------


@pytest.mark.parametrize("what", get_args(What))
@pytest.mark.parametrize("how", get_args(How))
def test_every_write_is_refused_by_name_in_its_step(how: How, what: What) -> None:
    engine = job_of(Writer(how, what)).engine()
    with pytest.raises(UsageError) as caught:
        engine.attempt(0, alone())
    assert caught.value.exit_code == 2
    assert f"the forward pass changes {KINDS[what]} '1.kept'" in str(caught.value)


@pytest.mark.parametrize("what", ["buffer", "frozen"])
@pytest.mark.parametrize("how", get_args(How))
def test_a_write_that_begins_late_is_refused_in_its_step(how: How, what: What) -> None:
    engine = job_of(Writer(how, what, first=5 + 2 + 5)).engine()  # micro-batches: every second step is ragged
    for number in range(3):
        step(engine, number)
    with pytest.raises(UsageError, match=r"'1\.kept'"):
        step(engine, 3)


def test_a_write_of_an_attempt_that_breaks_is_refused_too() -> None:
    """The attempt is dropped, but not what it has written."""

    class Breaks(Writer):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise Broken("a worker was lost")

    engine = job_of(Breaks("through .data")).engine()
    with pytest.raises(UsageError, match=r"'1\.kept'"):
        engine.attempt(0, alone())


def test_an_embedding_that_renormalises_its_weight_is_refused() -> None:
    """torch writes into the rows that a micro-batch uses, so workers would come to different weights."""
    table = nn.Embedding(5, WIDTH, max_norm=0.1)
    data = TensorDataset(torch.arange(13) % 5, torch.zeros(13, WIDTH))
    engine = Job(layers=lambda: [table, linear()], data=data).engine()
    with pytest.raises(UsageError, match=r"changes parameter '0\.weight'.*max_norm"):
        engine.attempt(0, alone())


@pytest.mark.parametrize("empty", [True, False], ids=["filled", "made"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_a_buffer_that_appears_is_refused(exact: bool, empty: bool) -> None:
    layer = MakesBuffers()
    if empty:
        layer.register_buffer("cache", None)
    engine = job_of(layer, exact=exact).engine()
    with pytest.raises(UsageError, match="makes or removes buffer 'cache' of a MakesBuffers"):
        engine.attempt(0, alone())


class Centers(nn.Module):
    """A loss with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.center.data.lerp_(output.detach().mean(0), 0.1)
        return (output - self.center - target).square().mean()


class Replaces(Centers):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.center = self.center.lerp(output.detach().mean(0), 0.1)
        return (output - self.center - target).square().mean()


@pytest.mark.parametrize("loss", [Centers, Replaces])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_a_loss_that_keeps_something_is_refused(exact: bool, loss: type[Centers]) -> None:
    engine = job_of(linear(), exact=exact, loss=loss()).engine()
    with pytest.raises(UsageError, match="changes buffer of the loss 'center'"):
        engine.attempt(0, alone())


def test_a_loss_with_a_table_is_welcome() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(WIDTH))
    data = TensorDataset(torch.randn(13, WIDTH), torch.arange(13) % WIDTH)
    step(job_of(linear(), loss=loss, data=data).engine(), 0)


def test_an_evaluation_that_writes_is_refused() -> None:
    job = job_of(CountsEvaluations())
    engine = job.engine()
    step(engine, 0)
    with pytest.raises(UsageError, match=r"the evaluation changes buffer '1\.looks'"):
        evaluate(engine, job.data, {"loss": job.loss}, alone())


class Tables(nn.Module):
    """Buffers and weights as models have them, that only the script writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = linear().requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("nothing", None)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("nan", torch.tensor(float("nan")))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("turned", torch.randn(4, 5).t())
        self.register_buffer("wide", torch.ones(1).expand(1000))
        self.register_buffer("sparse", torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.frozen(x)) + self.wide[0] + self.turned[0, 0]


def test_a_model_that_writes_nothing_is_welcome() -> None:
    tables = Tables()
    job = job_of(tables, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.1))
    engine = job.engine()
    for number in range(3):
        step(engine, number)
        evaluate(engine, job.data, {"loss": job.loss}, alone())
        with torch.no_grad():
            tables.mask.fill_(float(number))  # by the script, between steps, as torch counts it
        engine.look_at(None)


# --- what is too large to be compared in each step ----------------------------------------------------


def large(first: int) -> Engine:
    writer = Writer("through .data", "frozen", first=first, size=40 * LOOK // 4)
    return job_of(writer, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-4)).engine()


def test_a_large_tensor_is_compared_in_the_first_step() -> None:
    with pytest.raises(UsageError, match=r"frozen parameter '1\.kept'"):
        large(first=0).attempt(0, alone())


def test_a_late_write_into_a_large_tensor_is_found_within_a_round_of_steps() -> None:
    engine = large(first=5)  # micro-batches: from the second step on
    step(engine, 0)
    found = None
    for number in range(1, ROUND + 1):
        try:
            step(engine, number)
        except UsageError as e:
            found = number, str(e)
            break
    assert found is not None
    assert "frozen parameter '1.kept'" in found[1]
    assert found[0] > 1, "40 MiB are not compared in each step: else this test tests nothing"


def test_a_late_write_into_a_large_tensor_is_found_before_it_is_saved_or_hashed() -> None:
    engine = large(first=5)
    step(engine, 0)
    engine.look_at(None)
    step(engine, 1)
    with pytest.raises(UsageError, match=r"frozen parameter '1\.kept'"):
        engine.look_at(None)


def test_a_late_write_is_found_before_it_is_sent_and_a_new_generation_does_not_hide_it() -> None:
    job = job_of(Writer("through .data", "frozen", first=5, size=40 * LOOK // 4))
    engine = job.engine()
    state = State(engine.model, engine.update, Progress(), look=engine.look_at)
    step(engine, 0)
    state.read(engine.model.units[1])
    engine.attempt(1, alone())
    engine.drop()
    engine.enter(engine.layout, alone())
    state.read(engine.model.units[0])
    with pytest.raises(UsageError, match=r"frozen parameter '1\.kept'"):
        state.read(engine.model.units[1])


def test_values_from_a_checkpoint_are_no_writes_of_a_pass(tmp_path: Path) -> None:
    """They are read into the tensors' memory, past torch, also while a run goes on."""
    frozen = Layer(lambda x, inner: inner(x), linear().requires_grad_(False))
    engine = job_of(frozen, Counts(), exact=False).engine()
    state = State(engine.model, engine.update, Progress(), look=engine.look_at)
    resumer = Resumer(Checkpoints(folder=tmp_path), state, Events(None))
    step(engine, 0)
    saved = contents(engine)
    save(folder_of(tmp_path, 1), state.tree())
    with torch.no_grad():
        engine.model.module.get_parameter("1.inner.0.weight").fill_(3.0)
    step(engine, 1)
    resumer.fill(1)
    assert_equal(contents(engine), saved)
    engine.attempt(1, alone())
    engine.drop()
    assert_equal(contents(engine), saved)
    state.tree()


def test_every_byte_is_compared_in_a_round() -> None:
    """Whatever the sizes: each of many tensors is written once, and found."""
    layer = Layer(lambda x, *_: x, linear())
    for number in range(70):
        layer.register_buffer(f"b{number}", torch.zeros(LOOK // 3 // 4 * (1 + number % 5)))
    guard = Guard(LayeredModel(layer, seed=0, device=CPU), trained=True)
    guard.begin()
    assert guard.changed() == []
    with torch.no_grad():
        for number in range(70):
            layer.get_buffer(f"b{number}").data[-1] = 1
    found: set[str] = set()
    rounds = []
    for _ in range(ROUND):
        guard.begin()
        rounds.append({each.name for each in guard.changed()} - found)
        found |= rounds[-1]
    assert found == {f"b{number}" for number in range(70)}
    assert max(map(len, rounds)) < 10, "a part in each step"


def test_values_that_only_change_places_are_found() -> None:
    """A sum would not see that a queue was moved on."""
    layer = Layer(lambda x, *_: x, linear())
    layer.register_buffer("queue", torch.arange(4.0))
    guard = Guard(LayeredModel(layer, seed=0, device=CPU), trained=True)
    guard.begin()
    layer.queue.data.copy_(layer.queue.roll(1))
    assert [each.name for each in guard.changed()] == ["queue"]


# --- fast mode: any buffer may change -----------------------------------------------------------------


def contents(engine: Engine) -> dict[str, Tensor]:
    """The buffers of the layers that are held, from the module: where the next pass and a checkpoint find them."""
    held = {str(number) for number in engine.model.held}
    named = engine.model.module.named_buffers()
    return {name: buffer.clone() for name, buffer in named if name.split(".")[0] in held}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not same_bits(mine[name], theirs[name])] == []


LAYOUTS = {
    "side by side": side_by_side(3, 3),
    "pipelines": lay(([3, 1], [2, 1]), ([0], [3]), ([4, 2], [1, 2]), size=6),
    "each alone": each_alone(3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_are_equal_on_all_holders_after_each_step(layout: str) -> None:
    def work(group: Any) -> list[dict[str, Tensor]]:
        engine = job_of(Counts(), exact=False).engine()
        take_place(engine, LAYOUTS[layout], group)
        return [contents(engine) for number in range(3) if one_step(engine, group, number)]

    found = [steps for steps in on_workers(LAYOUTS[layout].size, work) if steps[0]]
    first = found[0]
    assert len(found) == sum(1 in layers for line in LAYOUTS[layout].pipelines for layers in line.layers)
    for other in found[1:]:
        for mine, theirs in zip(first, other, strict=True):
            assert_equal(mine, theirs)
    for before, after in itertools.pairwise(first):
        changed = {name for name in before if not same_bits(before[name], after[name])}
        assert changed >= {"1.batches", "1.average", "1.short", "1.wave", "1.queue"}
    last, table = first[-1], Counts().table
    assert torch.equal(last["1.table"], table), "what does not change is not averaged: a third of it, three times, is"


def test_a_dropped_attempt_leaves_no_trace_and_a_redone_step_is_that_of_a_clean_one() -> None:
    def work(disturb: bool) -> Any:
        def on(group: Any) -> dict[str, Tensor]:
            engine = job_of(Counts(), exact=False).engine()
            take_place(engine, side_by_side(3, 2), group)
            one_step(engine, group, 0)
            if disturb:
                before = contents(engine)
                engine.attempt(1, group)
                group.vote(torch.zeros(1))
                engine.drop()
                assert_equal(contents(engine), before)
                engine.attempt(1, group)  # begins by dropping what came before, whoever forgot to
                group.vote(torch.zeros(1))
            one_step(engine, group, 1)
            return contents(engine)

        return on

    clean, redone = on_workers(2, work(False)), on_workers(2, work(True))
    for each in [clean[1], *redone]:
        assert_equal(each, clean[0])


def test_control_without_the_copies_a_dropped_attempt_leaves_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChangingBuffers, "restore", lambda self: None)
    engine = job_of(Counts(), exact=False).engine()
    step(engine, 0)
    before = contents(engine)
    engine.attempt(1, alone())
    engine.drop()
    assert {name for name, now in contents(engine).items() if not same_bits(now, before[name])} >= {"1.batches"}


def test_an_attempt_that_breaks_halfway_is_undone() -> None:
    class Breaks(nn.Module):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise Broken("a worker was lost")
            return x

    breaks = Breaks()
    engine = job_of(Counts(), breaks, exact=False).engine()
    step(engine, 0)
    before, breaks.broken = contents(engine), True
    with pytest.raises(Broken):
        engine.attempt(1, alone())
    engine.drop()
    assert_equal(contents(engine), before)
    breaks.broken = False
    step(engine, 1)
    clean = job_of(Counts(), Breaks(), exact=False).engine()
    for number in range(2):
        step(clean, number)
    assert contents(engine)["1.batches"].item() == contents(clean)["1.batches"].item() == 5 + 2


@pytest.mark.parametrize("what", ["frozen", "trained"])
@pytest.mark.parametrize("how", get_args(How))
def test_parameters_are_refused_in_fast_mode_too(how: How, what: What) -> None:
    engine = job_of(Writer(how, what), exact=False).engine()
    with pytest.raises(UsageError, match=rf"changes {KINDS[what]} '1\.kept'"):
        engine.attempt(0, alone())


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    class Grows(Writer):
        def write(self, value: Tensor) -> None:
            self.kept = torch.cat([self.kept, value.view(1)])

    engine = job_of(Grows("replaced"), exact=False).engine()
    with pytest.raises(UsageError, match=r"replaces buffer '1\.kept' by one of another shape"):
        engine.attempt(0, alone())


def test_an_evaluation_leaves_buffers_as_they_were_in_fast_mode() -> None:
    job = job_of(CountsEvaluations(), exact=False)
    engine = job.engine()
    step(engine, 0)
    evaluate(engine, job.data, {"loss": job.loss}, alone())
    assert contents(engine)["1.looks"].item() == 0.0
    step(engine, 1)


def test_a_meeting_instead_of_a_step_averages_no_buffers_of_that_step() -> None:
    """Else the mean would have a forward pass in it that never counted, and the next attempt would undo the mean."""
    job = job_of(Counts(), exact=False)
    policy = SelSync(delta=0.5, aggregate="gradients")
    batch = {"global_batch": job.global_batch, "micro_batch": job.micro_batch}
    run = Run(
        layers=job.layers(),
        loss=job.loss,
        optimizer=job.optimizer,
        data=job.data,
        numerics="fast",
        sync=policy,
        **batch,
    )
    list(run.steps(3))
    before = contents(run.engine)
    run.engine.attempt(3, alone())
    assert not same_bits(contents(run.engine)["1.average"], before["1.average"])
    training, group = run._apart, run._cohort.group
    assert training is not None
    assert group is not None
    training.agree(group, full=True)
    assert_equal(contents(run.engine), before)
    mean = training._replica.contribution(full=True)
    training._replica.adopt(3, [part + 1 for part in mean], full=True)
    adopted = contents(run.engine)
    run.engine.drop()
    assert_equal(contents(run.engine), adopted)


def test_a_log_refuses_buffers_that_change_in_fast_mode() -> None:
    """A replay has records of what came in, and none of what a buffer was."""

    class Nothing:
        """A log that keeps nothing."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    engine = job_of(Counts(), exact=False).engine()
    logged = Engine(
        model=engine.model,
        update=engine.update,
        loss=engine.loss,
        feed=engine.feed,
        exact=False,
        autocast=None,
        log=Nothing(),  # type: ignore[arg-type]
    )
    with pytest.raises(UsageError, match=r"changes buffer '1\."):
        logged.attempt(0, alone())


def test_untouched_layers_train_as_before() -> None:
    """The control: nothing is refused and nothing changes where nobody writes."""
    for exact in (True, False):
        engine = Job(layers=mlp, exact=exact).engine()
        for number in range(2):
            step(engine, number)
