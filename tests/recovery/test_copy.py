"""The copy of the state: whole, to all who lack it, from all who have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.model import LayeredModel
from holdfast.engine.state import State
from holdfast.engine.update import Update
from holdfast.recovery.copy import copy_state, sender_of
from tests.engine.memory_group import on_workers


def make_state(seed: int, steps: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(4, 3), nn.ReLU(), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)]
    model = LayeredModel(layers, seed=0, device=torch.device("cpu"))
    for p in model.trainable:
        p.data = torch.randn(p.shape, generator=generator)
    update = Update(model.trainable, lambda ps: torch.optim.AdamW(ps, lr=0.1))
    for step in range(steps):
        for p in model.trainable:
            p.grad = torch.randn(p.shape, generator=generator)
        update.apply(step=step)
    return State(model, update, {"step": steps, "evaluations": {"1/0": 0.25}})


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("size", "holders", "receivers"),
    [(2, [0], [1]), (2, [1], [0]), (4, [0, 2], [1, 3]), (4, [0, 1, 3], [2]), (3, [2], [0, 1]), (3, [0, 1, 2], [])],
)
def test_receivers_end_with_the_state_of_the_holders(
    size: int, holders: list[int], receivers: list[int], steps: int
) -> None:
    expected = make_state(7, steps)

    def work(group: Any) -> tuple[int, str, dict[str, Any]]:
        state = make_state(7, steps) if group.rank in holders else make_state(group.rank, 1)
        count = copy_state(group, state, holders=holders, receivers=receivers)
        group.vote(torch.zeros(1))
        return count, state.sha256(), state.progress

    results = on_workers(size, work)
    assert all(sha256 == expected.sha256() for _, sha256, _ in results)
    assert all(progress == expected.progress for _, _, progress in results)
    assert [rank for rank, (count, _, _) in enumerate(results) if count] == receivers


def test_the_load_is_spread_over_the_holders() -> None:
    senders = [sender_of(part, [0, 2, 5]) for part in range(9)]
    assert [senders.count(holder) for holder in (0, 2, 5)] == [3, 3, 3]
