"""Partitions as the roster sees them, the choice of a side, and unanswered calls as the kernel lists them."""

from __future__ import annotations

import os
import random
import socket
from itertools import combinations
from typing import Any

import pytest

from holdfast.cluster import reach
from holdfast.cluster.generations import TRIES
from holdfast.cluster.membership import GIVEN_UP
from holdfast.cluster.partition import REFUSALS, side_that_stays
from holdfast.cluster.register import Sent
from tests.cluster.test_roster import Table, logged, to
from tests.standings import standing


def two_machines(*, slots: tuple[int, int] = (2, 1), **settings: Any) -> Table:
    """Machine 0 with workers 0.0 …, on connections 0 …; machine 1 with 1.0 …, on 10 …."""
    table = Table(0, maximum_hosts=2, minimum_hosts=2, **settings)
    table.agent(100, slots=slots[0])
    table.agent(101, agent="b", slots=slots[1])
    for number in range(slots[0]):
        table.worker(number)
    for number in range(slots[1]):
        join(table, number)
    return table


def join(table: Table, number: int) -> list[Sent]:
    return table.worker(number, connection=10 + number, worker=f"1.{number}", incarnation=f"b {number}", host="1")


def complain(table: Table, connection: int, *unreached: str) -> list[Sent]:
    return table.show(connection, operation=5, broken=True, unreached=unreached)


def test_a_complaint_keeps_the_smaller_side_out() -> None:
    table = two_machines()
    complain(table, 10, "0.0", "0.1")
    complain(table, 0)
    sent = complain(table, 1)
    assert table.roster.members == ["0.0", "0.1"]
    assert [m["code"] for r, m in sent if r == 10] == [GIVEN_UP]
    assert "partition" in logged(sent)


def test_a_machine_that_is_kept_out_is_tried_again_later() -> None:
    table = two_machines(patience=1000.0)
    for connection in (0, 1):
        complain(table, connection)
    complain(table, 10, "0.0")
    sent = join(table, 1)
    assert "pause" not in to(sent, 0), "its new worker waits"
    everybody = (0, 1, 11, 100, 101)
    assert "pause" not in to(table.wait(50.0, *everybody), 0)
    assert "pause" in to(table.wait(20.0, *everybody), 0), "the network may be mended by now"


def test_a_run_that_needs_the_machine_ends_and_says_why() -> None:
    table = two_machines()
    for connection in (0, 1):
        complain(table, connection)
    complain(table, 10, "0.0")
    sent = table.wait(60.0, 0, 1, 100, 101)
    (stop,) = [m for r, m in sent if r == 0 and m["type"] == "stop"]
    assert stop["code"] == 3
    assert "others cannot reach 1" in stop["message"]


def test_the_same_workers_are_not_put_together_for_ever() -> None:
    """They fail without a complaint: a firewall that refuses, say."""
    table = Table(2, patience=30.0)
    for _ in range(2 * TRIES):
        if table.roster.stopped:
            break
        for number in range(2):
            table.show(number, operation=5, broken=True)
        table.wait(2.0, 0, 1, 100)
    assert table.roster.stopped
    (stop,) = [m for r, m in table.sent if r == 0 and m["type"] == "stop"]
    assert "could not work together 20 times" in stop["message"]


def test_a_commit_begins_the_count_anew() -> None:
    table = Table(2, patience=30.0)
    for _ in range(2 * TRIES):
        for number in range(2):
            table.show(number, operation=5, broken=True)
        assert table.roster.generation is not None
        table.hear(0, "progress", generation=table.roster.generation.name, operation=6)
        table.wait(2.0, 0, 1, 100)
    assert not table.roster.stopped


def test_a_machine_that_refuses_another_again_and_again_is_kept_out() -> None:
    """Now and then, it may only have given the generation up before the other had."""
    table = two_machines(patience=1000.0)
    for times in range(1, REFUSALS + 1):
        table.show(10, operation=5, broken=True, refused=("0.0",))
        for connection in (0, 1):
            sent = table.show(connection, operation=5, broken=True)
        assert ("partition" in logged(sent)) == (times == REFUSALS)
    assert table.roster.members == ["0.0", "0.1"]


# --- before the first generation -------------------------------------------------------------------------


def test_a_machine_that_was_asked_to_leave_before_the_begin_has_no_members() -> None:
    """Its workers are still connected: they end a moment later."""
    table = Table(0, maximum_hosts=2)
    table.agent(100, slots=2)
    table.agent(101, agent="b", slots=1)
    for number in range(2):
        table.worker(number)
    table.hear(100, "slots", slots=0)
    assert table.roster.generation is None
    join(table, 0)
    assert table.roster.members == ["1.0"]


def test_nobody_left_forms_no_generation() -> None:
    table = Table(0, maximum_hosts=2)
    table.agent(100, slots=2)
    table.worker(0)
    table.hear(100, "slots", slots=0)
    table.worker(1)
    table.close(0)
    table.wait(20.0, 1, 100)
    assert table.roster.generation is None
    assert "generation" not in logged(table.sent)


def test_a_run_whose_hosts_all_leave_before_the_begin_waits_only_for_its_patience() -> None:
    table = Table(0, maximum_hosts=2, minimum_hosts=2)
    table.agent(100, slots=1)
    table.agent(101, agent="b", slots=1)
    table.worker(0)
    table.hear(101, "slots", slots=0)
    sent = table.wait(60.0, 0, 100, 101)
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
    table.close(10)
    table.close(101)
    for connection in (0, 1):
        sent = complain(table, connection, "1.0")
    assert "partition" not in logged(sent)
    assert table.roster.members == ["0.0", "0.1"]
    assert standing(unreached=("1.0",)).unreached == ("1.0",)


# --- calls -----------------------------------------------------------------------------------------------


def test_a_call_that_nobody_answers_is_found() -> None:
    """A listener whose queue is full answers no further call, as a machine that is gone."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        inodes = {f"socket:[{_inode(caller)}]" for caller in callers}
        assert reach.calling(inodes) == {server.getsockname()}
        assert reach.calling(set()) == set(), "calls of others are not ours"
        for caller in callers:
            caller.close()


def _inode(caller: socket.socket) -> int:
    return os.fstat(caller.fileno()).st_ino


def test_an_address_of_the_other_family() -> None:
    assert reach._address("0000000000000000FFFF00000200000A") == "10.0.0.2"
    assert reach._address("00000000000000000000000001000000") == "::1"


def test_a_call_that_is_answered_in_between_begins_anew() -> None:
    calls = reach.Calls(seconds=5.0)
    assert calls.look({"a"}, 0.0) == calls.look(set(), 4.0) == calls.look({"a"}, 6.0) == set()
    assert calls.look({"a"}, 11.0) == {"a"}
