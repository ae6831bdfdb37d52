"""torch.distributed.pipelining over Gloo, 1F1B; several pipelines sum gradients by DDP around each stage.

With one stage it is plain DDP. With --checkpoint it saves every so many steps, layer by layer, so that it can be
started again with another grid: the pieces of a Varuna-style restart, which whoever starts the processes drives.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from bench.peers.common import ProgressFile
from bench.pipelines import race_models as model


class GridPlace:
    """Layers and micro-batches of this process, in a grid of equally cut pipelines."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.counts = [int(each) for each in args.stages.split(",")]
        rank, depth = dist.get_rank(), len(self.counts)
        self.pipelines = dist.get_world_size() // depth
        self.pipeline, self.stage = divmod(rank, depth)
        first = sum(self.counts[: self.stage])
        self.layers = range(first, first + self.counts[self.stage])
        share, rest = divmod(args.micro_batches, self.pipelines)
        start = self.pipeline * share + min(self.pipeline, rest)
        self.micro_batches = range(start, start + share + (self.pipeline < rest))
        # Everybody has to make every group.
        rows = [dist.new_group(list(range(n * depth, (n + 1) * depth))) for n in range(self.pipelines)]
        columns = [dist.new_group(list(range(n, depth * self.pipelines, depth))) for n in range(depth)]
        self.row, self.column = rows[self.pipeline], columns[self.stage]

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == len(self.counts) - 1


class Trainer:
    """Part of one process in a step."""

    def __init__(self, args: argparse.Namespace, place: GridPlace) -> None:
        self.place = place
        self.layers = [model.build_layers(args)[number] for number in place.layers]
        self.module: nn.Module = nn.Sequential(*self.layers)
        self.optimizer = model.build_optimizer(self.module.parameters())
        self.samples = model.Samples(args)
        # DDP takes the mean over pipelines; pipelines may have different numbers of micro-batches.
        self.weight = place.pipelines / args.micro_batches
        if place.pipelines > 1:
            self.module = DistributedDataParallel(self.module, process_group=place.column)
        self.schedule = self._pipeline(args) if len(place.counts) > 1 else None

    def _pipeline(self, args: argparse.Namespace) -> Schedule1F1B:
        # Telling the shapes saves a first pass that finds them out.
        shape = (args.micro_batch, args.seq, args.width) if args.model == "gpt" else (args.micro_batch, args.width)
        hidden = torch.empty(shape, requires_grad=True)
        source = self.samples.batch(step=0, micro_batches=range(1))[0]
        output = torch.empty(*shape[:-1], model.VOCABULARY) if args.model == "gpt" else hidden
        stage = PipelineStage(
            self.module,
            self.place.stage,
            len(self.place.counts),
            torch.device("cpu"),
            input_args=source if self.place.is_first else hidden,
            output_args=output if self.place.is_last else hidden,
            group=self.place.row,
        )
        return Schedule1F1B(stage, len(self.place.micro_batches), loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return model.loss_fn(output, target) * self.weight

    def step(self, number: int) -> float:
        """Train step ``number``, counted from 0; return the weighted loss, or 0 where there is none."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.schedule is None:
            self._accumulate(number, losses)
        else:
            source, target = self.samples.batch(step=number, micro_batches=self.place.micro_batches)
            self.schedule.step(
                *((source,) if self.place.is_first else ()),
                target=target if self.place.is_last else None,
                losses=losses if self.place.is_last else None,
                return_outputs=False,
            )
        self.optimizer.step()
        return float(sum(loss.detach() for loss in losses)) / self.place.pipelines

    def _accumulate(self, number: int, losses: list[Tensor]) -> None:
        for index in self.place.micro_batches:
            source, target = self.samples.batch(step=number, micro_batches=range(index, index + 1))
            last = index == self.place.micro_batches[-1]
            replica = self.module if isinstance(self.module, DistributedDataParallel) else None
            with nullcontext() if last or replica is None else replica.no_sync():
                loss = self._loss(self.module(source), target)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())

    def save(self, folder: Path, step: int) -> None:
        """Save the layers of one pipeline's stages; the step counts as saved when all have written."""
        target = folder / f"step-{step}"
        target.mkdir(parents=True, exist_ok=True)
        if self.place.pipeline == 0:
            for number, layer in zip(self.place.layers, self.layers, strict=True):
                slots = [self.optimizer.state[p] for p in layer.parameters()]
                torch.save({"layer": layer.state_dict(), "slots": slots}, target / f"layer-{number}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "latest.tmp").write_text(str(step))
            (folder / "latest.tmp").replace(folder / "latest")

    def load(self, folder: Path) -> int:
        """Load the last checkpoint and return its step; without one, return 0."""
        if not (folder / "latest").exists():
            return 0
        step = int((folder / "latest").read_text())
        for number, layer in zip(self.place.layers, self.layers, strict=True):
            state = torch.load(folder / f"step-{step}" / f"layer-{number}.pt")
            layer.load_state_dict(state["layer"])
            for p, slots in zip(layer.parameters(), state["slots"], strict=True):
                self.optimizer.state[p] = slots
        return step


def main() -> None:
    parser = model.argument_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and resume from")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    args = parser.parse_args()
    imported = time.time()
    dist.init_process_group("gloo")
    trainer = Trainer(args, GridPlace(args))
    done = trainer.load(args.checkpoint) if args.checkpoint else 0
    if args.checkpoint:
        sys.stdout.write(json.dumps({"imported": imported, "loaded": time.time(), "done": done}) + "\n")
        sys.stdout.flush()
    progress = ProgressFile(args, dist.get_rank())
    losses = []
    for step in range(done, args.steps):
        losses.append(trainer.step(step))
        if args.checkpoint and (step + 1) % args.checkpoint_every == 0:
            trainer.save(args.checkpoint, step + 1)
        progress.finished(step + 1)
    if trainer.place.is_last:
        sys.stdout.write(json.dumps({"losses": losses, "pipeline": trainer.place.pipeline}) + "\n")
        sys.stdout.flush()
    dist.barrier()
    # Gloo's threads may still hold tensors: leaving the interpreter's end out saves seconds of waiting for them.
    os._exit(0)


if __name__ == "__main__":
    main()
