"""Tasks of ``bench sync``: a byte-level GPT on the demo's text, and a small convolutional network on digits.

Batches are a pure function of (seed, step, worker). What is held out is never trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.data.injection import Injection
from holdfast.data.partition import DefDP, LabelSplit, Partition, SelDP
from holdfast.demo.corpus import Windows, standard_library
from holdfast.demo.gpt import GPTConfig, gpt_layers, next_byte_loss

GPT = GPTConfig(depth=3, heads=4, width=92, window=64, dropout=0.0)
HELD_OUT = 256  # windows of held-out text that a score is computed on
DIGITS, TEST_DIGITS = 4000, 2000
LABELS = 10  # digits
FONT = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""
NOISE = 0.3  # standard deviation; ink is about 1

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class LearningTask:
    """Task to learn. ``score`` is of held-out data: a loss, or the share of right answers."""

    name: str
    measure: Literal["loss", "accuracy"]
    steps: int  # of BSP
    cheap_steps: int  # of methods that do not send the model at each step
    batch: int  # samples of each worker in a step
    every: int  # steps from evaluation to evaluation
    target: float
    same: float  # scores so near to each other count as the same
    parameters: int
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any]]  # to train on, and held out; both are indexed with a list
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]

    def reached(self, score: float) -> bool:
        """Tell whether a score is at the target or better."""
        return score <= self.target if self.measure == "loss" else score >= self.target

    def worse_by(self, score: float, than: float) -> float:
        """Return by how much ``score`` is worse; negative if it is better.

        >>> round(TASKS["digits"].worse_by(0.90, than=0.95), 3)
        0.05
        """
        return score - than if self.measure == "loss" else than - score

    def make_model(self, seed: int) -> nn.Module:
        """Return a model with the weights that the seed gives."""
        torch.manual_seed(seed)
        return self.build()


class SampleTable:
    """Samples as two tensors."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: list[int] | Tensor) -> Batch:
        """Return inputs and targets of some samples."""
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def make_partition(task: LearningTask, split: str, seed: int) -> Partition:
    """Return which samples each worker reads.

    ``iid`` is SelDP, ``own chunks`` DefDP. With ``labels`` each worker knows two or three of ten labels only. With
    ``labels, injected`` half of the workers share half of a batch; they read it themselves, no byte is counted.
    """
    data, _ = task.data()
    if split == "iid":
        return SelDP(size=len(data), seed=seed)
    if split == "own chunks":
        return DefDP(size=len(data), seed=seed)
    labels = LabelSplit(labels=data.targets.numpy(), per_worker=1, seed=seed)
    return Injection(base=labels, alpha=0.5, beta=0.5, seed=seed) if split == "labels, injected" else labels


def windows_table(windows: Windows) -> SampleTable:
    """Return windows of text as a table."""
    pairs = [windows[i] for i in range(len(windows))]
    return SampleTable(torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]))


@cache
def text_data() -> tuple[SampleTable, SampleTable]:
    """Return text to train on, and some that is held out."""
    train, held_out = (windows_table(each) for each in standard_library(window=GPT.window))
    few = torch.arange(0, len(held_out), max(1, len(held_out) // HELD_OUT))[:HELD_OUT]  # from all of it
    return train, SampleTable(*held_out.take(few))


def draw_digits(count: int, seed: int) -> SampleTable:
    """Return digits somewhere on images of 10x8, in noise: those of ``examples/digits.py``, drawn all at once.

    >>> table = draw_digits(3, seed=0)
    >>> table.inputs.shape, len(table)
    (torch.Size([3, 1, 10, 8]), 3)
    """
    rows = FONT.split("\n")[1:-1]
    glyphs = torch.tensor([[c == "#" for c in row.replace(" ", "")] for row in rows])
    glyphs = glyphs.view(7, LABELS, 5).transpose(0, 1).float()
    dice = torch.Generator().manual_seed(seed)
    digits = torch.randint(LABELS, (count,), generator=dice)
    places = torch.randint(4, (count, 2), generator=dice)
    ink = 0.7 + 0.6 * torch.rand(count, generator=dice)
    images = NOISE * torch.randn(count, 1, 10, 8, generator=dice)
    for n, (digit, (y, x)) in enumerate(zip(digits.tolist(), places.tolist(), strict=True)):
        images[n, 0, y : y + 7, x : x + 5] += ink[n] * glyphs[digit]
    return SampleTable(images, digits)


@cache
def digit_data() -> tuple[SampleTable, SampleTable]:
    """Return digits to train on, and some that are held out."""
    return draw_digits(DIGITS, seed=1), draw_digits(TEST_DIGITS, seed=2)


def build_reader() -> nn.Module:
    """Return the network that reads digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 5 * 4, 64),
        nn.GELU(),
        nn.Linear(64, LABELS),
    )


def share_right(scores: Tensor, target: Tensor) -> Tensor:
    """Return the share of right answers."""
    return (scores.argmax(1) == target).float().mean()


TASKS = {
    task.name: task
    for task in (
        LearningTask(
            name="gpt",
            measure="loss",
            steps=120,
            cheap_steps=176,
            batch=8,
            every=8,
            target=2.6,
            same=0.03,
            parameters=362_000,
            build=lambda: nn.Sequential(*gpt_layers(GPT)),
            data=text_data,
            loss=next_byte_loss,
            score=next_byte_loss,
        ),
        LearningTask(
            name="digits",
            measure="accuracy",
            steps=200,
            cheap_steps=280,
            batch=16,
            every=8,
            target=0.96,
            same=0.005,
            parameters=46_500,
            build=build_reader,
            data=digit_data,
            loss=functional.cross_entropy,
            score=share_right,
        ),
    )
}


@torch.no_grad()
def evaluate(task: LearningTask, model: nn.Module) -> float:
    """Return the score of a model on held-out data."""
    _, held_out = task.data()
    total = 0.0
    for first in range(0, len(held_out), 128):
        inputs, targets = held_out.take(list(range(first, min(first + 128, len(held_out)))))
        total += task.score(model(inputs), targets).item() * len(targets)
    return total / len(held_out)
