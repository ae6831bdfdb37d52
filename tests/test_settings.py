"""The groups of settings that a ``Run`` takes: short forms, and values that are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import holdfast
from holdfast import Checkpoints, Data, LogSettings, Numerics, Placement, Run, Step, UsageError, errors
from holdfast.data.partition import SelDP

DATA = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def make(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "layers": nn.Linear(2, 1),
        "loss": nn.functional.mse_loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": DATA,
        "global_batch": 4,
        "micro_batch": 2,
    }
    return Run(**{**settings, **changes})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)

    def __len__(self) -> int:
        return 8


class NoPartition:
    size = 8


REFUSED: dict[Callable[..., Any], list[dict[str, Any]]] = {
    Placement: [
        {"stages": 0},
        {"stages": True},
        {"stages": 2.0},
        {"stages": "2"},
        {"stages": []},
        {"stages": [2, 0]},
        {"stages": [2, "2"]},
        {"memory": 0},
        {"memory": -1},
        {"memory": "plenty"},
        {"memory": "0GB"},
        {"memory": [1]},
        {"profile": 3},
        {"tolerate": -1},
        {"tolerate": True},
        {"stages": 1, "memory": "2GB"},
        {"stages": [2, 2], "memory": "2GB"},
        {"stages": (2, 2), "profile": "profile.json"},
    ],
    Checkpoints: [
        {"folder": ""},
        {"folder": None},
        {"folder": 3},
        {"folder": "runs", "every": 0},
        {"folder": "runs", "every": 2.5},
        {"folder": "runs", "every": True},
        {"folder": "runs", "every": "often"},
        {"folder": "runs", "keep": 0},
        {"folder": "runs", "keep": None},
        {"folder": "runs", "keep_every": 0},
        {"folder": "runs", "keep_every": "10"},
        {"folder": "runs", "log": None},
        {"folder": "runs", "log": 1.5},
    ],
    Numerics: [
        {"mode": "nope"},
        {"mode": None},
        {"update": "later"},
        {"autocast": "bfloat16"},
        {"autocast": torch.int8},
        {"device": "abacus"},
        {"device": []},
    ],
    Data: [
        {"dataset": Stream(), "num_workers": 2},
        {"dataset": lambda shard: iter(DATA)},
        {"dataset": (i for i in range(8))},
        {"dataset": DataLoader(DATA, batch_size=2)},
        *({"dataset": DATA, "collate": collate} for collate in (None, 3)),
        {"dataset": DATA, "shuffle": "yes"},
        {"dataset": DATA, "shuffle": 7},
        {"dataset": DATA, "partition": NoPartition()},
        {"dataset": DATA, "partition": SelDP(size=7)},
    ],
    LogSettings: [
        {"budget": 0},
        {"budget": "plenty"},
        {"budget": True},
        {"budget": 1.5},
        {"budget": float("nan")},
        {"memory": -1},
        {"memory": None},
        {"memory": float("inf")},
        {"folder": 3},
    ],
}


CASES = [
    pytest.param(kind, given, id=f"{kind.__name__}-{'-'.join(given)}-{number}")
    for kind, listed in REFUSED.items()
    for number, given in enumerate(listed)
]


@pytest.mark.parametrize(("kind", "given"), CASES)
def test_values_that_a_group_refuses(kind: Callable[..., Any], given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        kind(**given)


@pytest.mark.parametrize(
    "group",
    [
        Placement(stages=[2, 2]),
        Placement(stages=(1, 3)),
        Placement(stages=3, memory=1, profile=Path("profile.json")),
        Placement(memory="512MiB"),
        Checkpoints(folder=Path("runs"), every=1, keep=1, keep_every=1),
        Numerics(mode="fast", autocast=torch.float16, update="eager", device=torch.device("cpu")),
        Data([(1, 2)], shuffle=False, partition=SelDP(size=1)),
        LogSettings(budget=1, memory=0, folder="runs/log"),
    ],
    ids=lambda group: type(group).__name__,
)
def test_a_group_takes_what_it_documents_and_cannot_be_changed(group: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        group.anything = 1


def test_groups_take_keywords_only_but_for_the_data_set() -> None:
    for kind in (Placement, Checkpoints, Numerics, LogSettings):
        assert all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(kind).parameters.values()), kind
    first, *others = inspect.signature(Data).parameters.values()
    assert first.kind is first.POSITIONAL_OR_KEYWORD
    assert all(p.kind is p.KEYWORD_ONLY for p in others)


# --- short forms --------------------------------------------------------------------------------------------


def test_a_mode_alone_is_numerics() -> None:
    assert Numerics.of("fast") == Numerics(mode="fast")
    assert make(numerics="fast").engine.exact is make(numerics=Numerics(mode="fast")).engine.exact is False


def test_a_folder_alone_is_checkpoints(tmp_path: Path) -> None:
    assert Checkpoints.of(tmp_path) == Checkpoints(folder=tmp_path)
    assert Checkpoints.of(str(tmp_path)) == Checkpoints(folder=str(tmp_path))
    assert Checkpoints.of(None) is None
    first = make(checkpoint=str(tmp_path))
    list(first.steps(2))
    first.leave()  # what it saves in the background is there now
    second = make(checkpoint=Checkpoints(folder=tmp_path, every=1))
    assert not list(second.steps(2))
    assert first.sha256() == second.sha256()


def test_a_data_set_alone_is_data() -> None:
    assert (Data.of(DATA).dataset, Data.of(DATA).shuffle, Data.of(DATA).partition) == (DATA, True, None)
    alone, long = make(), make(data=Data(DATA))
    assert alone.engine.order == long.engine.order


def test_short_forms_of_a_log() -> None:
    assert LogSettings.of(False) is None
    assert LogSettings.of(True) == LogSettings()
    assert LogSettings.of("2GB") == LogSettings.of(2_000_000_000) == LogSettings(budget=2_000_000_000)
    assert LogSettings.of(2e9) == LogSettings(budget=2_000_000_000)


@pytest.mark.parametrize("given", [None, 0, -1, 1.5, float("nan"), "plenty", "0GB", [1]], ids=repr)
def test_values_that_are_no_log(given: Any) -> None:
    with pytest.raises(UsageError):
        LogSettings.of(given)
    with pytest.raises(UsageError):
        Checkpoints(folder="unused", log=given)


def test_without_a_wish_for_pipelines_every_worker_holds_the_whole_model() -> None:
    assert Placement.of(None) == Placement()
    assert Placement().cut == Placement(tolerate=2).cut == 1
    assert Placement(memory="2GB").cut is Placement(profile="profile.json").cut is Placement(stages="auto").cut is None


# --- the arguments of a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": 2},
        {"placement": {"stages": 2}},
        {"checkpoint": 3},
        {"checkpoint": True},
        {"numerics": Placement()},
        {"seed": -1},
        {"sync": "sometimes"},
        {"data": Data(DATA, partition=SelDP(size=8))},
        {"numerics": Numerics(update="eager"), "clip_norm": 1.0},
        {"model": nn.Linear(2, 1)},
        {"model": nn.Linear(2, 1), "layers": None},
        {"model": [nn.Linear(2, 1)], "layers": None, "loss": lambda model, batch: model(batch[0]).mean()},
        {"weight": 3},
        {"weight": lambda model, batch: 1},
        {"data": []},
        {"weight": lambda batch: 1, "numerics": Numerics(update="eager")},
        *({"clip_norm": norm} for norm in (-1.0, 0, float("nan"), float("inf"), "1", True, [1.0])),
        *({"seed": seed} for seed in ("0", 1.5, None, True, 2**64, 2**70, np.int64(-1), torch.tensor(1.5))),
        *({"global_batch": batch} for batch in (4.0, "4", None, 0, -4, True, np.float64(4))),
        *({"micro_batch": batch} for batch in (2.0, "2", None, 0, -2, True, np.bool_(True))),
        *({"layers": layers} for layers in (None, 3, "layers", [], [None])),
        *({"loss": loss} for loss in (None, 3, nn.Bilinear(1, 1, 1))),
        *({"optimizer": optimizer} for optimizer in (None, "SGD", lambda: None)),
        *({"schedule": schedule} for schedule in (3, 0.1, "cosine")),
    ],
    ids=lambda changes: "-".join(
        name if callable(v) else f"{name}={v!r}" for name, v in changes.items() if name != "data"
    ),
)
def test_arguments_that_a_run_refuses(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**changes)


@pytest.mark.parametrize("data", [Stream(), iter(DATA), DataLoader(DATA), Data(DATA), holdfast.Stream(Stream())])
def test_evaluations_refuse_data_without_numbers(data: Any) -> None:
    for ask in (make().evaluate, make().predict):
        with pytest.raises(UsageError, match="have no numbers"):
            ask(data)


def test_an_optimizer_that_fails_says_what_it_was_called_with() -> None:
    with pytest.raises(ValueError, match="unpack") as caught:
        make(optimizer=lambda params: torch.optim.SGD([p for name, p in params if name], lr=0.1))
    assert "called named" in caught.value.__notes__[0]


def test_a_loss_may_have_weights_that_are_frozen_or_the_models() -> None:
    layer = nn.Linear(2, 1)
    for loss in (nn.Bilinear(1, 1, 1).requires_grad_(False), nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))):
        make(loss=loss)
    tied = nn.MSELoss()
    tied.layer = layer
    make(layers=[layer], loss=tied)


@pytest.mark.parametrize("total", [-1, 2.5, "5", True, [1]])
def test_a_number_of_steps_that_is_none_is_refused(total: Any) -> None:
    with pytest.raises(UsageError, match="total="):
        next(iter(make().steps(total)))


def test_measures_are_called_with_two_arguments() -> None:
    run = make()
    for call in (run.evaluate, run.predict):
        with pytest.raises(UsageError, match=r"cannot be called with \(output, target\)"):
            call(DATA, lambda output: output)  # type: ignore[operator]


def test_numbers_of_numpy_are_those_of_python() -> None:
    plain = make(seed=3, clip_norm=1)
    numpy = make(seed=np.int64(3), clip_norm=np.float32(1), global_batch=np.int32(4), micro_batch=np.uint8(2))
    assert type(numpy.engine.order.seed) is int
    assert repr(numpy.engine.order) == repr(plain.engine.order)


def test_the_largest_seed_trains() -> None:
    assert [step.number for step in make(seed=2**64 - 1).steps(1)] == [0]


@pytest.mark.parametrize(
    "name",
    [
        "stages",
        "tolerate",
        "collate",
        "log",
        "memory",
        "profile",
        "every",
        "keep",
        "keep_every",
        "autocast",
        "update",
        "device",
        "shuffle",
    ],
)
def test_a_field_of_a_group_is_no_argument_of_a_run(name: str) -> None:
    with pytest.raises(UsageError, match=rf"holdfast\.\w+\(.*{name}=…"):
        make(**{name: None})


def test_wrong_and_missing_arguments_are_named() -> None:
    with pytest.raises(UsageError, match=r"'clip_nrom'.*clip_norm=…"):
        make(clip_nrom=1.0)
    with pytest.raises(UsageError, match="by name"):
        Run(nn.Linear(2, 1))  # type: ignore[call-arg, misc]
    with pytest.raises(UsageError, match="needs loss="):
        Run(model=nn.Linear(2, 1))  # type: ignore[call-arg]
    assert "loss" in inspect.signature(Run).parameters, "tools show other arguments"


@pytest.mark.parametrize(
    ("make_group", "said"),
    [
        (lambda: Data(DATA, colate=list), r"a Data has no argument 'colate' \(collate=…"),  # type: ignore[call-arg]
        (lambda: Data(DATA, list), r"given by name \(Data\(collate=…"),  # type: ignore[misc]
        (lambda: Data(), "a Data needs dataset="),  # type: ignore[call-arg]
        (lambda: Placement(stage=2), r"a Placement has no argument 'stage' \(stages=…"),  # type: ignore[call-arg]
        (lambda: Numerics("fast"), r"given by name \(Numerics\(mode=…"),  # type: ignore[misc]
        (lambda: Checkpoints("runs", 5), r"given by name \(Checkpoints\(folder=…"),  # type: ignore[misc]
        (lambda: holdfast.LocalSGD(), r"needs every= \(LocalSGD\(every=…"),  # type: ignore[call-arg]
        (lambda: holdfast.Loop(modle=None), r"a Loop has no argument 'modle' \(model=…"),  # type: ignore[call-arg]
    ],
)
def test_wrong_and_missing_settings_of_a_group_are_named(make_group: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_group()


def test_every_public_group_refuses_a_wrong_name_in_words() -> None:
    for kind in (getattr(holdfast, name) for name in holdfast.__all__):
        if inspect.isclass(kind) and is_dataclass(kind) and not issubclass(kind, Exception) and kind is not Step:
            with pytest.raises(UsageError, match="has no argument 'wrong'"):
                kind(wrong=1)


def test_a_run_takes_at_most_sixteen_arguments() -> None:
    assert len(inspect.signature(Run).parameters) <= 16


def test_all_public_names_are_there() -> None:
    assert all(hasattr(holdfast, name) for name in holdfast.__all__)


def test_errors_that_a_run_raises_are_public() -> None:
    """So that a script can tell them apart, and the reference has them."""
    found = {
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.HoldfastError)
    }
    assert found <= {*holdfast.__all__}
