"""Plain training over Gloo, started by torchrun: no fault tolerance. What DDP's and HSDP's entries share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from bench.data_parallel import workload
from bench.peers import common


def train(args: argparse.Namespace, model: nn.Module, accumulate: Callable[[int, int], None]) -> None:
    """Train to the end. ``accumulate(step, rank)`` computes the gradients of a rank's share, and reduces them."""
    rank = dist.get_rank()
    optimizer = workload.build_optimizer(model.parameters())
    progress = common.ProgressFile(args, rank)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        accumulate(step, rank)
        optimizer.step()
        progress.finished(step)

    common.report_end(model, args.steps, rank)
    # Whoever closes its connections first would fail a slower peer's last reduction.
    dist.barrier()
    dist.destroy_process_group()
