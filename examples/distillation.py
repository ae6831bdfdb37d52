"""A small model learns from a large frozen one: the loss uses a second model, and the run carries only the student.

In one process: ``python examples/distillation.py``. On workers that may be killed: ``holdfast run -n 3
examples/distillation.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import holdfast

CLASSES, FEATURES, HEAT = 10, 20, 2.0


class Points:
    """Sample i: a noisy point around one of ten centres, and the centre's number; a pure function of i."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(self.numbers[i])
        label = torch.randint(CLASSES, (), generator=dice)
        return {"x": self.centres[label] + torch.randn(FEATURES, generator=dice), "label": label}


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    teacher = mlp(FEATURES, 256, 256, CLASSES).requires_grad_(False).eval()  # elsewhere its weights come from a file
    student = mlp(FEATURES, 32, CLASSES)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mine = model(batch["x"])
        soft = kl_div(
            log_softmax(mine / HEAT, -1),
            log_softmax(teacher(batch["x"]) / HEAT, -1),
            log_target=True,
            reduction="batchmean",
        )
        return 0.5 * cross_entropy(mine, batch["label"]) + 0.5 * HEAT**2 * soft

    run = holdfast.Run(
        model=student,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        data=Points(range(4000)),
        global_batch=64,
        micro_batch=16,
        checkpoint=arguments.checkpoint,
        state={"teacher": teacher},  # carried along: a worker that joins gets this very teacher
    )
    for step in run.steps(arguments.steps):
        if step.is_first_worker and step.number % 10 == 0:
            print(f"step {step.number:3}  loss {step.loss:.4f}")

    right = run.evaluate(
        Points(range(4000, 5000)), lambda model, batch: (model(batch["x"]).argmax(-1) == batch["label"]).float().mean()
    )
    sha256 = run.sha256()
    if run.is_first_worker:
        print(f"{right:.1%} of the test points right")
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
