"""A ResNet with BatchNorm: augmented images, mixup, label smoothing, and an average of the weights that is evaluated.

Running statistics are gathered for each micro-batch and applied in their order, so they do not depend on who computed
what. In one process: ``python examples/resnet.py``. On workers that may be killed: ``holdfast run -n 3
examples/resnet.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast

CLASSES, SIDE = 6, 12


class Shapes:
    """Sample i: stripes of one of six directions, in noise. For training, flipped and shifted at random."""

    def __init__(self, numbers: range, *, augment: bool) -> None:
        self.numbers, self.augment = numbers, augment

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        dice = torch.Generator().manual_seed(self.numbers[i])
        label = torch.randint(CLASSES, (), generator=dice)
        y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        angle = label * torch.pi / CLASSES
        phase = 6.28 * torch.rand((), generator=dice)
        image = (1.3 * (x * angle.cos() + y * angle.sin()) + phase).sin() + 0.5 * torch.randn(
            SIDE, SIDE, generator=dice
        )
        if self.augment:  # torch's own generator is seeded by (step, micro-batch)
            image = image.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), (0, 1))
            image = image.rot90(2) if torch.rand(()) < 0.5 else image
        return image.unsqueeze(0), label


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.second(self.norm(self.first(x)).relu()))
        return (x + inner).relu()


def resnet(width: int = 16) -> nn.Module:
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
    return nn.Sequential(*stem, Block(width), nn.MaxPool2d(2), Block(width), *head)


def mixup(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    share = torch.distributions.Beta(0.2, 0.2).sample()
    other = torch.randperm(len(images))
    scores = model(share * images + (1 - share) * images[other])
    first, second = (cross_entropy(scores, wanted, label_smoothing=0.1) for wanted in (labels, labels[other]))
    return share * first + (1 - share) * second


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=40, help="steps from one evaluation to the next")
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    run = holdfast.Run(
        model=resnet(),
        loss=mixup,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True),
        schedule=lambda made: torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.1, total_steps=200),
        data=holdfast.Data(Shapes(range(3000), augment=True), num_workers=1),
        global_batch=32,
        micro_batch=8,
        checkpoint=arguments.checkpoint,
    )
    average = run.ema(decay=0.95)
    test = Shapes(range(3000, 3400), augment=False)
    for step in run.steps(arguments.steps):
        if (step.number + 1) % arguments.every == 0:
            now = run.evaluate(test, {"accuracy": accuracy})
            smooth = run.evaluate(test, {"accuracy": accuracy}, weights=average)
            run.log({"accuracy": now["accuracy"], "average's accuracy": smooth["accuracy"]})
            if step.is_first_worker:
                print(f"step {step.number:3}  accuracy {now['accuracy']:.1%}, of the average {smooth['accuracy']:.1%}")
    sha256 = run.sha256()
    if run.is_first_worker:
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
