"""Teams, as a script sees them: its place in the team, its part of a batch, and what a run with teams cannot do."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from holdfast.checkpoint.ranks import Gloo
from holdfast.cluster.team import ALONE, Team
from holdfast.engine.engine import Engine
from holdfast.errors import UsageError
from holdfast.run.settings import Settings

PATIENCE = timedelta(days=365)  # for a mate: the agent ends a team that hangs, and a spare one may wait for long


def find_team() -> Team:
    """Return the team of this process: the one that ``holdfast run --team`` has started, or itself.

    Raises ``UsageError`` if the script has made no process group for it.
    """
    size = int(os.environ.get("HOLDFAST_TEAM", "1"))
    if size == 1:
        return ALONE
    if not dist.is_initialized():
        raise UsageError(
            f"this process is one of a team of {size}, but the script has made no process group",
            hint='torch.distributed.init_process_group("gloo") before the model is split, as under torchrun',
        )
    if dist.get_world_size() != size:
        raise UsageError(
            f"the script's process group has {dist.get_world_size()} ranks, but a team has {size}",
            hint="init_process_group without rank and world_size: they are in the environment",
        )
    return Team(Gloo(None, PATIENCE))


def refuse(settings: Settings, engine: Engine, team: Team) -> None:
    """Raise ``UsageError`` for what does not work with teams, and for a model that is split over other ranks."""
    model = engine.model.module
    meshes = {tensor.device_mesh.size() for tensor in model.parameters() if isinstance(tensor, DTensor)}
    if meshes and max(meshes) > team.size:
        raise UsageError(
            f"the model is split over {max(meshes)} processes, but a team has {team.size}",
            hint=f"holdfast run --team {max(meshes)}",
        )
    if team.size == 1:
        return
    wrong = [
        (settings.model is None, "layers= are stages of workers", "model=, whose parts are in the team"),
        (settings.policy is not None, "a sync policy is for workers that are one process", "sync='every-step'"),
        (settings.numerics.is_eager, "update='eager' updates layer by layer", "update='commit'"),
        (settings.log is not None, "a log is of boundaries between stages", "leave out log="),
        (bool(engine.statistics.uses), "running statistics (BatchNorm) are whole on each rank", "LayerNorm, RMSNorm"),
    ]
    for found, what, hint in wrong:
        if found:
            raise UsageError(f"{what}, which teams do not have", hint=hint)


class TeamView:
    """This process's place in its team: ``rank`` of ``size``. Without ``--team`` it is the only one.

    >>> TeamView(ALONE).part([torch.arange(4)])
    [tensor([0, 1, 2, 3])]
    """

    def __init__(self, team: Team, seed: Callable[[int], None] = lambda part: None) -> None:
        self.rank, self.size = team.rank, team.size
        self._seed = seed

    def part(self, batch: Any, mesh: DeviceMesh | None = None) -> Any:
        """Return this rank's part of a batch: consecutive rows of each tensor in it, equally many on every rank.

        For data parallelism inside a team (FSDP2), where the loss is then the mean over the part. Every rank gets the
        whole batch from ``step.micro_batches()``, as tensor parallelism needs it. ``mesh``: the dimension of the
        team's mesh that batches are divided over, such as ``mesh["data"]``; None: all ranks.

        Raises ``UsageError`` if the rows cannot be divided equally: the mean of the parts' losses would be another.
        """
        rank, size = (self.rank, self.size) if mesh is None else (mesh.get_local_rank(), mesh.size())

        def rows(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.dim() == 0 or len(value) % size:
                count = "no" if value.dim() == 0 else str(len(value))
                raise UsageError(
                    f"a batch with {count} rows cannot be divided by {size} ranks",
                    hint="micro_batch= and global_batch= that are multiples of the ranks",
                )
            each = len(value) // size
            return value[rank * each : (rank + 1) * each]

        found = tree_map(rows, batch)
        self._seed(rank)
        return found
