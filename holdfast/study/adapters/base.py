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
Wait = Callable[[], None]  # returns when a save in the background is over

STATES = ("weights/", "momentum/")  # prefixes of the arrays' names
LINE = 1 << 22  # random numbers that all arrays are cut from: 16 MB, more than any compressor looks back
BATCH = 8  # rows that each weight is multiplied with in a step
RANK_ZERO, EVERY_RANK = "rank 0 only", "every rank its own file"

EPOCH, STEPS = 6, 12  # steps of an epoch, and of a whole lesson: two epochs
SAVES = {"step 0": 0, "mid-epoch": 3, "epoch's end": EPOCH}  # the step of each save point of a lesson


@dataclass(frozen=True, kw_only=True)
class SaveFormat:
    """A format: one way of a framework to save."""

    name: str
    suffix: str = ""  # of the file; a folder has none
    compressed: bool = False
    background: bool = False  # the call returns before everything is written


class ModelInTraining(ABC):
    """A model of given shapes with its optimizer (SGD with momentum 0.9), float32, in training.

    Every weight ``w`` with two or more dimensions is used as a matrix of ``w.shape[0]`` rows: the loss is the sum of
    ``mean((x @ w.T) ** 2)``, with ``x`` of ``BATCH`` rows, and of ``mean(b ** 2)`` for each ``b`` of one dimension. So
    one step reads and changes everything, as real training does, whatever the shapes are.
    """

    @abstractmethod
    def step(self) -> float:
        """Train one step, until it is computed; return the loss."""

    @abstractmethod
    def arrays(self) -> Arrays:
        """Return all weights and their momentum as ``weights/NAME`` and ``momentum/NAME``."""

    @abstractmethod
    def put(self, arrays: Mapping[str, Any]) -> None:
        """Set the given arrays, by the same names."""

    @abstractmethod
    def save(self, form: str, path: Path) -> Wait | None:
        """Save as a user of this format would, without a sync; the path may exist.

        A save in the background returns a function that waits for its end, any other None.
        """

    @abstractmethod
    def load(self, form: str, path: Path) -> None:
        """Fill this model and its optimizer from a save. Raises whatever the framework raises."""

    def save_ranked(self, strategy: str, path: Path, rank: int, ranks: int) -> None:
        """Save with a strategy of ``Adapter.strategies``; all ranks call it at once, with the same state."""
        form, wait = self.usual_format, None
        if strategy == EVERY_RANK:
            wait = self.save(form.name, path / f"rank-{rank}{form.suffix}")
        elif rank == 0:
            wait = self.save(form.name, path / f"state{form.suffix}")
        if wait is not None:
            wait()

    usual_format: SaveFormat  # the format of save_ranked

    def reset(self, seed: int) -> None:
        """Set all arrays to other numbers, which are as hard to compress as trained ones.

        They are parts of one random line: to draw each number would take longer than most measurements.
        """
        line = np.random.default_rng(seed).standard_normal(LINE, np.float32)
        for begin, (name, array) in enumerate(sorted(self.arrays().items())):
            scale = np.float32(0.05 if name.startswith("weights/") else 0.001)
            self.put({name: scale * np.resize(line[begin : begin + array.size], array.shape)})

    def clear(self) -> None:
        """Set all arrays to zero, so that a load that does nothing is noticed."""
        for name, array in self.arrays().items():
            self.put({name: np.zeros(array.shape, np.float32)})

    def digests(self) -> dict[str, str]:
        """Return a short hash of each array."""
        found = {}
        for name, array in sorted(self.arrays().items()):
            found[name] = digest(array)
        return found


def digest(array: Any) -> str:
    """Return a short hash of an array's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def bits(loss: Any) -> str:
    """Return the bits of a loss in hex, for exact comparison.

    >>> bits(np.float32(0.5)), bits(0.5)
    ('0000003f', '0000003f')
    """
    return np.float32(loss).tobytes().hex()


class Lesson(ABC):
    """A small training run as people write it, the same in every process.

    It has dropout, random augmentation (drawn from numpy and from Python), a shuffled loader, an optimizer with
    momentum or Adam, a falling learning rate, and an average of the weights. ``EPOCH`` steps are an epoch. The
    constructor does what a script does at its begin: it seeds the generators and makes everything.
    """

    @abstractmethod
    def train(self, steps: int) -> list[str]:
        """Train some steps more; return their losses as ``bits``."""

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Return a hash of each state at the end of a run: ``weights``, ``optimizer``, ``average`` …"""

    @abstractmethod
    def save(self, path: Path, parts: frozenset[str]) -> None:
        """Save these parts and no others into a new folder, in the framework's usual way."""

    @abstractmethod
    def restore(self, path: Path, parts: frozenset[str]) -> None:
        """Restore these parts from a folder; called right after the constructor, in a fresh process."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """A part of a run's state, which an identical restart may need."""

    name: str
    what: str  # in words, for the report: "torch.get_rng_state()"


class Adapter(ABC):
    """The interface of a framework to the study."""

    name: str
    formats: tuple[SaveFormat, ...]
    strategies: tuple[str, ...] = (RANK_ZERO, EVERY_RANK)
    parts: tuple[StatePart, ...] = ()
    usual: frozenset[str] = frozenset()  # the parts that its own documentation saves
    usual_means: str = ""  # in words: "model and optimizer, as in the tutorial"
    variants: tuple[str, ...] = ("",)  # of the lesson, beside the plain one: "worker processes"

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that matter, by name."""

    @abstractmethod
    def make(self, shapes: Shapes, seed: int) -> ModelInTraining:
        """Make a model to save."""

    @abstractmethod
    def lesson(self, seed: int, variant: str = "") -> Lesson:
        """Begin a run to restart."""

    def join(self, rank: int, ranks: int, address: str) -> None:  # noqa: B027  # most have nothing to do here
        """Meet the other ranks at ``host:port``, before ``save_ranked``; may be called again with other ``ranks``.

        The default does nothing: independent processes need not meet.
        """

    def format(self, name: str) -> SaveFormat:
        """Return a format by its name."""
        return next(form for form in self.formats if form.name == name)
