"""Partitions as the roster sees them, and the choice of a side."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import pytest

from holdfast.cluster.generations import TRIES
from holdfast.cluster.membership import GIVEN_UP
from holdfast.cluster.partition import REFUSALS, side_that_stays, why_resign
from holdfast.cluster.register import Sent
from tests.cluster.table import Table, logged
from tests.standings import standing


def two_machines(*, slots: tuple[int, int] = (2, 1), **settings: Any) -> Table:
    """Machine 0 with workers 0.0 …; machine 1 with 1.0 …."""
    table = Table(None, maximum_hosts=2, minimum_hosts=2, **settings)
    for machine in (0, 1):
        table.agent(machine, slots=slots[machine])
    for machine in (0, 1):
        for number in range(slots[machine]):
            table.worker(f"{machine}.{number}")
    return table


def complain(table: Table, name: str, *unreached: str) -> list[Sent]:
    return table.show(name, operation=5, broken=True, unreached=unreached)


def test_a_complaint_keeps_the_smaller_side_out() -> None:
    table = two_machines()
    complain(table, "1.0", "0.0", "0.1")
    complain(table, "0.0")
    sent = complain(table, "0.1")
    assert table.roster.members == ["0.0", "0.1"]
    assert table.code("1.0") == GIVEN_UP
    assert "partition" in logged(sent)


def test_a_machine_that_is_kept_out_is_tried_again_later() -> None:
    table = two_machines(patience=1000.0)
    for name in ("0.0", "0.1"):
        complain(table, name)
    complain(table, "1.0", "0.0")
    table.die("1.0", GIVEN_UP)
    table.news("0.0")
    table.worker("1.1")
    table.wait(50.0)
    assert "pause" not in table.news("0.0"), "its new worker waits"
    table.wait(20.0)
    assert "pause" in table.news("0.0"), "the network may be mended by now"


def test_a_run_that_needs_the_machine_tries_it_again_before_it_ends() -> None:
    table = two_machines(patience=30.0)
    for name in ("0.0", "0.1"):
        complain(table, name)
    complain(table, "1.0", "0.0")
    table.die("1.0", GIVEN_UP)
    table.worker("1.1")
    table.wait(20.0)
    assert "pause" in table.news("0.0")
    for name in ("0.0", "0.1"):
        table.show(name, operation=6, boundary=True)
    assert table.roster.members == ["0.0", "0.1", "1.1"]
    table.commit("0.0", 7)
    table.wait(60.0)
    assert not table.roster.stopped


def test_a_run_that_needs_the_machine_ends_and_says_why() -> None:
    table = two_machines(patience=30.0)
    for name in ("0.0", "0.1"):
        complain(table, name)
    complain(table, "1.0", "0.0")
    sent = table.wait(60.0)
    (stop,) = [m for r, m in sent if r == 100 and m["type"] == "stop"]
    assert stop["code"] == table.code("0.0") == 3
    assert "others cannot reach 1" in stop["message"]


def test_the_same_workers_are_not_put_together_for_ever() -> None:
    """They fail without a complaint: a firewall that refuses, say."""
    table = Table(2, patience=30.0)
    for _ in range(2 * TRIES):
        if table.roster.stopped:
            break
        for number in range(2):
            table.show(f"0.{number}", operation=5, broken=True)
        table.wait(2.0)
    assert table.roster.stopped
    (stop,) = [m for r, m in table.sent if r == 100 and m["type"] == "stop"]
    assert "could not work together 20 times" in stop["message"]


def test_a_commit_begins_the_count_anew() -> None:
    table = Table(2, patience=30.0)
    for _ in range(2 * TRIES):
        for number in range(2):
            table.show(f"0.{number}", operation=5, broken=True)
        table.commit("0.0", 6)
        table.wait(2.0)
    assert not table.roster.stopped


def test_a_machine_that_refuses_another_again_and_again_is_kept_out() -> None:
    """Now and then, it may only have given the generation up before the other had."""
    table = two_machines(patience=1000.0)
    for times in range(1, REFUSALS + 1):
        table.show("1.0", operation=5, broken=True, refused=("0.0",))
        for name in ("0.0", "0.1"):
            sent = table.show(name, operation=5, broken=True)
        assert ("partition" in logged(sent)) == (times == REFUSALS)
    assert table.roster.members == ["0.0", "0.1"]


# --- before the first generation -------------------------------------------------------------------------


def test_a_machine_that_was_asked_to_leave_before_the_begin_has_no_members() -> None:
    """Its workers are still there: they end a moment later."""
    table = Table(None, maximum_hosts=2)
    table.agent(0, slots=2)
    table.agent(1)
    for number in range(2):
        table.worker(f"0.{number}")
    table.hear(0, "slots", slots=0)
    assert table.roster.generation is None
    table.worker("1.0")
    assert table.roster.members == ["1.0"]


def test_nobody_left_forms_no_generation() -> None:
    table = Table(None, maximum_hosts=2)
    table.agent(0, slots=2)
    table.worker("0.0")
    table.hear(0, "slots", slots=0)
    table.worker("0.1")
    table.die("0.0", 0, finished=False)
    table.wait(20.0)
    assert table.roster.generation is None
    assert "generation" not in logged(table.sent)


def test_a_run_whose_hosts_all_leave_before_the_begin_waits_only_for_its_patience() -> None:
    table = Table(None, maximum_hosts=2, minimum_hosts=2)
    table.agent(0)
    table.agent(1)
    table.worker("0.0")
    table.hear(1, "slots", slots=0)
    sent = table.wait(60.0)
    assert [m["code"] for r, m in sent if r == 100 and m["type"] == "stop"] == [3]


# --- the choice of a side --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_side_that_stays_is_the_largest(seed: int) -> None:
    chance = random.Random(seed)
    machines = range(chance.randint(2, 7))
    workers = {machine: chance.randint(1, 4) for machine in machines}
    cut = {frozenset(pair) for pair in combinations(machines, 2) if chance.random() < 0.4}

    def is_whole(side: tuple[int, ...]) -> bool:
        return not any(frozenset(pair) in cut for pair in combinations(side, 2))

    sides = [side for size in range(1, len(machines) + 1) for side in combinations(machines, size) if is_whole(side)]
    stays = side_that_stays(workers, cut)
    assert is_whole(tuple(stays))
    assert sum(workers[m] for m in stays) == max(sum(workers[m] for m in side) for side in sides)


@pytest.mark.parametrize("machines", [40, 200])
def test_many_machines_are_decided_soon(machines: int) -> None:
    """Each pair by itself, and half against half with some links left. All sides would be 2 to the 40th."""
    workers = dict.fromkeys(range(machines), 1)
    pairs = {frozenset({n, n + 1}) for n in range(0, machines, 2)}
    assert side_that_stays(workers, pairs) == set(range(0, machines, 2))
    chance = random.Random(0)
    halves = [(a, b) for a in range(machines // 2) for b in range(machines // 2, machines)]
    cut = {frozenset(pair) for pair in halves if chance.random() < 0.3}
    stays = side_that_stays(workers, cut)
    assert not any(pair <= stays for pair in cut)
    assert len(stays) >= machines // 2 - machines // 10


def test_a_complaint_about_somebody_who_is_gone_counts_for_nothing() -> None:
    table = two_machines()
    table.close(1)
    for name in ("0.0", "0.1"):
        sent = complain(table, name, "1.0")
    assert "partition" not in logged(sent)
    assert table.roster.members == ["0.0", "0.1"]
    assert standing(unreached=("1.0",)).unreached == ("1.0",)


@pytest.mark.parametrize(
    ("heard", "alive", "resigns"),
    [
        ({0}, {0, 1, 2}, True),
        ({0}, {1, 2}, True),  # its own agent's lease counts for nothing: it is connected
        ({0, 1}, {0, 1, 2}, False),
        ({0}, {0, 1}, False),  # one machine against one; the third is dead
        ({0}, {0}, False),
        ({0, 3, 4}, {0, 1, 2, 3, 4}, True),  # machines that wait to join do not hold the state
        ({0, 1, 2}, {0, 1, 2, 3, 4, 5}, False),
    ],
)
def test_a_coordinator_leaves_its_role_to_more_living_members(heard: set[int], alive: set[int], resigns: bool) -> None:
    reason = why_resign({0: 2, 1: 2, 2: 2}, heard=heard, alive=alive)
    assert bool(reason) == resigns
    assert not resigns or "reaches 2 of 6 workers" in reason


def test_a_coordinator_of_a_run_that_has_not_begun_does_not_leave_its_role() -> None:
    assert not why_resign({}, heard={0}, alive={0, 1, 2})
