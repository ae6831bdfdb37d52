"""Random numbers as a function of where they are drawn, not of who draws them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*place: int | str) -> int:
    """A seed for a place, such as (seed, step, micro-batch, layer).

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2), seed_of(0, 1, 2) == seed_of(0, 12)
    (True, False)
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seeds the generators that layers draw from; a few microseconds."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":  # untested here
        torch.cuda.manual_seed(seed)


def seed_everything(seed: int, device: torch.device) -> None:
    """Also Python's and NumPy's generators, which data sets use to augment."""
    seed_torch(seed, device)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def undisturbed_generators() -> Iterator[None]:
    """What is seeded and drawn within this changes nothing for the script."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
