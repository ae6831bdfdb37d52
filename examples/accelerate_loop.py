"""A loop for Accelerate that survives: digits, a schedule with warm-up, accumulation, clipping.

In one process: ``python examples/accelerate_loop.py``. On workers that may be killed: ``holdfast run -n 3 --preload
accelerate examples/accelerate_loop.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse

import torch
from digits import Digits, accuracy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

try:
    from holdfast.integrations.accelerate import Accelerator
except ImportError as e:
    raise SystemExit("this example needs Accelerate: pip install accelerate") from e

EPOCHS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, help="the most steps of all epochs together")
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(global_batch=64, checkpoint=arguments.checkpoint)
    model = nn.Sequential(nn.Flatten(), nn.Linear(80, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    loader = DataLoader(Digits(range(1000)), batch_size=16, shuffle=True)
    test = DataLoader(Digits(range(4000, 4200)), batch_size=100)
    model, optimizer, loader, test, scheduler = accelerator.prepare(model, optimizer, loader, test, scheduler)

    for epoch in accelerator.epochs(EPOCHS, steps=arguments.steps):  # in place of range(EPOCHS)
        for images, digits in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), digits)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # commits, if this is the last micro-batch of this worker
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = sum(float(accuracy(model(images), digits)) for images, digits in test) / len(test)
        model.train()
        accelerator.print(f"epoch {epoch}: loss {accelerator.last.loss:.4f}, {right:.1%} of the test digits right")

    sha256 = accelerator.loop.sha256()
    accelerator.print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
