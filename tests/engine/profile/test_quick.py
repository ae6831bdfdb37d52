"""Quick profiles: the bytes of a long one, and a run that does not know that it was measured."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from holdfast.data.feed import MapFeed
from holdfast.data.order import Order
from holdfast.engine.engine import Engine
from holdfast.engine.model import LayeredModel
from holdfast.engine.profile import quick
from holdfast.engine.profile.measure import measure
from holdfast.engine.profile.passes import Passes, micro_batch
from holdfast.engine.profile.quick import quick_profile
from holdfast.engine.profile.shadow import Shadow
from holdfast.engine.update import Update
from holdfast.errors import UsageError
from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.plan.template import make_templates
from tests.engine.memory_group import on_workers
from tests.engine.profile.runs import BATCH, FLOAT, LINEAR, WIDTH, Clock, Masked, Unmask, linear

LINK = Link(bandwidth=1e9, latency=1e-4)
BYTES = ("output", "output_gradient", "weight", "trainable", "slot", "saved")
Optimizers = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_engine(
    *layers: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizers = adamw,
    width: int = WIDTH,
    exact: bool = True,
    **update: Any,
) -> Engine:
    torch.manual_seed(0)
    model = LayeredModel(list(layers), seed=0, device=torch.device("cpu"))
    return Engine(
        model=model,
        update=Update(model.trainable, optimizer, **update),
        loss=mse_loss,
        feed=MapFeed(
            TensorDataset(torch.randn(16, width), torch.randn(16, width)),
            order=Order(size=16, global_batch=8, micro_batch=BATCH, seed=0),
        ),
        exact=exact,
        autocast=None,
    )


def quick_of(engine: Engine, memory: int | None = None) -> Profile:
    return quick_profile(engine, LINK, memory=memory)


def byte_counts(layers: Iterable[LayerCost]) -> list[dict[str, int]]:
    return [{name: getattr(layer, f"{name}_bytes") for name in BYTES} for layer in layers]


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def tied() -> list[nn.Module]:
    first, last = linear(), linear()
    last.weight = first.weight
    return [first, nn.ReLU(), last]


def groups(parameters: Any) -> torch.optim.Optimizer:
    """The first two have momentum, all others none."""
    listed = list(parameters)
    return torch.optim.SGD([{"params": listed[:2], "momentum": 0.9}, {"params": listed[2:]}], lr=0.1)


# --- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [linear(), nn.Dropout(0.5), nn.ReLU(), linear()],
        lambda: [Masked(dict), Unmask(), linear()],
        lambda: [Masked(tuple), Unmask()],
        lambda: [frozen(), linear(), frozen(), nn.GELU(), linear()],
        lambda: [linear(), nn.LayerNorm(WIDTH), nn.Sequential(linear(), nn.Tanh(), linear())],
        tied,
    ],
)
def test_bytes_are_those_of_a_long_profile(layers: Callable[[], list[nn.Module]]) -> None:
    engine = make_engine(*layers())
    profile = quick_of(engine)
    assert byte_counts(profile.layers) == byte_counts(measure(engine, rounds=3).costs)
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
        lambda ps: torch.optim.Adafactor(ps, lr=0.1),  # keeps rows and columns, not whole slots
        lambda ps: torch.optim.RMSprop(ps, lr=0.1, centered=True),
        groups,
    ],
)
def test_slots_are_what_the_optimizer_will_keep(optimizer: Optimizers) -> None:
    engine = make_engine(linear(), nn.ReLU(), linear(), optimizer=optimizer)
    tried = [layer.slot_bytes for layer in quick_of(engine).layers]
    assert tried == [layer.slot_bytes for layer in measure(engine, rounds=3).costs]


def test_what_is_said_of_the_machine() -> None:
    profile = quick_of(make_engine(linear(), linear()), memory=10**9)
    assert (profile.memory, profile.between, profile.inside, profile.micro_batch) == (10**9, LINK, LINK, BATCH)
    assert quick_of(make_engine(linear())).memory is None
    assert list(make_templates(profile, nodes=3, tolerate=0).by_nodes) == [1, 2]


# --- seconds ----------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Takes its time, and counts."""

    def __init__(self, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__()
        self.inner = linear()
        self.seconds = seconds
        self.calls = 0
        self._sleep = sleep

    def extra_repr(self) -> str:
        return f"{self.seconds}"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._sleep(self.seconds)
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("lazy", [False, True])
def test_slow_layers_look_slow(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    layers = [lambda: Slow(0.05, clock.sleep), lambda: Slow(0.001, clock.sleep)]
    first, second = quick_of(make_engine(*(layers if lazy else [make() for make in layers]))).layers
    assert first.forward == pytest.approx(0.05)
    assert second.forward == pytest.approx(0.001)


def test_enough_rounds_of_fast_layers_and_few_of_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    fast, slow, hurried = (Slow(seconds, clock.sleep) for seconds in (0.001, 0.06, 0.06))
    quick_of(make_engine(fast))
    quick_of(make_engine(slow))
    assert fast.calls - 1 == pytest.approx(quick.ENOUGH_SECONDS / 0.001, abs=1)
    assert slow.calls == 1 + quick.FEWEST_ROUNDS
    monkeypatch.setattr(quick, "LONGEST_SECONDS", 0.05)
    assert quick_of(make_engine(hurried)).layers[0].forward == pytest.approx(0.06)
    assert hurried.calls == 1, "the warm-up is all there is time for"


def test_layers_that_look_alike_take_the_same_time() -> None:
    layers = quick_of(make_engine(linear(), linear(), Slow(0.002), Slow(0.004), linear())).layers
    assert layers[0].forward == layers[1].forward
    assert layers[2].forward != layers[3].forward
    assert layers[4].saved_bytes != layers[1].saved_bytes
    assert layers[4].forward != layers[1].forward, "the last one has the loss"


# --- no trace ---------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Counts in one buffer, and puts another one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.seen: Tensor
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.last = x.detach().mean().reshape(1)
        out: Tensor = self.norm(x)
        return out


def digest(engine: Engine) -> str:
    """Everything that a run could be found changed by."""
    model, update = engine.model, engine.update
    parts: list[Any] = [
        (name, tensor.tolist(), id(tensor)) for name, tensor in model.module.state_dict(keep_vars=True).items()
    ]
    parts += [p.grad for layer in model.layers for p in layer.parameters()]
    parts += [module.training for module in model.module.modules()]
    parts += [dict(update.optimizer.state), update.settings(), sorted(vars(update.optimizer))]
    parts += [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    parts += [sorted(model.held)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)


def test_a_run_is_left_as_it_was() -> None:
    engine = make_engine(linear(), Restless(), nn.Dropout(0.5), linear(), exact=False, schedule=schedule, clip_norm=1.0)
    engine.model.layers[2].eval()
    hooked: list[int] = []
    engine.update.optimizer.register_step_pre_hook(lambda *args: hooked.append(1))
    random.seed("of the script")
    np.random.seed(5)
    before = digest(engine)
    quick_of(engine)
    assert digest(engine) == before
    assert hooked == []
    Passes(engine, *micro_batch(engine)).one()
    assert digest(engine) != before, "the control: a pass on its own leaves traces"


def test_a_run_that_fails_to_be_measured_is_left_as_it_was() -> None:
    engine = make_engine(linear(), Restless(), frozen(), exact=False)
    engine.model.layers[0].requires_grad_(False)
    engine.model.layers[1].requires_grad_(False)
    before = digest(engine)
    with pytest.raises(UsageError, match="requires_grad"):
        quick_of(engine)
    assert digest(engine) == before


@pytest.mark.parametrize("optimizer", [adamw, groups])
def test_training_after_it_is_training_without_it(optimizer: Optimizers) -> None:
    def weights(measured: bool) -> list[Any]:
        def work(group: Any) -> list[Any]:
            torch.manual_seed(1)
            engine = make_engine(
                *tied(), nn.Dropout(0.3), linear(), optimizer=optimizer, schedule=schedule, clip_norm=0.1
            )
            if measured:
                quick_of(engine)
            losses = []
            for step in range(3):
                losses += engine.attempt(step, group)
                group.vote(torch.zeros(1))
                engine.apply(step)
            return [losses, *(p.tolist() for p in engine.model.trainable)]

        return on_workers(1, work)[0]

    assert weights(measured=True) == weights(measured=False)


# --- layers that are not held -----------------------------------------------------------------------


def block() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.1), nn.GELU(), linear())


def test_layers_that_are_not_held_have_the_same_bytes() -> None:
    made: list[Callable[[], nn.Module]] = [linear, block, lambda: Masked(tuple), Unmask, block, linear]
    here = quick_of(make_engine(*(make() for make in made)))
    engine = make_engine(*made)
    assert engine.model.held == set()
    elsewhere = quick_of(engine)
    assert byte_counts(elsewhere.layers) == byte_counts(here.layers)
    assert all(layer.forward > 0 for layer in elsewhere.layers)
    assert [layer.backward > 0 for layer in elsewhere.layers] == [layer.backward > 0 for layer in here.layers]


def test_one_layer_at_a_time_gets_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(linear(), linear, block, linear(), block, linear)
    model = engine.model
    assert model.held == {0, 3}
    lent: list[set[int]] = []
    hold = model.hold

    def watched(layers: Iterable[int]) -> None:
        hold(layers)
        lent.append(model.held - {0, 3})

    monkeypatch.setattr(model, "hold", watched)
    before = digest(engine)
    quick_of(engine)
    assert lent == [{1}, {2}, {4}, {5}]
    assert digest(engine) == before
    assert all(p.isnan().all() for p in model.layers[1].parameters())
    assert not any(p.isnan().any() for p in model.layers[0].parameters())


class Peak(TorchDispatchMode):
    """The most bytes of tensors made within it that there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._alive[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return result


def test_memory_is_bounded_by_a_layer() -> None:
    width, count = 256, 24
    size = width * width * FLOAT
    engine = make_engine(*[lambda: nn.Linear(width, width, bias=False)] * count, width=width)
    with Peak() as peak:
        profile = quick_of(engine)
    assert sum(layer.weight_bytes for layer in profile.layers) == count * size
    # One layer and its gradient; later weights, gradient, two slots of its double, and what an update needs meanwhile.
    assert 4 * size < peak.bytes < 7 * size
    with Peak() as control:
        engine.model.hold(range(count))
    assert control.bytes == count * size


# --- optimizers that cannot be tried ------------------------------------------------------------------


class Closed(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return closure() + super().step()


class Wrapper(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        raise AssertionError("a step on real parameters")


@pytest.mark.parametrize("optimizer", [lambda ps: Closed(ps, lr=0.1), Wrapper])
def test_an_optimizer_that_cannot_be_tried_is_taken_for_adam(optimizer: Optimizers) -> None:
    engine = make_engine(linear(), optimizer=optimizer)
    shadow = Shadow(engine.update)
    assert shadow.kept(engine.model.trainable) == (2 * LINEAR, 0.0)
    assert shadow.is_guess
    assert "not known" in quick_of(engine).notes["slots"]
    assert quick_of(make_engine(linear())).notes["slots"] == "tried out"
