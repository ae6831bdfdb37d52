"""The copy of the state: only what is missing, whole, to all who lack it, from all who have it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.engine.model import LayeredModel
from holdfast.engine.progress import Progress
from holdfast.engine.state import State
from holdfast.engine.update import Update
from holdfast.errors import Broken
from holdfast.recovery.copy import Move, carry_out, moves, tell
from tests.engine.memory_group import MemoryGroup, Network, Receive, on_workers

UNITS = 6  # five layers, and what the first and the last share


def make_state(seed: int, steps: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False), nn.Linear(3, 4)]
    layers[4].weight = layers[0].weight
    model = LayeredModel(layers, seed=0, device=torch.device("cpu"))
    for p in model.trainable:
        p.data.copy_(torch.randn(p.shape, generator=generator))
    model.layers[2].running_mean.copy_(torch.randn(4, generator=generator))
    update = Update(model.trainable, lambda ps: torch.optim.AdamW(ps, lr=0.1 + seed))
    for step in range(steps):
        for p in model.trainable:
            p.grad = torch.randn(p.shape, generator=generator)
        update.apply(step=step)
    assert len(model.units) == UNITS
    progress = Progress(step=steps, results={"1/0": 0.25 + seed})
    return State(model, update, progress)


def digest(state: State, unit: int) -> Any:
    """All of a unit, to the bit."""
    found = state.read(state.model.units[unit])
    tensors = [t.clone() for t in [*found["parameters"], *found["buffers"]]]
    slots = [{key: torch.as_tensor(value).tolist() for key, value in slot.items()} for slot in found["slots"]]
    return [t.tolist() for t in tensors], slots


def part_of(state: State, held: set[int]) -> State:
    """Layers none of whose units is held have no memory; the others have, with wrong values where it is not held."""
    wanted = {layer for unit in held for layer in state.model.units[unit].layers}
    state.model.release(set(range(5)) - wanted)
    state.forget()
    return state


ALL = set(range(UNITS))
CASES: list[tuple[list[set[int]], list[set[int]]]] = [
    ([ALL, set()], [ALL, ALL]),
    ([set(), ALL], [ALL, ALL]),
    ([ALL, set(), ALL, set()], [ALL] * 4),
    ([ALL, ALL, ALL], [ALL] * 3),
    ([{0, 1, 5}, {2, 3, 4, 5}], [ALL, ALL]),
    ([{0, 1, 5}, {2, 3, 4, 5}, set()], [{0, 1, 2, 5}, {3}, {4, 5}]),
    ([{0, 5}, {4, 5}, {1, 2, 3}], [{1, 2, 3}, {0, 5}, {4, 5}]),  # everybody changes places
    ([{0, 1, 2, 5}, {3, 4, 5}, {0, 1, 2, 5}, {3, 4, 5}, set(), set()], [{0, 1, 5}, {2, 3}, {4, 5}] * 2),
]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_everybody_ends_with_what_it_wants_and_only_what_is_missing_moves(case: int, steps: int) -> None:
    held, wanted = CASES[case]
    expected = [digest(make_state(7, steps), unit) for unit in range(UNITS)]
    sizes = {unit.number: sum(t.nbytes for t in unit.tensors) for unit in make_state(7, steps).model.units}
    planned = moves(held, wanted, sizes)
    network = Network(len(held))

    def work(group: MemoryGroup) -> tuple[int, list[int]]:
        state = part_of(make_state(7, steps), held[group.rank])
        missing = wanted[group.rank] - held[group.rank]
        state.model.hold({layer for unit in missing for layer in state.model.units[unit].layers})
        arrived: list[int] = []

        def count(unit: int) -> None:
            assert digest(state, unit) == expected[unit], "it counts as held, so it must be whole"
            arrived.append(unit)

        received = carry_out(group, state, planned, count).received
        group.vote(torch.zeros(1))
        assert all(digest(state, unit) == expected[unit] for unit in wanted[group.rank] | set(arrived))
        return received, sorted(arrived)

    results = on_workers(len(held), work, network)
    assert [arrived for _, arrived in results] == [sorted(w - h) for w, h in zip(wanted, held, strict=True)]
    assert [received > 0 for received, _ in results] == [bool(w - h) for w, h in zip(wanted, held, strict=True)]
    slots = 3 if steps else 1  # a weight, and for each of them two slots
    least = sum(sizes[move.unit] for move in planned)
    headers = 2000 * len({(move.sender, move.receiver) for move in planned}) + 200 * len(planned)
    assert least <= network.bytes <= slots * least + headers


def test_a_newcomer_hears_where_the_run_is() -> None:
    def work(group: MemoryGroup) -> tuple[Progress, float]:
        state = make_state(7, 3) if group.rank in (1, 3) else make_state(group.rank, 1)
        tell(group, state, teller=1, listeners=[0, 2])
        group.vote(torch.zeros(1))
        return state.progress, state.update.optimizer.param_groups[0]["lr"]

    told = make_state(7, 3)
    assert on_workers(4, work) == [(told.progress, told.update.optimizer.param_groups[0]["lr"])] * 4


class Breaking(MemoryGroup):
    """Lost after so many receives. Each that was posted must be waited for, or it may write into memory given back."""

    def __init__(self, group: MemoryGroup, after: int) -> None:
        super().__init__(group.rank, group.network)
        self.after = after
        self.posted: list[Receive] = []

    def start(self, sends: Any, receives: Any) -> list[Receive]:
        made = super().start(sends, receives)
        self.posted += made
        return made

    def wait(self, work: Receive) -> None:
        self.after -= 1
        if self.after < 0:
            work.let_go()
            raise Broken("lost")
        super().wait(work)


@pytest.mark.parametrize("after", range(0, 30, 2))
def test_what_arrived_before_a_break_is_whole_and_the_rest_is_not_held(after: int) -> None:
    held, wanted = [ALL, ALL, set()], [ALL, ALL, ALL]
    planned = moves(held, wanted, dict.fromkeys(range(UNITS), 1))
    assert {move.sender for move in planned} == {0, 1}
    expected = [digest(make_state(7, 3), unit) for unit in range(UNITS)]

    def work(group: MemoryGroup) -> list[int] | None:
        if group.rank != 2:
            carry_out(group, make_state(7, 3), planned, lambda unit: None)
            return None
        state, breaking = make_state(1, 1), Breaking(group, after)
        arrived: list[int] = []
        with pytest.raises(Broken):
            carry_out(breaking, state, planned, arrived.append)
        assert all(receive.waited for receive in breaking.posted)
        assert all(digest(state, unit) == expected[unit] for unit in arrived)
        return arrived

    arrived = on_workers(3, work)[2]
    assert arrived is not None
    assert len(arrived) < UNITS
    assert arrived or after < 10, "the control: some of them break later"


@st.composite
def holdings(draw: st.DrawFn) -> tuple[list[set[int]], list[set[int]], dict[int, int]]:
    units, ranks = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    some = st.sets(st.integers(0, units - 1))
    held = [draw(some) for _ in range(ranks)]
    wanted = [draw(some) for _ in range(ranks)]
    for unit in range(units):
        if not any(unit in each for each in held):
            held[draw(st.integers(0, ranks - 1))].add(unit)
    return held, wanted, {unit: draw(st.integers(0, 100)) for unit in range(units)}


@given(holdings())
def test_each_missing_unit_comes_once_from_one_who_holds_it(
    case: tuple[list[set[int]], list[set[int]], dict[int, int]],
) -> None:
    held, wanted, sizes = case
    found = moves(held, wanted, sizes)
    missing = [(unit, rank) for rank, units in enumerate(wanted) for unit in units - held[rank]]
    assert sorted((move.unit, move.receiver) for move in found) == sorted(missing)
    assert all(move.unit in held[move.sender] for move in found)
    assert found == moves(held, [list(units)[::-1] for units in wanted], sizes), "pure"


@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 4))
def test_the_load_is_spread_over_the_holders(holders: int, units: int, newcomers: int) -> None:
    everything = set(range(units))
    held = [everything] * holders + [set()] * newcomers
    sent = Counter(move.sender for move in moves(held, [everything] * len(held), dict.fromkeys(everything, 5)))
    counts = [sent[rank] for rank in range(holders)]
    assert sum(counts) == units * newcomers
    assert max(counts) - min(counts) <= 1


def test_a_plan_for_many_joiners_does_not_grow_with_the_square_of_the_workers() -> None:
    class Counted(frozenset[int]):
        asked = 0

        def __contains__(self, unit: object) -> bool:
            Counted.asked += 1
            return super().__contains__(unit)

    asked = []
    for workers in (32, 128):
        Counted.asked = 0
        held = [Counted(range(4)) if rank % 2 else Counted() for rank in range(workers)]
        assert len(moves(held, [range(4)] * workers, dict.fromkeys(range(4), 1))) == 4 * workers / 2
        asked.append(Counted.asked)
    assert asked[1] == 4 * asked[0]


def test_a_large_unit_is_weighed() -> None:
    held, wanted = [{0, 1, 2, 3}, {0, 1, 2, 3}, set()], [set(), set(), {0, 1, 2, 3}]
    found = moves(held, wanted, {0: 10, 1: 10, 2: 10, 3: 30})
    assert sorted(move.unit for move in found if move.sender == 0) == [3]
    assert found == sorted(found, key=lambda move: (move.unit, move.receiver))
    assert isinstance(found[0], Move)
