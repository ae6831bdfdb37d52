"""Random numbers as a function of the place where they are drawn (step, micro-batch, layer), not of the worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_of(*place: int | str) -> int:
    """Return the seed of a place, such as (seed, step, micro-batch, layer). It is below 2**63.

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2), seed_of(0, 1, 2) == seed_of(0, 12)
    (True, False)
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators that layers draw from. This takes a few microseconds."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":  # untested here
        torch.cuda.manual_seed(seed)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed torch's generators, and also Python's and NumPy's, which data sets use to augment samples."""
    seed_torch(seed, device)
    random.seed(seed)
    np.random.seed(seed % 2**32)


Generators = tuple[Any, Any, Any]  # the states of Python's, NumPy's and torch's generators


def generators() -> Generators:
    """Return the states of the generators that data sets draw from, for ``set_generators``."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_generators(states: Generators) -> None:
    """Let Python's, NumPy's and torch's generators go on where they were."""
    python, numpy, tensors = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(tensors)


@contextmanager
def undisturbed_generators() -> Iterator[None]:
    """Restore torch's, Python's and NumPy's generators after this context."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
