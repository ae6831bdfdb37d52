"""The same small run as PyTorch's, as a ``holdfast.Run``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

from holdfast.recovery.resume import Checkpoints
from holdfast.run.run import Run
from holdfast.study.adapters.base import EPOCH, Lesson, bits
from holdfast.study.adapters.pytorch_lesson import ROWS, Augmented, digest_of, small_net


class HeldLesson(Lesson):
    """Dropout, noise and mirroring from numpy's and Python's generators, a shuffled order, momentum, a schedule.

    A Run saves all of it into its folder by itself, at the end of each loop too, and goes on from what it finds there.
    So to save is to copy that folder, and to restore is to put it back; there are no parts to leave out. At step 0
    nothing is in it yet, and a Run that finds nothing begins anew. A Run has no average of its weights.
    """

    def __init__(self, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-study-")
        torch.manual_seed(seed)
        self._run = Run(
            layers=small_net(),
            loss=nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            schedule=lambda step: 0.1 * 0.9**step,
            data=Augmented(),
            global_batch=ROWS,
            micro_batch=ROWS // 2,
            seed=seed,
            checkpoint=Checkpoints(folder=self._folder.name, every=EPOCH),
        )

    def train(self, steps: int) -> list[str]:
        done = 0 if self._run.last is None else self._run.last.number + 1  # those before the restart, too
        losses = [bits(step.loss) for step in self._run.steps(done + steps)]
        self._run.leave()  # what it saves in the background is there now
        return losses

    def digests(self) -> dict[str, str]:
        optimizer = self._run.engine.update.optimizer
        return {
            "weights": digest_of(iter(self._run.engine.model.module.parameters())),
            "optimizer": digest_of(slot["momentum_buffer"] for slot in optimizer.state.values()),
        }

    def save(self, path: Path, parts: frozenset[str]) -> None:
        litter = shutil.ignore_patterns(".*")  # of a save that is complete; it is being cleared away
        shutil.copytree(self._folder.name, path, dirs_exist_ok=True, ignore=litter)

    def restore(self, path: Path, parts: frozenset[str]) -> None:
        shutil.copytree(path, self._folder.name, dirs_exist_ok=True)
        self.train(0)  # it finds its step there
