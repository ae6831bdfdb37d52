"""The interface of a framework's adapter. It needs numpy and the standard library only: it runs in every interpreter.

A framework must do three things:

- train a model of given shapes and save it in its formats (``ModelInTraining``);
- train a small net with all the randomness of a real script, and go on after a restart (``Lesson``);
- save on several ranks (``Adapter.join``, ``ModelInTraining.save_ranked``).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Shapes = Sequence[tuple[str, Sequence[int]]]
Arrays = dict[str, Any]  # name -> numpy array; numpy 1.23 and 2 differ in their types
Wait = Callable[[], None]

STATES = ("weights/", "momentum/")  # what every array's name begins with
LINE = 1 << 22  # numbers
BATCH = 8  # rows that each weight is multiplied with in a step
RANK_ZERO, EVERY_RANK = "rank 0 only", "every rank its own file"

EPOCH, STEPS = 6, 12  # of a lesson, in steps
SAVES = {"step 0": 0, "mid-epoch": 3, "epoch's end": EPOCH}  # when it is saved


@dataclass(frozen=True, kw_only=True)
class SaveFormat:
    """One way to save."""

    name: str
    suffix: str = ""  # of the file; a folder has none
    compressed: bool = False
    background: bool = False  # the call returns before everything is written
    renamed: bool = False  # written beside the old one, then renamed: only to see what that is worth in a crash


class ModelInTraining(ABC):
    """A model with these shapes and its optimizer (SGD with momentum 0.9), float32, in training.

    Every weight ``w`` with two or more dimensions is used as a matrix of ``w.shape[0]`` rows: the loss is the sum of
    ``mean((x @ w.T) ** 2)``, with ``x`` of ``BATCH`` rows, and of ``mean(b ** 2)`` for those with one dimension. So one
    step reads and changes everything, as real training does, whatever the shapes are.
    """

    @abstractmethod
    def step(self) -> float:
        """One step, forward, backward, update, done when it returns; the loss."""

    @abstractmethod
    def arrays(self) -> Arrays:
        """All weights and their momentum as ``weights/NAME`` and ``momentum/NAME``."""

    @abstractmethod
    def put(self, arrays: Mapping[str, Any]) -> None:
        """Sets what ``arrays`` gives."""

    @abstractmethod
    def save(self, form: str, path: Path) -> Wait | None:
        """What a user of this format would call; not synced. It may overwrite. One in the background: how to wait."""

    @abstractmethod
    def load(self, form: str, path: Path) -> None:
        """Fills this model and its optimizer from what was saved. Raises whatever the framework raises."""

    def save_ranked(self, strategy: str, path: Path, rank: int, ranks: int) -> None:
        """All ranks call it at once, with the same state on each; one of ``Adapter.strategies``."""
        form, wait = self.usual_format, None
        if strategy == EVERY_RANK:
            wait = self.save(form.name, path / f"rank-{rank}{form.suffix}")
        elif rank == 0:
            wait = self.save(form.name, path / f"state{form.suffix}")
        if wait is not None:
            wait()

    usual_format: SaveFormat  # that of save_ranked

    def reset(self, seed: int) -> None:
        """Other numbers everywhere, as hard to compress as trained ones: parts of one random line, which is longer than
        any compressor looks back. To draw each number would take longer than most of what is measured."""
        line = np.random.default_rng(seed).standard_normal(LINE, np.float32)
        for begin, (name, array) in enumerate(sorted(self.arrays().items())):
            scale = np.float32(0.05 if name.startswith("weights/") else 0.001)
            self.put({name: scale * np.resize(line[begin : begin + array.size], array.shape)})

    def clear(self) -> None:
        """Zeros everywhere, so that a load that does nothing is noticed."""
        for name, array in self.arrays().items():
            self.put({name: np.zeros(array.shape, np.float32)})

    def digests(self) -> dict[str, str]:
        """A short hash of each array."""
        found = {}
        for name, array in sorted(self.arrays().items()):
            found[name] = digest(array)
        return found


def digest(array: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def bits(loss: Any) -> str:
    """A loss as what is compared: its bits.

    >>> bits(np.float32(0.5)), bits(0.5)
    ('0000003f', '0000003f')
    """
    return np.float32(loss).tobytes().hex()


class Lesson(ABC):
    """A small run as people write it, made by the same script with the same seed in every process.

    Dropout, random augmentation (drawn from numpy and from Python), a shuffled loader, an optimizer with momentum or
    Adam, a learning rate that falls, an average of the weights. ``EPOCH`` steps are an epoch. The constructor begins
    as a script does: it seeds everything, and makes everything.
    """

    @abstractmethod
    def train(self, steps: int) -> list[str]:
        """So many steps more; their losses, as ``bits``."""

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """A hash of each thing that a run leaves behind: ``weights``, ``optimizer``, ``average`` …"""

    @abstractmethod
    def save(self, path: Path, parts: frozenset[str]) -> None:
        """Saves these parts and no others, in the framework's usual way, into a new folder."""

    @abstractmethod
    def restore(self, path: Path, parts: frozenset[str]) -> None:
        """In a fresh process, right after the constructor: takes these parts from there."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """Something that an identical restart may need."""

    name: str
    what: str  # in words, for the report: "torch.get_rng_state()"


class Adapter(ABC):
    """A framework, as the study sees it."""

    name: str
    formats: tuple[SaveFormat, ...]
    strategies: tuple[str, ...] = (RANK_ZERO, EVERY_RANK)
    parts: tuple[StatePart, ...] = ()
    usual: frozenset[str] = frozenset()  # the parts that its own documentation saves
    usual_means: str = ""  # in words: "model and optimizer, as in the tutorial"
    variants: tuple[str, ...] = ("",)  # of the lesson, beside the plain one: "worker processes"

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """The packages that matter here."""

    @abstractmethod
    def make(self, shapes: Shapes, seed: int) -> ModelInTraining:
        """A model to save."""

    @abstractmethod
    def lesson(self, seed: int, variant: str = "") -> Lesson:
        """A run to restart."""

    def join(self, rank: int, ranks: int, address: str) -> None:  # noqa: B027  # most have nothing to do here
        """Before ``save_ranked``: meets the other ranks at ``host:port``. May be called again with another number.
        The default needs no meeting."""

    def format(self, name: str) -> SaveFormat:
        return next(form for form in self.formats if form.name == name)
