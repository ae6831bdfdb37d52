"""The label of a run: what differs is named, and what means the same is the same."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast import LocalSGD, LogSettings, Numerics, Placement
from holdfast.cluster.labels import Label, difference
from holdfast.data.partition import SelDP
from holdfast.data.source import Data
from holdfast.recovery.resume import Checkpoints
from holdfast.run.label import PASSES, UPDATE, make_label, make_shape
from holdfast.run.parts import make_engine
from holdfast.run.settings import Settings

DATA = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
SGD = torch.optim.SGD
ADAM = torch.optim.AdamW


def label_of(**changes: Any) -> Label:
    """The label of a small run, with some settings changed."""
    settings: dict[str, Any] = {
        "model": None,
        "layers": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.LayerNorm(2), nn.Linear(2, 1)),
        "loss": nn.functional.mse_loss,
        "weight": None,
        "optimizer": lambda params: SGD(params, lr=0.1),
        "data": Data(DATA),
        "global_batch": 4,
        "micro_batch": 2,
        "seed": 0,
        "schedule": None,
        "clip_norm": None,
        "numerics": Numerics(),
        "placement": Placement(),
        "checkpoint": None,
        "state": {},
        "sync": "every-step",
    }
    made = Settings(**{**settings, **changes})
    return make_label(made, make_engine(made)[0]) | make_shape(made)


def layers(*middle: nn.Module) -> dict[str, Any]:
    return {"layers": nn.Sequential(nn.Linear(2, 2), *middle, nn.Linear(2, 1))}


def in_groups(rate: float, *, first: int = 1) -> Callable[[Any], Any]:
    return lambda params: SGD([{"params": params[:first], "lr": rate}, {"params": params[first:]}], lr=0.1)


class Scaled(nn.Module):
    """A layer with settings of many kinds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        vars(self).update(settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Buffered(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(2, dtype=dtype))


class Focal:
    """A loss that is no function."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs().pow(self.gamma).mean()


class Sharpness(SGD):
    def __init__(self, params: Any, *, lr: float, rho: float) -> None:
        super().__init__(params, lr=lr)
        self.rho = rho


def frozen() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    return layer


def weighted(weight: float) -> Callable[..., Any]:
    return lambda output, target: weight * nn.functional.mse_loss(output, target)


# By kind: the changes of one worker and those of another, and words that the difference has to have.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "seed": ({}, {"seed": 1}, ["seed", "0 against 1"]),
    "batch": ({}, {"global_batch": 8}, ["global_batch", "4 against 8"]),
    "shuffle": ({}, {"data": Data(DATA, shuffle=False)}, ["shuffle"]),
    "clip_norm": ({"clip_norm": 1}, {"clip_norm": 2.5}, ["clip_norm", "1 against 2.5"]),
    "mode": ({}, {"numerics": Numerics(mode="fast")}, ["numerics", "exact against fast"]),
    "autocast": ({}, {"numerics": Numerics(autocast=torch.bfloat16)}, ["autocast", "None against bfloat16"]),
    "dropout": (layers(nn.Dropout(0.1)), layers(nn.Dropout(0.2)), ["module 1", "p=0.1", "p=0.2"]),
    "eps": (layers(nn.LayerNorm(2)), layers(nn.LayerNorm(2, eps=1e-6)), ["module 1", "eps=1e-05", "eps=1e-06"]),
    "class of a module": (layers(nn.GELU()), layers(nn.SiLU()), ["module 1", "GELU", "SiLU"]),
    "shape": (layers(nn.PReLU(1)), layers(nn.PReLU(2)), ["module 1", "float32 1", "float32 2"]),
    "dtype of a buffer": (layers(Buffered(torch.int32)), layers(Buffered(torch.int64)), ["module 1", "int32", "int64"]),
    "frozen": (layers(nn.Linear(2, 2)), layers(frozen()), ["module 1", "bias"]),
    "bias": (layers(nn.Linear(2, 2)), layers(nn.Linear(2, 2, bias=False)), ["module 1", "bias"]),
    "setting of a layer": (layers(Scaled(by=2)), layers(Scaled(by=3)), ["by=2", "by=3"]),
    "function of a layer": (layers(Scaled(f=torch.relu)), layers(Scaled(f=torch.tanh)), ["relu", "tanh"]),
    "order of modules": (layers(nn.GELU(), nn.SiLU()), layers(nn.SiLU(), nn.GELU()), ["module 1", "module 2"]),
    "lr": ({}, {"optimizer": lambda params: SGD(params, lr=0.2)}, ["the optimizer's lr", "0.1 against 0.2"]),
    "optimizer": ({}, {"optimizer": lambda params: ADAM(params, lr=0.1)}, ["the optimizer's class", "SGD", "AdamW"]),
    "lr of a group": ({"optimizer": in_groups(0.1)}, {"optimizer": in_groups(0.3)}, ["the optimizer's lr", "0.3, 0.1"]),
    "groups": ({"optimizer": in_groups(0.1)}, {"optimizer": in_groups(0.1, first=2)}, ["the optimizer's groups"]),
    "attribute of an optimizer": (
        {"optimizer": lambda params: Sharpness(params, lr=0.1, rho=0.5)},
        {"optimizer": lambda params: Sharpness(params, lr=0.1, rho=0.7)},
        ["the optimizer", "rho=0.5", "rho=0.7"],
    ),
    "loss": ({}, {"loss": nn.functional.l1_loss}, ["the loss", "mse_loss against l1_loss"]),
    "closure of a loss": ({"loss": weighted(1.0)}, {"loss": weighted(2.0)}, ["the loss"]),
    "code of a loss": ({"loss": lambda y, t: (y - t).mean()}, {"loss": lambda y, t: (t - y).mean()}, ["the loss"]),
    "constant in a loss": ({"loss": lambda y, t: 2 * y}, {"loss": lambda y, t: 3 * y}, ["the loss"]),
    "setting of a loss": ({"loss": nn.HuberLoss()}, {"loss": nn.HuberLoss(delta=2.0)}, ["the loss", "delta=2"]),
    "attribute of a loss": ({"loss": Focal(1.0)}, {"loss": Focal(2.5)}, ["the loss", "Focal(gamma=1)", "gamma=2.5"]),
    "argument of a loss": (
        {"loss": functools.partial(nn.functional.huber_loss, delta=1.0)},
        {"loss": functools.partial(nn.functional.huber_loss, delta=2.0)},
        ["the loss", "delta: 2"],
    ),
    "collate": ({}, {"data": Data(DATA, collate=lambda samples: samples)}, ["collate"]),
    "schedule": ({"schedule": lambda step: 0.1}, {"schedule": lambda step: 0.2}, ["the schedule", "the learning rate"]),
    "scheduler": (
        {"schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)},
        {"schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4)},
        ["the scheduler", "step_size=3", "step_size=4"],
    ),
    "tolerate": ({}, {"placement": Placement(tolerate=2)}, ["tolerate", "None against 2"]),
    "stages": ({}, {"placement": Placement(stages=[2, 2])}, ["stages", "1 against [2, 2]"]),
    "policy": ({"sync": LocalSGD(every=2)}, {"sync": LocalSGD(every=3)}, ["sync", "every=2", "every=3"]),
    "partition": (
        {"sync": LocalSGD(every=2), "data": Data(DATA, partition=SelDP(size=8))},
        {"sync": LocalSGD(every=2), "data": Data(DATA, partition=SelDP(size=8, seed=1))},
        ["partition", "SelDP"],
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_differs_is_named(kind: str) -> None:
    one, other, words = DIFFERENT[kind]
    said = difference(label_of(**one), label_of(**other))
    assert said is not None
    assert not [word for word in words if word not in said], said


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_does_not_differ_is_equal(kind: str) -> None:
    """The control: each of them twice, with new objects wherever Python makes them."""
    for changes in DIFFERENT[kind][:2]:
        assert label_of(**changes) == label_of(**changes)


def made_with(value: int) -> dict[str, Any]:
    """Settings that are new objects each time, at new addresses."""
    return {
        "loss": lambda output, target: value * (output - target).square().mean(),
        "schedule": lambda step: value / (step + 1),
        "optimizer": lambda params: SGD(params, lr=0.1 * value),
        "data": Data(DATA, collate=functools.partial(torch.utils.data.default_collate)),
        **layers(Scaled(function=lambda x: x * value, names={"a", "b", "c"}, sizes={"x": 1, "y": (2, 3)})),
    }


def circle() -> Callable[..., Any]:
    """A loss that reaches itself, and a list that is in itself."""
    listed: list[Any] = []
    listed.append(listed)

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        return (loss, listed, output - target)

    return loss


NUMBERS = [1, 1.0, np.float32(1), np.int64(1)]
SAME: dict[str, list[dict[str, Any]]] = {
    "numbers": [{"clip_norm": value} for value in NUMBERS],
    "rates": [{"optimizer": lambda params, lr=value: SGD(params, lr=lr)} for value in (1, 1.0, torch.tensor(1.0))],
    "sizes": [{"placement": Placement(memory=memory)} for memory in ("55MB", 55_000_000)],
    "addresses": [made_with(3), made_with(3)],
    "order of a dict": [layers(Scaled(of={"a": 1, "b": 2})), layers(Scaled(of={"b": 2, "a": 1}))],
    "places of a machine": [
        layers(Scaled(path="/mnt/a", at=Path("x"), on=torch.device("cuda", 0))),
        layers(Scaled(path="/mnt/b", at=Path("y"), on=torch.device("cuda", 1))),
    ],
    "circles": [{"loss": circle()}, {"loss": circle()}],
    "private attributes": [layers(Scaled(_rank=0)), layers(Scaled(_rank=1))],
    "folders of a log": [
        {"checkpoint": Checkpoints(folder="a", log=LogSettings(folder=folder))} for folder in ("a", Path("b"))
    ],
}


@pytest.mark.parametrize("kind", SAME)
def test_what_means_the_same_is_the_same(kind: str) -> None:
    first, *others = [label_of(**changes) for changes in SAME[kind]]
    assert all(other == first for other in others)


def test_a_module_that_one_worker_alone_has_imported_is_not_compared() -> None:
    label = label_of()
    assert difference(label, label | {"the code of pictures.py": "12345678"}) is None


def test_an_older_checkpoint_lacks_facts_and_is_not_different() -> None:
    assert difference(label_of(), {}) is None


def test_a_large_model_is_described_in_few_words_and_its_difference_by_its_place() -> None:
    def model(p: float) -> nn.Module:
        blocks = [nn.Sequential(*[nn.Dropout(0.1) for _ in range(9)]) for _ in range(100)]
        blocks[42][7] = nn.Dropout(p)
        return nn.Sequential(nn.Linear(2, 1), nn.Sequential(*blocks))

    one, other = label_of(layers=model(0.1)), label_of(layers=model(0.2))
    # Without the user's modules: those of whatever tests this process has imported are among them.
    described = {name: text for name, text in one.items() if not name.startswith("the code of ")}
    assert len(json.dumps(described)) < 30_000
    said = difference(one, other)
    assert said is not None
    assert "module 1.42 " in said, said


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_another_torch_is_named_even_if_it_computes_the_same_bits(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several versions may be installed; those that pass every probe alike are still not mixed in one run."""
    version, here = torch.__version__, label_of(numerics=Numerics(mode=mode))
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    assert difference(label_of(numerics=Numerics(mode=mode)), here) == f"torch is 2.99.0+cpu against {version}"


def test_fast_mode_asks_for_updates_alone() -> None:
    """Gradients are summed for all, so other processors may compute them; updates are made by each worker itself."""
    exact, fast = label_of(), label_of(numerics=Numerics(mode="fast"))
    assert {PASSES, UPDATE, "cpu"} <= exact.keys()
    assert UPDATE in fast
    assert not {PASSES, "cpu"} & fast.keys()


# --- other processes ------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import torch
from torch import nn
import pkg.helper
from holdfast import Run
from torch.utils.data import TensorDataset
run = Run(layers=nn.Sequential(nn.Linear(2, 1), pkg.helper.Layer({"a", "b", "c", "d"})), loss=lambda y, t: y.mean(),
          data=TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), global_batch=4, micro_batch=2,
          optimizer=lambda params: torch.optim.AdamW(params))
print(json.dumps(run._progress.label))
"""
HELPER = """
from torch import nn
class Layer(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names
        self.function = lambda x: x in {"e", "f", "g"}
    def forward(self, x):
        return x
"""


def begin(folder: Path, arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    """The script in a fresh interpreter: libraries read these variables when they are loaded."""
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST", "MKL", "ATEN"))}
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**cleaned, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Label]:
    """Labels of the same script in different processes, folders and environments."""
    home = tmp_path_factory.mktemp("home") / "a"
    (home / "pkg").mkdir(parents=True)
    (home / "pkg" / "train.py").write_text(SCRIPT)
    (home / "pkg" / "helper.py").write_text(HELPER)
    elsewhere, edited = home.parent / "b", home.parent / "c"
    shutil.copytree(home, elsewhere)
    shutil.copytree(home, edited)
    (edited / "pkg" / "helper.py").write_text(HELPER.replace("return x", "return 2 * x"))
    processes = {
        "path": begin(home, ["pkg/train.py"], PYTHONHASHSEED="1"),
        "module elsewhere": begin(elsewhere, ["-m", "pkg.train"], PYTHONHASHSEED="2"),
        "edited": begin(edited, ["pkg/train.py"]),
        "other kernels": begin(home, ["pkg/train.py"], MKL_CBWR="COMPATIBLE"),
    }
    return {name: json.loads(process.communicate(timeout=300)[0]) for name, process in processes.items()}


def test_the_label_is_the_same_in_another_process_and_folder(labels: dict[str, Label]) -> None:
    """By path and by name, with other hashes; also the bits of the probe."""
    assert labels["path"] == labels["module elsewhere"]
    assert {"the script", "the code of helper.py", PASSES} <= labels["path"].keys()
    assert "the code of __init__.py" not in labels["path"]
    assert not [name for name in labels["path"] if "holdfast/" in name or "site-packages" in name]


def test_an_edited_module_is_named(labels: dict[str, Label]) -> None:
    said = difference(labels["edited"], labels["path"])
    assert said is not None
    assert said.startswith("the code of helper.py is "), said
    assert ";" not in said, "nothing else differs"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL, whose kernels are exchanged")
def test_the_probe_tells_kernels_apart_that_the_capability_does_not(labels: dict[str, Label]) -> None:
    one, other = labels["path"], labels["other kernels"]
    assert one["cpu"] == other["cpu"]
    assert [name for name in one if one[name] != other[name]] == [PASSES]
