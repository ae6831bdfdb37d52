"""Random numbers belong to a place."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch

from holdfast.rng import seed_everything, seed_of

CPU = torch.device("cpu")


def test_places_have_seeds_of_their_own_that_torch_takes() -> None:
    seeds = [seed_of(0, *place) for place in itertools.product(range(10), range(10), range(10))]
    seeds += [seed_of(0, step, index, "data") for step in range(10) for index in range(10)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_on_every_machine_and_in_every_process() -> None:
    assert seed_of(1, 2, 3, "data") == 1312979194926263833


def test_all_generators_repeat_and_move_with_the_seed() -> None:
    def draw(seed: int) -> tuple[float, float, float]:
        seed_everything(seed, CPU)
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    first, again, other = draw(5), draw(5), draw(seed_of(6))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))
