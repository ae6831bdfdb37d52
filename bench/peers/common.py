"""Parts of all peers: their arguments, progress lines and the gradients of one step."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.data_parallel import workload


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the arguments that all contestants take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=20, help="stop after this step")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches per worker and step")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples in a micro-batch")
    parser.add_argument("--progress", help="file that gets a JSON line per finished step")
    parser.add_argument("--burst", type=int, default=0, help="steps in a turn; 0: no turns")
    workload.add_arguments(parser)
    return parser


class ProgressFile:
    """File of all workers of a contestant, with a line for each finished step.

    In a race for speed contestants take turns of a few steps each, so that all meet the same weather:
    a worker then waits for a byte on its own FIFO before each of its turns.
    """

    def __init__(self, args: argparse.Namespace, worker: int) -> None:
        self._worker = worker
        self._burst: int = args.burst
        self._turns = None
        # O_APPEND and one unbuffered write per line keep the lines of several workers
        # whole, and leave nothing in a buffer when a worker is killed.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(args.progress or os.devnull, flags, 0o644)
        if self._burst:
            self._turns = os.open(f"{args.progress}.turn-{worker}", os.O_RDONLY)
            self._wait_for_turn(0)

    def finished(self, step: int) -> None:
        """Write a line for a finished step, and wait for the next turn if this one ends with it."""
        self._write({"step": step})
        if self._turns is not None and step % self._burst == 0:
            self._wait_for_turn(step)

    def _wait_for_turn(self, step: int) -> None:
        assert self._turns is not None
        os.read(self._turns, 1)
        self._write({"go": step})

    def _write(self, what: dict[str, int]) -> None:
        line = {"t": time.time(), "cpu": time.process_time(), **what, "worker": self._worker, "pid": os.getpid()}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def accumulate_gradients(model: DistributedDataParallel, args: argparse.Namespace, step: int, worker: int) -> None:
    """Compute the gradients of one worker's share of a step; the last micro-batch reduces them."""
    last = args.micro_batches - 1
    for index in range(args.micro_batches):
        source, target = workload.make_batch(args, step, worker * args.micro_batches + index)
        with contextlib.nullcontext() if index == last else model.no_sync():
            loss = workload.loss_fn(model(source), target) / args.micro_batches
            loss.backward()


def accumulate_shards(model: FSDPModule, args: argparse.Namespace, step: int, worker: int) -> None:
    """Compute the gradients of one rank's share of a step on a split model; the last micro-batch reduces them."""
    assert isinstance(model, nn.Module)
    for index in range(args.micro_batches):
        source, target = workload.make_batch(args, step, worker * args.micro_batches + index)
        model.set_requires_gradient_sync(index == args.micro_batches - 1)
        loss = workload.loss_fn(model(source), target) / args.micro_batches
        loss.backward()


def part_here(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: all of it, if it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def report_end(model: nn.Module, step: int, worker: int) -> None:
    """Print a digest of the weights here; it is equal on all who hold the same if they ended in step."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(str(torch.hash_tensor(part_here(parameter.detach())).item()).encode())
    line = {"worker": worker, "step": step, "digest": digest.hexdigest()[:16]}
    # One write, for the workers share an output: print would send the newline apart.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
