"""Sums of FSDP2 inside a team: those of Gloo, bit for bit where there are two ranks, and in the ranks' order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.engine.scatter import PartsToTheirRanks, send_parts
from tests.checkpoint.layouts import mesh
from tests.checkpoint.world import world

PARTS = [[1e8, 3.0], [1.0, 5.0], [-1e8, 7.0]]  # of each rank, for each rank but the last: the order of sums matters


def summed(op: str) -> list[float]:
    mine, total = torch.tensor([*PARTS[dist.get_rank()], 1.0]), torch.empty(1)
    PartsToTheirRanks()(total, mine, dist.group.WORLD, getattr(dist.ReduceOp, op))
    return total.tolist()


@pytest.mark.parametrize(
    ("op", "sums"),
    [("SUM", [[0.0], [15.0], [3.0]]), ("AVG", [[0.0], [5.0], [1.0]]), ("MAX", [[1e8], [7.0], [1.0]])],
)
def test_parts_are_added_in_the_order_of_the_ranks(op: str, sums: list[list[float]]) -> None:
    """In another order 1 would be left over. Gloo itself does whatever is no sum."""
    assert world(3).run(summed, op, seconds=30) == sums


class Chosen(PartsToTheirRanks):
    """What a script has chosen."""


def train(sends: bool) -> tuple[list[list[float]], list[str]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    fully_shard(model[0], mesh=mesh(2))
    fully_shard(model, mesh=mesh(2))
    model[0].set_custom_reduce_scatter(Chosen())
    if sends:
        send_parts(model)
    model(torch.randn(5, 4) + dist.get_rank()).square().mean().backward()
    used = [type(m._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm).__name__ for m in (model[0], model)]
    return [p.grad.to_local().flatten().tolist() for p in model.parameters()], used


def test_fsdp_gets_the_same_gradients_and_keeps_what_the_script_has_chosen() -> None:
    plain, sent = world(2).run(train, False, seconds=30), world(2).run(train, True, seconds=30)
    assert [gradients for gradients, _ in sent] == [gradients for gradients, _ in plain]
    assert [used for _, used in sent] == [["Chosen", "PartsToTheirRanks"]] * 2
