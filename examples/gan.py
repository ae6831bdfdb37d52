"""A GAN in a loop of its own: two steps of the discriminator to one of the generator.

The loop, its losses, both optimizers and their schedules stay in the script's hands. A worker that is lost between the
commits of a step costs nothing: the body runs again, and what was committed of it is passed over. In one process:
``python examples/gan.py``. On workers that may be killed: ``holdfast run -n 3 examples/gan.py``. The last line, a hash,
is the same for both.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

import holdfast

NOISE, POINTS, TURNS = 8, 8, 2  # numbers that a sample is made of; points on the circle; steps of the discriminator


def circle(samples: int = 4096) -> TensorDataset:
    """Points near eight places on a circle."""
    draw = torch.Generator().manual_seed(0)
    angles = torch.randint(POINTS, (samples,), generator=draw) * (2 * math.pi / POINTS)
    places = torch.stack([angles.cos(), angles.sin()], 1)
    return TensorDataset(places + 0.05 * torch.randn(samples, 2, generator=draw))


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def distance(samples: Tensor) -> float:
    """Return how far samples are from the nearest place, on average."""
    angles = torch.arange(POINTS) * (2 * math.pi / POINTS)
    places = torch.stack([angles.cos(), angles.sin()], 1)
    return float(torch.cdist(samples, places).min(1).values.mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint", help="a folder to resume from")
    options = parser.parse_args()
    torch.manual_seed(0)
    g, d = net(NOISE, 2), net(2, 1)
    optimizers = {
        "g": torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        "d": torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.9)),
    }
    schedules = {name: LinearLR(optimizer, 1.0, 0.1, total_iters=400) for name, optimizer in optimizers.items()}
    loop = holdfast.Loop(
        model={"g": g, "d": d},
        optimizer=optimizers,
        data=circle(),
        global_batch=64,
        micro_batch=16,
        checkpoint=options.checkpoint,
        state={"losses": [0.0, 0.0], **schedules},
    )
    for step in loop.steps(options.steps):
        for _ in range(TURNS):
            for (real,) in step.micro_batches():
                made = g(torch.randn(len(real), NOISE)).detach()
                step.backward((softplus(-d(real)) + softplus(d(made))).mean())
            if update := step.commit("d", clip_norm=1.0):
                loop.state["losses"][0] = update.loss
        for (real,) in step.micro_batches():
            step.backward(softplus(-d(g(torch.randn(len(real), NOISE)))).mean())
        if update := step.commit("g"):  # None: somebody was lost, and the step comes again
            loop.state["losses"][1] = update.loss
            for schedule in schedules.values():
                schedule.step()
            if step.number % 100 == 0 and step.is_first_worker:
                print("step {:4}  loss of d {:.3f}, of g {:.3f}".format(step.number, *loop.state["losses"]))
    with torch.no_grad():
        away = distance(g(torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))))
    sha256 = loop.sha256()
    if loop.is_first_worker:
        print(f"samples are {away:.2f} away from the nearest of {POINTS} places, real ones 0.06")
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
