"""A small model on slow data: a plain loop over a DataLoader, or a ``holdfast.Run``, with so many loaders."""

from __future__ import annotations

import argparse
import itertools
import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from bench.peers.common import ProgressFile

BATCH, MICRO_BATCH = 32, 8  # samples
SAMPLE_SECONDS = 0.005  # that a sample takes to read
WIDTH = 256
EPOCH = 1000 * BATCH  # samples: longer than the race


class SlowData(Dataset[tuple[Tensor, Tensor]]):
    """A data set whose samples take their time, without a processor: as from a network or a disk."""

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SAMPLE_SECONDS)
        x = torch.full((WIDTH,), index / EPOCH) + 0.1 * torch.randn(WIDTH)
        return x, x[:1].sin()


def make_model() -> nn.Sequential:
    """Return the model that all contestants train."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


def train_plainly(args: argparse.Namespace) -> None:
    """Train as people do: whole batches from a DataLoader."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = DataLoader(SlowData(), batch_size=BATCH, shuffle=True, num_workers=args.loaders)
    progress = ProgressFile(args, 0)
    every = itertools.chain.from_iterable(itertools.repeat(batches))
    for step, (x, target) in enumerate(itertools.islice(every, args.steps), start=1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        progress.finished(step)


def train_with_holdfast(args: argparse.Namespace) -> None:
    """Train the same with a ``Run``."""
    run = holdfast.Run(
        layers=make_model(),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        data=holdfast.Data(SlowData(), num_workers=args.loaders),
        global_batch=BATCH,
        micro_batch=MICRO_BATCH,
    )
    progress = ProgressFile(args, int(os.environ.get("HOLDFAST_WORKER", "0.0").split(".")[1]))
    for step in run.steps(args.steps):
        progress.finished(step.number + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["plain", "holdfast"])
    parser.add_argument("--loaders", type=int, required=True, help="processes that read, of each worker")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this step")
    parser.add_argument("--progress", required=True, help="file that gets a JSON line per finished step")
    parser.add_argument("--burst", type=int, required=True, help="steps in a turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (train_plainly if args.way == "plain" else train_with_holdfast)(args)


if __name__ == "__main__":
    main()
