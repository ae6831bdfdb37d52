"""The start of a loop: everything becomes the first replica's, and nothing that travels is a pickle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.sync.start import copy_from_first
from tests.engine.memory_group import on_workers


def odd_state(weight: torch.Tensor, rank: int) -> dict[str, Any]:
    """Values that ``load_state_dict`` leaves as they are."""
    return {
        "step": torch.tensor(3.0 + rank),
        "count": 7 + rank,
        "rate": 0.1 + rank,
        "none": None,
        "betas": (0.5, float("inf")),
        "moment": weight.detach().clone().t() + rank,
        "nothing": torch.empty(0),
    }


def test_any_state_without_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **how: Any) -> None:
        raise AssertionError("a pickle")

    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)

    def work(group: Any) -> tuple[dict[str, Any], float]:
        weight = torch.nn.Parameter(torch.full((2, 3), float(group.rank)))
        optimizer = torch.optim.SGD([weight], lr=0.1 + group.rank)
        optimizer.state[weight].update(odd_state(weight, group.rank))
        copy_from_first(group, [weight], optimizer)
        assert weight.tolist() == [[0.0] * 3] * 2
        return optimizer.state[weight], optimizer.param_groups[0]["lr"]

    wanted = odd_state(torch.zeros(2, 3), 0)
    for rank, (state, rate) in enumerate(on_workers(3, work)):
        assert rate == 0.1 + rank, "settings stay"
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state[key], value), key
            else:
                assert (type(state[key]), state[key]) == (type(value), value)


def test_what_cannot_be_sent_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["function"] = lambda: None
    with pytest.raises(UsageError):
        on_workers(1, lambda group: copy_from_first(group, [weight], optimizer))
