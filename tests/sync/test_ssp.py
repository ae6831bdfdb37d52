"""Stale-synchronous updates: nothing that was made is lost, and nobody runs far ahead."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.sync.ssp import SSP, Pushes, heirs
from tests.engine.memory_group import MemoryGroup, on_workers


def step(parameter: torch.Tensor, by: float) -> None:
    with torch.no_grad():
        parameter.add_(by)


def train(group: MemoryGroup, steps: int, staleness: int, seconds: float = 0.0) -> tuple[torch.Tensor, list[float]]:
    """Rank r adds 1 + r in each step, so that it can be seen whose updates have come."""
    parameter = torch.zeros(3)
    pushes = Pushes(group, [parameter], staleness=staleness)
    seen = []
    for _ in range(steps):
        time.sleep(seconds * group.rank)
        step(parameter, 1.0 + group.rank)
        pushes.exchange()
        seen.append(float(parameter[0]))
    pushes.close()
    pushes.gather(group.size)
    return parameter, seen


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_what_all_have_made_adds_up_to_what_a_server_would_have(staleness: int) -> None:
    found = on_workers(3, lambda group: train(group, 6, staleness)[0])
    mean = torch.stack(found).mean(0)
    assert torch.allclose(mean, torch.full((3,), 6 * (1 + 2 + 3) / 3))


def test_without_staleness_all_see_all_updates_at_once() -> None:
    for _, seen in on_workers(3, lambda group: train(group, 4, staleness=0)):
        assert seen == pytest.approx([2.0, 4.0, 6.0, 8.0])


def test_nobody_is_ahead_by_more_than_the_staleness() -> None:
    made = [0, 0, 0]
    most: list[int] = []
    lock = threading.Lock()

    def work(group: MemoryGroup) -> None:
        parameter = torch.zeros(2)
        pushes = Pushes(group, [parameter], staleness=2)
        for _ in range(12):
            time.sleep(0.004 * group.rank)  # rank 0 would run away
            step(parameter, 1.0)
            with lock:
                made[group.rank] += 1
                most.append(made[group.rank] - min(made))
            pushes.exchange()
        pushes.close()

    on_workers(3, work)
    assert max(most) > 1, "nobody was ahead, so nothing was shown"
    assert max(most) <= 3  # two, and the step in hand


def test_after_a_break_nothing_of_the_living_is_lost() -> None:
    """The third is gone with one update that only the second has heard; the first two still add up all they made."""
    parameters = [torch.zeros(2) for _ in range(2)]
    pushes: list[Any] = [None, None]

    def work(group: MemoryGroup) -> None:
        if group.rank == 2:
            group.keep(group.send([(1, torch.full((2,), 3.0 / 3), 8)]))
            return
        parameter = parameters[group.rank]
        mine = pushes[group.rank] = Pushes(group, [parameter], staleness=5)
        step(parameter, 1.0 + group.rank)
        mine.exchange()
        while group.rank == 1 and mine.heard[2] < 1:
            time.sleep(0.005)
        if group.rank == 1:
            group.network.fail()

    on_workers(3, work)
    for one in pushes:
        one.abandon()
    step(parameters[0], 10.0)  # the first catches up by itself, and tells nobody
    pushes[0].fold()
    pushes[0].gather(2)
    pushes[1].gather(2, lost=[2])
    assert torch.allclose((parameters[0] + parameters[1]) / 2, torch.full((2,), (1 + 2 + 3 + 10) / 3))


def test_who_has_heard_most_of_a_lost_one_is_its_heir() -> None:
    assert heirs({"a": {"b": 4, "c": 2}, "b": {"a": 4, "c": 2}}, alive=["a", "b"]) == {"c": "a"}
    assert heirs({"a": {}, "b": {"a": 1, "c": 0, "d": 7}}, alive=["a", "b"]) == {"c": "b", "d": "b"}
    assert heirs({"a": {"b": 1}, "b": {"a": 1}}, alive=["a", "b"]) == {}


@pytest.mark.parametrize(
    "settings", [{"staleness": -1}, {"staleness": 1.5}, {"overlap": 2}, {"optimizer_state": "average"}]
)
def test_bad_settings_are_refused_in_words(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SSP(**settings)
