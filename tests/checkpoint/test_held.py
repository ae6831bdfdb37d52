"""Boxes of DTensors, against torch's own idea of who holds what."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import skip_init

from holdfast.checkpoint.held import held_of, order_of_cuts
from holdfast.checkpoint.pieces import Box
from holdfast.errors import UsageError
from tests.checkpoint.layouts import mesh
from tests.checkpoint.world import world

SIZES = (0, 1, 3, 4, 7)  # of a dimension: empty, smaller than a mesh, even and uneven


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).view(shape)


def check(tensor: DTensor, full: torch.Tensor) -> list[Box]:
    """What this rank holds is at the right place, and is all that it has."""
    held = held_of(tensor, "x")
    assert held.shape == tuple(full.shape)
    for part in held.parts:
        assert torch.equal(part.tensor, full[part.box.slices()])
    assert sum(part.box.numel for part in held.parts) == tensor.to_local().numel()
    return [part.box for part in held.parts]


def covered(boxes_of_ranks: list[list[Box]], shape: tuple[int, ...]) -> bool:
    seen = torch.zeros(shape, dtype=torch.bool)
    for boxes in boxes_of_ranks:
        for box in boxes:
            seen[box.slices()] = True
    return bool(seen.all())


# --- placements -----------------------------------------------------------------------------------


SHAPES = ((0, 5), (1, 3))  # rows and columns


def all_placements() -> list[list[Box]]:
    kinds = (Replicate(), Shard(0), Shard(1))
    found = []
    for rows, columns, one, two in itertools.product(*SHAPES, kinds, kinds):
        full = numbered(rows, columns)
        spread = distribute_tensor(full, mesh(2, 2), [one, two])
        assert torch.equal(spread.full_tensor(), full)
        found.append(check(spread, full))
    return found


def test_every_pair_of_placements_on_a_mesh() -> None:
    of_ranks = world(4).run(all_placements)
    shapes = [shape for shape in itertools.product(*SHAPES) for _ in range(9)]
    for number, shape in enumerate(shapes):
        assert covered([boxes[number] for boxes in of_ranks], shape), (number, shape)


def fsdp_over_tp(dp: int, tp: int) -> dict[str, list[Box]]:
    """Both cut dimension 0 of what is column-parallel; row-parallel weights are cut in both dimensions."""
    model = nn.Sequential()
    for n in SIZES:
        model.add_module(f"column{n}", skip_init(nn.Linear, 3, n))
        model.add_module(f"row{n}", skip_init(nn.Linear, n, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(numbered(*p.shape))
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    over = mesh(dp, tp)
    plan = {
        name: ColwiseParallel() if name.startswith("column") else RowwiseParallel()
        for name, _ in model.named_children()
    }
    parallelize_module(model, over["tp"], plan)
    fully_shard(model, mesh=over["dp"])
    found = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        found[name] = check(p, full[name])
        # Where tensor parallelism leaves a worker no columns, torch's own full_tensor does not return.
        if name not in {f"row{n}.weight" for n in SIZES if n <= (tp - 1) * math.ceil(n / tp)}:
            assert torch.equal(p.full_tensor(), full[name])
    return found


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3)])
def test_fsdp_over_tensor_parallelism_of_any_size(dp: int, tp: int) -> None:
    of_ranks = world(dp * tp).run(fsdp_over_tp, dp, tp)
    for number in SIZES:
        for name, shape in ((f"column{number}.weight", (number, 3)), (f"row{number}.weight", (3, number))):
            assert covered([found[name] for found in of_ranks], shape), name


def test_the_order_of_cuts_is_read_from_split_factors() -> None:
    assert order_of_cuts([Shard(0), Shard(0)], (2, 2), 0) == [0, 1]
    assert order_of_cuts([_StridedShard(0, split_factor=2), Shard(0)], (3, 2), 0) == [1, 0]
    assert order_of_cuts([_StridedShard(1, split_factor=2), Shard(0)], (3, 2), 0) == [1]
    assert order_of_cuts([Replicate(), Shard(1)], (3, 2), 0) == []
    both = [_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)]
    assert order_of_cuts(both, (5, 3, 2), 0) == [2, 1, 0]
    assert order_of_cuts([_StridedShard(0, split_factor=4), Shard(0)], (3, 2), 0) is None


# --- refusals -------------------------------------------------------------------------------------


def refusals() -> list[str]:
    said = []
    local = torch.ones(2, 2)
    for tensor in (
        DTensor.from_local(local, mesh(2, 2), [Shard(0), Partial()]),
        DTensor.from_local(torch.ones(()), mesh(2, 2), [Partial(), Replicate()]),
        DTensor.from_local(local, mesh(2, 2), [_StridedShard(0, split_factor=3), Shard(0)], run_check=False),
        DTensor.from_local(local, mesh(2, 2), [Shard(0), Shard(1)], shape=torch.Size((9, 4)), stride=(4, 1)),
    ):
        with pytest.raises(UsageError) as caught:
            held_of(tensor, "w")
        said.append(str(caught.value))
    return said


def test_what_is_not_a_box_is_refused_by_name() -> None:
    for partial, scalar, strided, wrong in world(4).run(refusals):
        assert "w is a sum" in partial
        assert "w is a sum" in scalar
        assert "w is laid out" in strided
        assert "(2, 2) of w (9, 4)" in wrong


def outside() -> Any:
    half = DeviceMesh("cpu", [2, 3])
    held = held_of(distribute_tensor(torch.arange(5.0), half, [Shard(0)]), "x")
    return dist.get_rank(), held.shape, [part.box.offset for part in held.parts]


def test_outside_of_its_mesh_a_worker_holds_nothing() -> None:
    assert world(4).run(outside) == [(0, (5,), []), (1, (5,), []), (2, (5,), [(0,)]), (3, (5,), [(3,)])]


def test_plain_tensors_are_whole_and_odd_ones_refused() -> None:
    assert held_of(torch.tensor(3), "x").parts[0].box == Box(offset=(), shape=())
    assert held_of(torch.zeros(0, 2), "x").parts[0].box.shape == (0, 2)
    for tensor, word in (
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "x is a"),
    ):
        with pytest.raises(UsageError, match=word):
            held_of(tensor, "x")
