"""torchft's fault-tolerant DDP over Gloo, with each process a replica group of its own.

The lighthouse runs apart (`torchft_lighthouse`); a dead process is replaced by starting
this program again with the same --worker, which then fetches its state from a live peer.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import (  # type: ignore[import-not-found]  # only in the peers' venv
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from bench.data_parallel import workload
from bench.peers import common

HOST = "127.0.0.1"


def seconds(text: str) -> timedelta:
    """Return a duration from its seconds as text."""
    return timedelta(seconds=float(text))


def add_torchft_arguments(parser: argparse.ArgumentParser) -> None:
    """Add torchft's settings. The defaults are its own (nightly 2026.10.26)."""
    parser.add_argument("--worker", type=int, required=True, help="this replica group's number")
    parser.add_argument("--lighthouse", help="http://host:port; else $TORCHFT_LIGHTHOUSE")
    parser.add_argument("--min-replicas", type=int, default=1, help="fewest that may commit a step")
    # Bounds a recovery that heartbeats do not: a survivor that waits for another survivor
    # in a half-finished reduction stays there this long, and so does the next quorum.
    parser.add_argument("--pg-timeout", type=seconds, default="60", help="s, Gloo collectives and set-up")
    parser.add_argument("--timeout", type=seconds, default="60", help="s, commit and recovery")
    parser.add_argument("--quorum-timeout", type=seconds, default="60", help="s")
    parser.add_argument("--connect-timeout", type=seconds, default="60", help="s")
    parser.add_argument("--heartbeat-interval", type=seconds, default="0.1", help="s, to the lighthouse")
    parser.add_argument("--verbose", action="store_true", help="show what torchft does")


def stay_on_loopback(*, verbose: bool) -> None:
    """Make torchft talk on loopback, and log nothing unless ``verbose``."""
    # torchft logs a line for every step, and a traceback for each reduction that a dead peer
    # fails, which is part of its normal work.
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL)
    # torchft's stores and state servers advertise the host's name, with no setting for it;
    # that name need not resolve, nor to loopback, which is all the bench may use.
    socket.gethostname = lambda: HOST


def make_manager(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    world_size: int,
    store_port: int,
) -> Manager:
    """Return torchft's manager of one rank of replica group ``args.worker``."""

    # Not model.state_dict(): torchft asks during a forward pass, and FSDP2 would give up the whole weights there.
    weights = {name: common.part_here(p.detach()) for name, p in model.named_parameters()}

    def state_dict() -> dict[str, Any]:
        return {"model": weights, "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, part in weights.items():
            part.copy_(state["model"][name])
        optimizer.load_state_dict(state["optimizer"])

    # Heartbeats start here, and the lighthouse waits for whoever sends them to join the
    # quorum: all slow preparation has to be over by now.
    return Manager(
        pg=ProcessGroupGloo(timeout=args.pg_timeout),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=args.min_replicas,
        timeout=args.timeout,
        quorum_timeout=args.quorum_timeout,
        connect_timeout=args.connect_timeout,
        heartbeat_interval=args.heartbeat_interval,
        rank=rank,
        world_size=world_size,
        store_addr=HOST,
        store_port=store_port,
        lighthouse_addr=args.lighthouse or os.environ["TORCHFT_LIGHTHOUSE"],
        replica_id=f"worker_{args.worker}",
        hostname=HOST,
        # All workers build the same weights from the same seed.
        init_sync=False,
    )


def main() -> None:
    parser = common.argument_parser(__doc__)
    add_torchft_arguments(parser)
    args = parser.parse_args()
    stay_on_loopback(verbose=args.verbose)

    model = workload.build_model(args)
    inner = workload.build_optimizer(model.parameters())
    # torchrun would hold this store for a group of several ranks; a group of one can
    # hold its own, which spares the bench a launcher between it and the pid to kill.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = make_manager(args, model, inner, rank=0, world_size=1, store_port=store.port)
    replica = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    progress = common.ProgressFile(args, args.worker)
    while (step := manager.current_step()) < args.steps:
        optimizer.zero_grad()  # also starts the quorum for this step
        common.accumulate_gradients(replica, args, step + 1, args.worker)
        optimizer.step()  # does nothing if the reduction failed, and the step is tried again
        # A replacement has just jumped from its step 0 to one past its peers' last.
        if manager.current_step() > step:
            progress.finished(manager.current_step())

    common.report_end(model, manager.current_step(), args.worker)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
