"""Running statistics: the same bits on every layout, and those of a plain loop over the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.cluster import talk
from holdfast.cluster.group import alone
from holdfast.engine import measured, statistics, training_calls
from holdfast.engine.engine import Engine
from holdfast.errors import Broken, UsageError
from holdfast.plan.layout import side_by_side
from tests.engine.memory_group import on_workers
from tests.engine.norms import MODELS, OwnRule, Recent, Turned, images, resnet, with_norm, within
from tests.engine.pipelines import (
    WIDTH,
    Job,
    assert_same,
    assert_same_everywhere,
    lay,
    numbers,
    one_step,
    same_bits,
    state_of,
    take_place,
    train,
    train_alone,
)

Make = Callable[[], list[nn.Module]]


def job_of(layers: Make, **changes: Any) -> Job:
    """The third step of an epoch is ragged: 8 samples in micro-batches of 3, 3 and 2."""
    return Job(layers=layers, **{"data": numbers(32), "global_batch": 12, "micro_batch": 3, "steps": 3, **changes})


def resnet_job(**changes: Any) -> Job:
    return job_of(resnet, data=images(32), loss=cross_entropy, **changes)


def buffers_of(engine: Engine) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in engine.model.module.named_buffers()}


# --- the same everywhere --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_statistics_do_not_depend_on_the_layout(name: str) -> None:
    assert_same_everywhere(job_of(MODELS[name]))


@pytest.mark.parametrize("direct", [8, 1], ids=["told to all", "in rounds"])
def test_a_resnet_is_the_same_on_1_2_4_workers_and_in_pipelines(monkeypatch: pytest.MonkeyPatch, direct: int) -> None:
    """In steps of 5 micro-batches, which 4 workers share unevenly, and of one."""
    monkeypatch.setattr(talk, "DIRECT", direct)
    job = resnet_job(micro_batch=2, global_batch=10, clip_norm=1.0, steps=4)
    assert_same(
        job, side_by_side(4, 2), side_by_side(4, 4), lay(([0, 1], [2, 2]), ([2, 3], [1, 3])), lay(([1, 0], [3, 1]))
    )


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(3, track_running_stats=True, affine=True), nn.BatchNorm1d(3)])
def test_inputs_of_three_dimensions(norm: nn.Module) -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.view(len(x), 3, 2)).flatten(1)

    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}

    def make() -> list[nn.Module]:
        for name, buffer in norm.named_buffers():
            buffer.copy_(before[name])
        return within(Sequences())

    alone_with_it = train_alone(job_of(make))
    assert not same_bits(alone_with_it.tensors["1.norm.running_mean"], before["running_mean"])


@pytest.mark.parametrize("exact", [True, False])
def test_workers_agree_on_what_a_module_combines_itself(exact: bool) -> None:
    """Its buffers are replaced in the pass, read by it, of several types, and drawn at random in the end."""
    job = job_of(lambda: within(Recent()), exact=exact)
    expected = train_alone(job)
    assert expected.tensors["1.samples"] == 32
    torch.rand(5)
    assert not train_alone(job).differs_from(expected)
    for result in train(job, side_by_side(3, 2)):
        assert result.tensors["1.samples"] == 32
        if exact:
            assert result.differs_from(expected) in ([], ["1.noise"])  # threads share torch's generator


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_mixed_precision(autocast: torch.dtype) -> None:
    assert_same(resnet_job(autocast=autocast), side_by_side(4, 2))


def test_fast_mode_follows_the_same_rule() -> None:
    """Weights differ in the last bits, and statistics no more than that."""
    expected = train_alone(resnet_job(exact=False)).tensors
    assert expected["1.norm1.num_batches_tracked"] == 4 + 4 + 3
    for layout in (side_by_side(4, 3), lay(([0, 1], [2, 2]), ([2], [4]))):
        for result in train(resnet_job(exact=False), layout):
            for name, tensor in result.tensors.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


# --- as in plain torch ------------------------------------------------------------------------------


def plain(job: Job, autocast: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Buffers after some steps, of the engine and of a loop over the same micro-batches with the same weights."""
    engine, model = job.engine(), nn.Sequential(*job.layers())
    for step in range(job.steps):
        model.load_state_dict(dict(engine.model.module.state_dict()) | dict(model.named_buffers()))
        for index in range(engine.order.micro_batches(step)):
            x = engine.feed.read(step, index)[0]
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                model(x)
        one_step(engine, alone(), step)
    return buffers_of(engine), {name: buffer.clone() for name, buffer in model.named_buffers()}


ONCE = sorted(MODELS.keys() - {"recomputed, reentrant", "in two layers, with weights"})  # torch counts the first twice


@pytest.mark.parametrize("name", ONCE)
def test_statistics_are_those_of_a_plain_loop_to_the_bit(name: str) -> None:
    ours, torchs = plain(job_of(MODELS[name]))
    assert [key for key in torchs if not same_bits(ours[key], torchs[key])] == []


@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_resnets_statistics_are_those_of_a_plain_loop_to_the_bit(
    momentum: float | None, autocast: torch.dtype | None
) -> None:
    job = job_of(lambda: resnet(8, momentum=momentum), data=images(40), loss=cross_entropy, autocast=autocast)
    ours, torchs = plain(job, autocast)
    assert len(torchs) == 15
    assert [key for key in torchs if not same_bits(ours[key], torchs[key])] == []


@pytest.mark.parametrize("make", [Turned, lambda: nn.InstanceNorm1d(2, track_running_stats=True)])
def test_where_torch_rounds_later_the_last_bit_may_differ(make: Callable[[], nn.Module]) -> None:
    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = make()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) if isinstance(self.norm, Turned) else self.norm(x.view(len(x), 2, 3)).flatten(1)

    ours, torchs = plain(job_of(lambda: within(Reshaped())))
    for name, tensor in torchs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=3e-7, atol=1e-7)


# --- attempts that are dropped, and modules that are no more ---------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_a_dropped_attempt_leaves_no_trace(exact: bool) -> None:
    def work(group: Any) -> dict[str, Tensor]:
        engine = resnet_job(exact=exact).engine()
        take_place(engine, side_by_side(4, 2), group)
        one_step(engine, group, 0)
        before = state_of(engine)
        engine.attempt(1, group)
        group.vote(torch.zeros(1))
        engine.drop()
        assert all(same_bits(now, before[name]) for name, now in state_of(engine).items())
        one_step(engine, group, 1)
        one_step(engine, group, 2)
        return state_of(engine)

    expected = train(resnet_job(exact=exact), side_by_side(4, 2))[0].tensors
    for found in on_workers(2, work):
        assert [name for name in expected if not same_bits(expected[name], found[name])] == []


def test_a_pass_that_breaks_inside_a_module_leaves_no_trace() -> None:
    def breaks(x: Tensor, norm: nn.Module) -> Tensor:
        def lost(*args: Any) -> None:
            raise Broken("a worker was lost")

        norm(x).sum()
        norm._check_input_dim = lost  # called in its forward pass
        return norm(x)

    engine = job_of(lambda: with_norm(breaks)).engine()
    norm = engine.model.layers[1].inner[0]
    before = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    with pytest.raises(Broken):
        engine.attempt(0, alone())
    engine.drop()
    after = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert int(norm.num_batches_tracked) == 0
    assert "forward" not in vars(norm)


def test_a_module_that_was_replaced_is_refused() -> None:
    engine = resnet_job().engine()
    engine.model.layers[1].norm1 = nn.BatchNorm2d(4)
    with pytest.raises(UsageError, match="replaced"):
        engine.attempt(0, alone())


def test_a_rule_of_its_own_is_refused_by_name_in_exact_mode_only() -> None:
    with pytest.raises(UsageError, match=r"buffer '1\.running_mean'.*\n?.*combine_statistics"):
        job_of(lambda: within(OwnRule(WIDTH))).engine().attempt(0, alone())
    train(job_of(lambda: within(OwnRule(WIDTH)), exact=False), side_by_side(3, 2))


def test_what_a_module_combines_itself_keeps_its_shape() -> None:
    class Grows(Recent):
        def combine_statistics(self, measured: list[dict[str, Tensor]]) -> None:
            self.largest = torch.ones(WIDTH + 1)

    engine = job_of(lambda: within(Grows())).engine()
    engine.attempt(0, alone())
    with pytest.raises(UsageError, match="'largest'"):
        engine.apply(0)


def test_what_a_module_combines_itself_belongs_to_one_layer() -> None:
    recent = Recent()
    with pytest.raises(UsageError, match="several layers"):
        job_of(lambda: [recent, nn.Tanh(), recent]).engine()


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "messages"), [("plain", 1), ("called twice", 2)])
def test_a_step_needs_one_exchange_unless_modules_are_called_again(
    monkeypatch: pytest.MonkeyPatch, name: str, messages: int
) -> None:
    sent: list[int] = []
    exchange = measured._share

    def counting(group: Any, *args: Any) -> Any:
        sent.append(group.rank)
        return exchange(group, *args)

    monkeypatch.setattr(measured, "_share", counting)
    train(job_of(MODELS[name], steps=1), side_by_side(3, 3))
    assert sorted(sent) == sorted([0, 1, 2] * messages)


# --- controls -------------------------------------------------------------------------------------


def backwards(item: tuple[tuple[int, int], object]) -> tuple[int, int]:
    return -item[0][0], item[0][1]


def own_only(*args: Any) -> Any:
    return args[2]


def counted_again(*args: Any) -> Any:
    output, measured = training_calls.call(*args)
    return output, 2 * measured


@pytest.mark.parametrize(
    ("module", "attribute", "broken"),
    [
        (statistics, "_cell", backwards),
        (statistics, "exchange", own_only),
        (statistics, "call", counted_again),
        (statistics, "mix", lambda averages, ones: None),
    ],
    ids=["another order", "no exchange", "counted twice", "not applied"],
)
def test_control_what_is_broken_is_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, attribute: str, broken: Any
) -> None:
    expected = train_alone(resnet_job()).tensors
    monkeypatch.setattr(module, attribute, broken)
    found = train(resnet_job(), side_by_side(4, 2))[0].tensors
    wrong = {name for name in expected if not same_bits(expected[name], found[name])}
    assert wrong >= {"1.norm1.running_mean", "0.1.running_var"}
