"""Names and numbers that come again: a restarted head, a coordinator's second life, a worker's name used twice."""

from __future__ import annotations

import dataclasses
from typing import Any

from holdfast.cluster.membership import GIVEN_UP
from holdfast.cluster.register import Sent
from tests.cluster.table import Table, logged, to


def trained(*, machines: int = 1, number: int = 50, **settings: Any) -> Table:
    """Two workers of machine 1, and perhaps others of machine 0, that have trained under another coordinator."""
    table = Table(None, minimum_hosts=machines, maximum_hosts=2, **settings)
    if machines > 1:
        table.agent(0, slots=2, host=0)
    table.agent(1, slots=2, host=1)
    for name in (["0.0", "0.1"] if machines > 1 else []) + ["1.0", "1.1"]:
        table.worker(name)
    table.wait(1.0)
    assert table.roster.generation is not None
    for desk in table.desks.values():
        assert desk.generation is not None
        desk.generation = dataclasses.replace(desk.generation, number=number)
        for customer in desk._customers.values():
            customer.generation = desk.generation
    return table


def bring(table: Table, before: Table, machine: int, **hello: Any) -> list[Sent]:
    """An agent of another coordinator's run connects, with its workers."""
    table.desks[110 + machine], table.at[machine] = before.desks[before.at[machine]], 110 + machine
    return table.back(machine, connection=110 + machine, **{"slots": 2} | hello)


def codes(sent: list[Sent], connection: int) -> list[int]:
    return [m["code"] for recipient, m in sent if recipient == connection and m.get("type") == "stop"]


def test_a_restarted_head_takes_over_the_run_that_goes_on_elsewhere() -> None:
    """The other machine trains on without a coordinator; a new first agent comes, with workers of its own."""
    table = Table(0, run="second", maximum_hosts=2)
    bring(table, trained(run="first"), 1)
    assert table.roster.members == ["1.0", "1.1"]
    assert table.roster.run == "first", "the same run: its folder stays its own"
    assert "stop" not in logged(table.sent)


def test_a_new_process_is_not_taken_for_a_member_of_the_same_name() -> None:
    """Members 0.0 and 0.1 died with the first agent. The agent that replaces it calls its workers so too."""
    table = Table(None, run="second", maximum_hosts=2)
    table.agent(0, slots=2, agent="the new one")
    table.worker("0.0", incarnation="another")
    sent = bring(table, trained(run="first", machines=2), 1)
    assert table.code("0.0") == GIVEN_UP, "its agent starts another, with the next name"
    assert [m["worker"] for _, m in sent if m.get("event") == "failure"] == ["0.0", "0.1"], "the members are lost"
    failures = logged(table.sent).count("failure")
    table.die("0.0", GIVEN_UP, incarnation="another")
    assert logged(table.sent).count("failure") == failures, "the end of the other process says nothing of the member"


def test_workers_of_an_earlier_start_do_not_end_the_present_run() -> None:
    """Their generation has the larger number, which would have replaced the one that trains."""
    table = Table(2, run="second", maximum_hosts=2)
    assert not table.roster.members, "there may be another machine, where the run goes on"
    table.wait(1.0)
    assert table.roster.members == ["0.0", "0.1"]
    table.news("0.0")
    bring(table, trained(run="first"), 1)
    assert table.code("1.0") == table.code("1.1") == GIVEN_UP
    assert table.roster.members == ["0.0", "0.1"]
    assert table.news("0.0") == []


def test_a_second_life_prefers_its_own_run() -> None:
    """Workers of both starts connect to a coordinator that was just started again."""
    ours = Table(2, run="second")
    table = Table(None, run="second", first_host=1000, maximum_hosts=2)
    bring(table, trained(run="first"), 1)
    assert table.roster.members == ["1.0", "1.1"]
    bring(table, ours, 0)
    assert table.roster.members == ["0.0", "0.1"]
    assert table.code("1.0") == GIVEN_UP, "the worker of the earlier start is sent away"


def test_a_run_that_begins_again_goes_on_with_the_numbers_that_etcd_knows() -> None:
    """All members of generation 13 are lost. One that was kept out before, and comes now, holds generation 1."""
    table = Table(None, run="second", first_host=1000, maximum_hosts=2, recalls=True, newest=13)
    bring(table, trained(run="first", number=1), 1)
    assert table.roster.generation is not None
    assert table.roster.generation.number == 1
    table.die("1.0")
    table.show("1.1", operation=1, broken=True)
    assert table.roster.generation.number == 14, "the run's folder refuses a lower number than it has seen"


def test_a_run_that_was_begun_anew_goes_on_with_higher_numbers_than_those_who_come_late() -> None:
    """Their machine was asleep when the coordinator was started again, and the run's folder has seen their number."""
    table = Table(None, run="the run", first_host=1000, maximum_hosts=3)
    table.agent(1000, host=1000, slots=2)
    for number in range(2):
        table.worker(f"1000.{number}")
    table.wait(6.0)
    assert table.roster.members == ["1000.0", "1000.1"]
    bring(table, trained(run="the run", number=50), 1)
    assert table.code("1.0") == GIVEN_UP
    table.die("1000.0")
    table.show("1000.1", operation=1, broken=True)
    assert table.roster.generation is not None
    assert table.roster.generation.number == 51


def test_a_generation_of_another_life_with_the_same_number_is_not_the_same() -> None:
    """The first coordinator had announced it and died; the second never heard of that, and formed its own."""
    table = Table(2, life="second")
    table.commit("0.0")
    desk = table.desks[100]
    assert desk.generation is not None
    desk._customers["0.1"].generation = dataclasses.replace(desk.generation, life="first")
    table.news("0.0")
    table.say("0.1", "standing", generation="1/first", standing={"broken": False, "operation": 1})
    assert table.news("0.0") == ["regroup"]


def test_progress_of_another_life_does_not_count() -> None:
    table = Table(2, life="second")
    table.say("0.0", "progress", generation="1/first", operation=9)
    assert "recovered" not in to(table.sent, 100)


def test_an_agent_whose_welcome_was_lost_is_not_another_agent() -> None:
    """Its old line is still half open, and the run has room for one host."""
    table = Table(0, maximum_hosts=1)
    sent = table.agent(0, connection=110, slots=2)
    assert to(sent, 110) == ["welcome"]
    assert [m["host"] for r, m in sent if r == 110 and m["type"] == "welcome"] == [0]
    assert to(table.agent(1, connection=120, slots=2), 120) == ["stop", "hang-up"]


def test_a_number_is_not_shared_by_two_agents() -> None:
    table = Table(2, maximum_hosts=2)
    sent = table.agent(1, connection=110, host=0, slots=2, begun=True)
    assert codes(sent, 110) == [2]
    assert to(table.back(0, connection=120, slots=2), 120)[0] == "welcome"
