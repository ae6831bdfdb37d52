"""The ledger: what stops half-way is told apart from what is done, and from what nobody has touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.undo.ledger import Ledger

COUNT = 6


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1)) for _ in range(COUNT)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 5))
@settings(deadline=None)
def test_each_parameter_is_untouched_torn_or_done(sizes: list[int], stops: int) -> None:
    """Entries of these sizes, of which number ``stops`` fails in the middle: those behind it are never opened."""
    ps, ledger = parameters(), Ledger()
    optimizer = torch.optim.SGD(ps, lr=0.1)
    expected: dict[str, list[nn.Parameter]] = {"done": [], "torn": []}
    start = 0
    for number, size in enumerate(sizes):
        entry = ps[start : start + size]
        start += len(entry)
        if number == stops:
            with pytest.raises(RuntimeError), ledger.entry(entry, optimizer):
                raise RuntimeError("the optimizer stumbles")
            expected["torn"] += entry
            break
        with ledger.entry(entry, optimizer):
            pass
        expected["done"] += entry
    assert list(map(id, ledger.done)) == list(map(id, expected["done"]))
    assert list(map(id, ledger.torn)) == list(map(id, expected["torn"]))
    assert list(map(id, ledger.begun)) == list(map(id, expected["done"] + expected["torn"]))
    ledger.clear()
    assert (ledger.begun, ledger.done, ledger.torn, ledger.first) == ([], [], [], set())


def test_it_knows_which_had_no_step_before() -> None:
    ps, ledger = parameters(), Ledger()
    optimizer = torch.optim.AdamW(ps, lr=0.1)
    ps[0].grad = torch.ones(1)
    optimizer.step()
    with ledger.entry(ps[:2], optimizer):
        pass
    assert ledger.first == {ps[1]}


def test_a_parameter_that_is_updated_twice_is_found_out() -> None:
    ps, ledger = parameters(), Ledger()
    optimizer = torch.optim.SGD(ps, lr=0.1)
    with ledger.entry(ps[:2], optimizer):
        pass
    with pytest.raises(AssertionError, match="twice"), ledger.entry(ps[1:3], optimizer):
        pass
