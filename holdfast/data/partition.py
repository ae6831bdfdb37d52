"""Partitions: which samples each worker reads, where replicas take steps of their own (``sync/``).

A partition is a pure function of (seed, step, worker, workers, batch). One rule holds for all: a *pass* over n samples
takes ⌈n / batch⌉ steps, each pass has an order of its own, and its last batch is filled up from the pass's begin. So
every batch is whole, a pass leaves no sample out, and no batch has a sample twice unless it is larger than what it is
drawn from. As nothing is remembered, a worker can start at any step; when workers come or go, the next step is cut for
the new number of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.checks import whole
from holdfast.data.shuffle import Numbers, permuted
from holdfast.errors import UsageError
from holdfast.rng import seed_of


class Partition(Protocol):
    """A rule that gives each worker its samples.

    Its ``repr`` goes into a run's label, so it must be short and the same on every worker.
    """

    @property
    def size(self) -> int:
        """The number of samples."""

    def samples(self, step: int, worker: int, *, workers: int, batch: int) -> list[int]:
        """The ``batch`` sample numbers that this worker reads at this step."""


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """A data set of ``size`` samples that is shuffled once, with ``seed``, and cut into one chunk for each worker."""

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        whole("size", self.size, least=1)
        whole("seed", self.seed, least=0)


class SelDP(_Chunks):
    """Every worker reads all data, but no two read the same chunk at the same time (SelSync's partitioning).

    The data are shuffled once and cut into one chunk for each worker; worker n reads chunks n, n+1, … in turn. Chunks
    may differ by one sample, but all workers change chunks at the same step, after the steps that the largest chunk
    needs. So they are in distinct chunks at all times, and after as many turns as there are workers each has read all
    data.

    >>> data = SelDP(size=6)
    >>> sorted(data.samples(0, 0, workers=2, batch=3) + data.samples(0, 1, workers=2, batch=3))
    [0, 1, 2, 3, 4, 5]
    >>> sorted(data.samples(0, 0, workers=2, batch=3) + data.samples(1, 0, workers=2, batch=3))
    [0, 1, 2, 3, 4, 5]
    """

    def samples(self, step: int, worker: int, *, workers: int, batch: int) -> list[int]:
        """The ``batch`` sample numbers that this worker reads at this step."""
        check_place(self.size, step, worker, workers, batch)
        turn, positions = _positions(step, batch, longest=-(-self.size // workers))
        return _chunk(self, (worker + turn) % workers, workers, turn, positions)


class DefDP(_Chunks):
    """Each worker reads only its own chunk of the data, which are shuffled once. This is the usual partitioning.

    >>> data = DefDP(size=6)
    >>> sorted(data.samples(0, 0, workers=2, batch=3)) == sorted(data.samples(1, 0, workers=2, batch=3))
    True
    """

    def samples(self, step: int, worker: int, *, workers: int, batch: int) -> list[int]:
        """The ``batch`` sample numbers that this worker reads at this step."""
        check_place(self.size, step, worker, workers, batch)
        turn, positions = _positions(step, batch, longest=len(_span(self.size, worker, workers)))
        return _chunk(self, worker, workers, turn, positions)


@dataclass(frozen=True, kw_only=True)
class LabelSplit:
    """Label-skewed data, for experiments: every sample belongs to one worker, and a worker reads only its own.

    ``labels`` has one label for each sample. With ``per_worker``, each worker has so many labels (1 by default): they
    are dealt round robin, workers that have the same label share its samples evenly, and labels that would be left over
    are dealt on, one by one. With ``concentration`` instead, each label is spread over the workers by shares from a
    Dirichlet distribution: the smaller, the more skewed. A worker that would have no sample gets one of the worker
    that has most. Raises ``UsageError`` for settings that make no sense.

    >>> split = LabelSplit(labels=[0, 1, 0, 1], per_worker=1)
    >>> [sorted(split.samples(0, worker, workers=2, batch=2)) for worker in range(2)]
    [[0, 2], [1, 3]]
    """

    labels: npt.ArrayLike = field(repr=False, compare=False)  # the digest stands for them
    per_worker: int | None = None
    concentration: float | None = None
    seed: int = 0
    size: int = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        whole("seed", self.seed, least=0)
        if self.per_worker is not None and self.concentration is not None:
            raise UsageError("per_worker and concentration exclude each other", hint="give one of them")
        labels = np.asarray(self.labels)
        if labels.ndim != 1 or not len(labels):
            raise UsageError(
                f"labels of shape {labels.shape} are no list of labels", hint="one label for each sample, in order"
            )
        kinds, numbers = np.unique(labels, return_inverse=True)
        numbers = numbers.astype("<i8")  # only equality and order of labels matter
        numbers.flags.writeable = False
        if self.concentration is None:
            wanted = 1 if self.per_worker is None else self.per_worker
            whole("per_worker", wanted, least=1)
            if wanted > len(kinds):
                raise UsageError(f"per_worker={wanted}, but there are only {len(kinds)} labels")
            object.__setattr__(self, "per_worker", wanted)
        else:
            number = isinstance(self.concentration, int | float)
            if not (number and 0 < self.concentration < math.inf):
                raise UsageError(f"concentration={self.concentration!r} is no finite number above 0")
        object.__setattr__(self, "labels", numbers)
        object.__setattr__(self, "size", len(numbers))
        object.__setattr__(self, "digest", hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest())

    def part(self, worker: int, *, workers: int) -> list[int]:
        """Return all samples that belong to a worker, sorted."""
        check_place(self.size, 0, worker, workers, 1)
        return sorted(_dealt(self, workers)[worker].tolist())

    def samples(self, step: int, worker: int, *, workers: int, batch: int) -> list[int]:
        """The ``batch`` sample numbers that this worker reads at this step."""
        check_place(self.size, step, worker, workers, batch)
        part = _dealt(self, workers)[worker]
        turn, positions = _positions(step, batch, longest=len(part))
        key = seed_of(self.seed, "part", worker, workers, turn)
        return part[permuted(positions % np.uint64(len(part)), len(part), key)].tolist()


def batches(partition: Partition, *, worker: int, workers: int, batch: int, start: int = 0) -> Iterator[list[int]]:
    """Yield a worker's batches without end, from step ``start`` on: a batch sampler for a hand-written loop.

    ``DataLoader(data, batch_sampler=batches(SelDP(size=len(data)), worker=rank, workers=4, batch=32))``

    >>> ahead = batches(SelDP(size=8), worker=0, workers=2, batch=2, start=5)
    >>> next(ahead) == SelDP(size=8).samples(5, 0, workers=2, batch=2)
    True
    """
    check_place(partition.size, start, worker, workers, batch)  # here, not when the first batch is drawn

    def endless() -> Iterator[list[int]]:
        step = start
        while True:
            yield partition.samples(step, worker, workers=workers, batch=batch)
            step += 1

    return endless()


def check_place(size: int, step: int, worker: int, workers: int, batch: int) -> None:
    """Raise ``UsageError`` for arguments of ``Partition.samples`` that no partition can answer."""
    whole("step", step, least=0)
    whole("workers", workers, least=1)
    whole("batch", batch, least=1)
    whole("worker", worker, least=0)
    if worker >= workers:
        raise UsageError(f"worker={worker} is none of {workers} workers", hint="workers are counted from 0")
    if size < workers:
        raise UsageError(f"{size} samples cannot be parted among {workers} workers", hint="each needs one at least")


def _positions(step: int, batch: int, *, longest: int) -> tuple[int, Numbers]:
    """Return the pass over ``longest`` samples that a step belongs to, and its positions in it.

    Positions beyond the end mean the begin of the pass, to fill up the last batch.
    """
    turn, index = divmod(step, -(-longest // batch))
    return turn, np.arange(index * batch, (index + 1) * batch, dtype=np.uint64)


def _span(size: int, chunk: int, chunks: int) -> range:
    """Return the part of the shuffled data that is a chunk.

    >>> [len(_span(10, chunk, 4)) for chunk in range(4)]
    [2, 3, 2, 3]
    """
    return range(chunk * size // chunks, (chunk + 1) * size // chunks)


def _chunk(data: SelDP | DefDP, chunk: int, chunks: int, turn: int, positions: Numbers) -> list[int]:
    """Return samples of a chunk, in the order that the chunk has in this turn."""
    span = _span(data.size, chunk, chunks)
    within = permuted(positions % np.uint64(len(span)), len(span), seed_of(data.seed, "chunk", chunk, chunks, turn))
    return permuted(within + np.uint64(span.start), data.size, seed_of(data.seed, "chunks")).tolist()


@lru_cache(maxsize=16)
def _dealt(split: LabelSplit, workers: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the samples of each worker. The last results are kept: this reads all labels."""
    labels = np.asarray(split.labels)
    random = np.random.RandomState([seed_of(split.seed, "deal", workers) >> shift & 0xFFFFFFFF for shift in (0, 32)])
    piles: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(workers)]
    for label, shares in enumerate(_shares(split, int(labels.max()) + 1, workers, random)):
        samples = random.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(int)
        for pile, some in zip(piles, np.split(samples, cuts), strict=True):
            pile.append(some)
    parts = [np.concatenate(pile) for pile in piles]
    for worker in range(workers):
        if not len(parts[worker]):
            if split.concentration is None:
                raise UsageError(
                    f"worker {worker} of {workers} would have no samples: too few have its labels",
                    hint="fewer workers, more labels per_worker, or concentration= instead",
                )
            richest = max(range(workers), key=lambda other: len(parts[other]))
            parts[worker], parts[richest] = parts[richest][:1], parts[richest][1:]
    return tuple(parts)


def _shares(split: LabelSplit, labels: int, workers: int, random: np.random.RandomState) -> npt.NDArray[np.float64]:
    """Return the share of each label that each worker has: a row for each label."""
    if split.concentration is None:
        return _round_robin(labels, workers, split.per_worker or 1)
    # RandomState: the one generator of which NumPy promises that its numbers never change.
    shares = random.dirichlet(np.full(workers, split.concentration), size=labels)
    for row in shares:
        if not np.isfinite(row).all():  # a concentration so small that all was rounded to 0: its limit is one owner
            row[:] = np.eye(workers)[random.randint(workers)]
    return shares


def _round_robin(labels: int, workers: int, per_worker: int) -> npt.NDArray[np.float64]:
    """Return the shares of labels that are dealt round robin, ``per_worker`` to each worker.

    >>> _round_robin(3, 2, 1)
    array([[1., 0.],
           [0., 1.],
           [1., 0.]])
    """
    hands = np.zeros((labels, workers))
    for slot in range(workers * per_worker):
        hands[slot % labels, slot // per_worker] = 1
    for label in range(workers * per_worker, labels):
        hands[label, label % workers] = 1
    return hands / hands.sum(axis=1, keepdims=True)
