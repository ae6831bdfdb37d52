"""What a run with teams refuses, in one process: its process groups are of one rank, or pretend to have more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

import holdfast
from holdfast.cluster.team import Team
from holdfast.engine.shards import gradient_of
from holdfast.errors import UsageError
from holdfast.run.team import TeamView
from holdfast.sync.periodic import LocalSGD


class TwoAlike:
    """The mates of a rank, of which the other says the same."""

    rank, size = 1, 2

    def exchange(self, text: bytes) -> list[bytes]:
        return [text, text]


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "HOLDFAST_TEAM", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.run.training.find_team", lambda: Team(TwoAlike()))


def pretend(size: int) -> DeviceMesh:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return init_device_mesh("cpu", (size,))


def settings() -> dict[str, Any]:
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    return {"optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1), "data": data, "global_batch": 8, "micro_batch": 4}


def loop(model: nn.Module | None = None, **more: Any) -> holdfast.Loop:
    return holdfast.Loop(model=model or nn.Linear(4, 1), **settings(), **more)


def run(**more: Any) -> holdfast.Run:
    return holdfast.Run(**settings(), **more)


def error(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_a_script_of_a_team_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TEAM", "2")
    with pytest.raises(UsageError, match="no process group") as caught:
        loop()
    assert "init_process_group" in str(caught.value)


def test_a_process_group_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TEAM", "2")
    pretend(3)
    with pytest.raises(UsageError, match="3 ranks, but a team has 2"):
        loop()


def test_a_model_split_over_more_than_the_team_is_refused() -> None:
    model = fully_shard(nn.Linear(4, 1), mesh=pretend(4))
    with pytest.raises(UsageError, match="4 processes, but a team has 1") as caught:
        loop(model)
    assert "--team 4" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: run(layers=nn.Linear(4, 1), loss=nn.functional.mse_loss), "layers="),  # and so eager updates and log=
        (lambda: run(model=nn.Linear(4, 1), loss=error, sync=LocalSGD(every=2)), "policy"),
        (lambda: loop(sync=LocalSGD(every=2)), "policy"),
        (lambda: loop(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), "BatchNorm"),
        (lambda: loop().ema(0.9), "averages"),
        (lambda: loop().save_model("model.safetensors"), "one piece"),
    ],
)
@pytest.mark.usefixtures("two")
def test_what_teams_do_not_have_is_refused_by_name(make: Callable[[], object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make()


def test_norms_count_what_the_step_updates_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of an optimizer that does not step are dropped after the ranks have told each other their norms."""
    monkeypatch.setattr(TwoAlike, "rank", 0)
    models = {"first": nn.Linear(4, 1), "second": nn.Linear(4, 1)}
    sgd = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    training = holdfast.Loop(model=models, **settings() | {"optimizer": sgd})
    update = training.engine.update
    for step in training.steps(1):
        for x, y in step.micro_batches():
            step.backward(nn.functional.mse_loss(models["first"](x) + models["second"](x), y))
        assert all(norm > 0 for norm in training.engine.norms_here(Team(TwoAlike())))
        update.choose(list(models["second"].parameters()), clip_norm=None)
        assert [norm > 0 for norm in training.engine.norms_here(Team(TwoAlike()))] == [False, False, True, True]
        step.commit("second")


def test_a_gradient_that_is_laid_out_otherwise_is_refused_with_both_placements() -> None:
    mesh = pretend(2)
    p = nn.Parameter(DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)]))
    p.grad = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)])
    assert gradient_of(p) is not None
    p.grad = DTensor.from_local(torch.zeros(4, 4), mesh, [Replicate()])
    with pytest.raises(UsageError, match=r"Shard.*Replicate"):
        gradient_of(p)


def test_parts_are_equal_rows_of_every_tensor_or_refused() -> None:
    view = TeamView(Team(TwoAlike()))
    batch = {"x": torch.arange(4), "name": "seven"}
    assert view.part(batch)["x"].tolist() == [2, 3]
    assert view.part(batch)["name"] == "seven"
    for uneven, rows in ((torch.arange(3), "3"), (torch.tensor(1.0), "no")):
        with pytest.raises(UsageError, match=f"{rows} rows"):
            view.part(uneven)


def test_a_part_along_one_dimension_of_the_mesh() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    view = TeamView(Team(TwoAlike()))
    assert view.part(torch.arange(6), mesh["data"]).tolist() == [3, 4, 5]
