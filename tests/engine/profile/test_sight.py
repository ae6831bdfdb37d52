"""What the key of a profile sees: every setting that may cost time, wherever a script keeps it."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from holdfast.engine.profile.measure import read_facts
from holdfast.engine.profile.sight import Sight
from tests.engine.profile.runs import WIDTH, linear, make_run
from tests.engine.profile.settings import OTHERS


class Layer(nn.Module):
    def __init__(self, setting: Any, name: str = "setting") -> None:
        super().__init__()
        self.inner = linear()
        setattr(self, name, setting)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def key(layer: nn.Module, **settings: Any) -> str:
    return read_facts(make_run(layer, linear(), **settings).engine)[0].key


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["setting", "_private"])
def test_another_setting_is_another_model(kind: str, name: str) -> None:
    this, other = OTHERS[kind]
    assert key(Layer(this(), name)) == key(Layer(this(), name))
    assert key(Layer(this(), name)) != key(Layer(other(), name))


def test_torchs_own_settings_are_seen() -> None:
    norms = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=1e-3), nn.LayerNorm([WIDTH], elementwise_affine=False)]
    assert len({key(norm) for norm in norms}) == 3
    encoders = [nn.TransformerEncoderLayer(WIDTH, 2, activation=act) for act in (torch.relu, torch.tanh)]
    assert len({key(encoder) for encoder in encoders}) == 2


def test_what_training_changes_is_not_a_setting() -> None:
    layer = Layer(nn.BatchNorm1d(WIDTH))
    before = key(layer, numerics="fast")
    layer.eval()
    assert isinstance(layer.setting, nn.BatchNorm1d)
    assert layer.setting.num_batches_tracked is not None
    layer.setting.num_batches_tracked += 1
    layer.inner.weight.data.zero_()
    layer.inner.register_forward_hook(lambda *_: None).remove()
    assert key(layer, numerics="fast") == before


def test_a_shared_weight_is_seen() -> None:
    def run(*, tied: bool) -> str:
        first, last = linear(), linear()
        if tied:
            last.weight = first.weight
        return read_facts(make_run(first, last).engine)[0].key

    assert run(tied=True) == run(tied=True)
    assert run(tied=True) != run(tied=False)


def loss(output: Tensor, target: Tensor, times: int = 1) -> Tensor:
    return mse_loss(output, target) * times


def make_loss(times: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: loss(output, target, times)


class Loss:
    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target, self.times)

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


@pytest.mark.parametrize(
    "make",
    [
        make_loss,
        Loss,
        lambda times: Loss(times).method,
        lambda times: functools.partial(loss, times=times),
        lambda times: functools.wraps(loss)(make_loss(times)),
        lambda times: torch.no_grad()(make_loss(times)),
        lambda times: nn.HuberLoss(delta=times),
    ],
)
def test_another_loss_is_another_model(make: Callable[[int], Any]) -> None:
    assert key(linear(), loss=make(1)) == key(linear(), loss=make(1))
    assert key(linear(), loss=make(1)) != key(linear(), loss=make(2))


def written(source: str) -> str:
    names: dict[str, Any] = {"__name__": "a script", "torch": torch, "nn": nn}
    exec(source, names)
    return key(names["Layer"](WIDTH, WIDTH))


SCRIPT = """
import functools
TIMES = 1
def helper(x, n=2):
    return x * n
@functools.lru_cache
def size():
    return 3
class Base(nn.Linear):
    heads = 4
    @property
    def tail(self):
        return 5
class Layer(Base):
    def forward(self, x):
        for _ in range(TIMES * size()):
            x = helper(x)
        return super().forward(x)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("TIMES = 1", "TIMES = 7"),
        ("n=2", "n=7"),
        ("x * n", "x + n"),
        ("heads = 4", "heads = 7"),
        ("return 3", "return 7"),
        ("return 5", "return 7"),
    ],
)
def test_what_a_layer_reaches_for_is_seen(old: str, new: str) -> None:
    assert written(SCRIPT) == written(SCRIPT + "# a comment\nRATE = 0.1\n")
    assert written(SCRIPT) != written(SCRIPT.replace(old, new))


def test_the_code_of_an_optimizer_counts_but_not_its_rate() -> None:
    class Mine(torch.optim.SGD):
        pass

    def made(cls: type[torch.optim.SGD], **settings: Any) -> str:
        return key(linear(), optimizer=lambda ps: cls(ps, **settings))

    assert made(Mine, lr=0.1) == made(Mine, lr=0.2)
    assert len({made(Mine), made(torch.optim.SGD), made(torch.optim.SGD, momentum=0.9)}) == 3


def test_order_that_means_nothing_is_not_seen() -> None:
    assert Sight().see({"a": 1, "b": [2]}) == Sight().see({"b": [2], "a": 1})
    assert Sight().see([1, 2]) != Sight().see([2, 1])


def compiled_in_place() -> nn.Module:
    layer = Layer(logging.getLogger())
    layer.compile()
    return layer


def compiled() -> Any:
    return torch.compile(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("make", [compiled, compiled_in_place])
def test_what_the_compiler_notes_is_not_a_setting(make: Callable[[], nn.Module]) -> None:
    """Its notes have ids of objects in them."""
    one, other = make(), make()
    assert key(one) == key(other)


def keys() -> dict[str, str]:
    """Of models with every kind of setting, for another process to compare."""
    return {kind: key(Layer(this())) for kind, (this, _) in OTHERS.items()} | {
        "words": key(Layer({f"word {n}" for n in range(50)})),
        "indices of words": key(Layer({word: len(word) for word in {"a", "bb", "ccc", "dddd"}})),
        "loss": key(linear(), loss=make_loss(3)),
        "script": written(SCRIPT),
    }


def test_another_process_sees_the_same() -> None:
    """With other hashes. Some of the settings are the same at first: a default configuration, an empty change."""
    program = "import json; from tests.engine.profile.test_sight import keys; print(json.dumps(keys()))"
    environment = {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    seen = json.loads(result.stdout)
    assert seen == keys()
    assert len(set(seen.values())) == len({*OTHERS} - {"nested", "enum", "attribute of a dict"}) + 4
