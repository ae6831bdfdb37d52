"""Names and numbers that come again: a restarted head, a coordinator's second life, a worker's name used twice."""

from __future__ import annotations

import dataclasses
from typing import Any

from holdfast.cluster.membership import GIVEN_UP, Generation
from holdfast.cluster.register import Sent
from tests.cluster.test_roster import Table, logged, report, to


def trained(**settings: Any) -> Generation:
    """The generation of two workers of host 1 that have trained under another coordinator."""
    generation = Table(2, **settings).roster.generation
    assert generation is not None
    members = [dataclasses.replace(m, worker=f"1{m.worker[1:]}") for m in generation.members]
    return dataclasses.replace(generation, members=tuple(members), number=50)


def reconnect(table: Table, known: Generation, number: int, **hello: Any) -> list[Sent]:
    words = {"worker": f"1.{number}", "standing": None, "generation": known.to_json(), "committed": True}
    return table.worker(number, connection=10 + number, **words | hello)


def codes(sent: list[Sent], connection: int) -> list[int]:
    return [m["code"] for recipient, m in sent if recipient == connection and m.get("type") == "stop"]


def test_a_restarted_head_takes_over_the_run_that_goes_on_elsewhere() -> None:
    """The other machine trains on without a coordinator; a new first agent comes, with workers of its own."""
    known = trained(run="first")
    table = Table(0, run="second", maximum_hosts=2)
    table.agent(110, agent="b", host=1, slots=2, begun=True)
    reconnect(table, known, 0)
    reconnect(table, known, 1)
    assert table.roster.members == ["1.0", "1.1"]
    assert table.roster.run == "first", "the same run: its folder stays its own"
    table.hear(10, "beat", doing=None)
    assert "stop" not in logged(table.sent)


def test_a_new_process_is_not_taken_for_a_member_of_the_same_name() -> None:
    """Members 0.0 and 0.1 died with the first agent. The agent that replaces it calls its workers so too."""
    before = Table(2, run="first").roster.generation
    assert before is not None
    joint = dataclasses.replace(before, members=(*before.members, trained().members[0]), number=50)
    table = Table(0, run="second", maximum_hosts=2)
    table.agent(100, slots=2)
    table.agent(110, agent="b", host=1, slots=1, begun=True)
    reconnect(table, joint, 0)
    sent = table.worker(0, incarnation="another")
    assert codes(sent, 0) == [GIVEN_UP], "its agent starts another, with the next name"
    assert "0.0" in table.roster.absent
    table.hear(100, "exit", **report("0.0", GIVEN_UP) | {"incarnation": "another"})
    assert "0.0" in table.roster.absent, "the end of the other process says nothing of the member"
    table.worker(0)
    assert "0.0" not in table.roster.absent, "the member itself may come back"


def test_workers_of_an_earlier_start_do_not_end_the_present_run() -> None:
    """Their generation has the larger number, which would have replaced the one that trains."""
    known = trained(run="first")
    table = Table(2, run="second", maximum_hosts=2)
    assert not table.roster.members, "there may be another machine, where the run goes on"
    table.wait(1.0, 0, 1, 100)
    assert table.roster.members == ["0.0", "0.1"]
    table.agent(110, agent="b", host=1, slots=2, begun=True)
    sent = reconnect(table, known, 0)
    assert codes(sent, 10) == [GIVEN_UP]
    assert table.roster.members == ["0.0", "0.1"]
    assert to(sent, 0) == to(sent, 1) == []


def test_a_second_life_prefers_its_own_run() -> None:
    """Workers of both starts connect to a coordinator that was just started again."""
    ours = Table(2, run="second").roster.generation
    assert ours is not None
    table = Table(0, run="second", first_host=1000, maximum_hosts=2)
    table.agent(100, host=0, slots=2, begun=True)
    reconnect(table, trained(run="first"), 0)
    sent = table.worker(0, standing=None, generation=ours.to_json(), committed=True)
    assert table.roster.members == ["0.0", "0.1"]
    assert codes(sent, 10) == [GIVEN_UP], "the worker of the earlier start is sent away"


def test_a_generation_of_another_life_with_the_same_number_is_not_the_same() -> None:
    """The first coordinator had announced it and died; the second never heard of that, and formed its own."""
    table = Table(2, life="second")
    assert table.roster.generation is not None
    known = dataclasses.replace(table.roster.generation, life="first")
    sent = table.worker(1, connection=11, standing=None, generation=known.to_json())
    assert to(sent, 0) == to(sent, 11) == ["regroup"]


def test_progress_and_addresses_of_another_life_do_not_count() -> None:
    table = Table(2, life="second")
    table.hear(0, "progress", generation="1/first", operation=9)
    sent = table.hear(0, "store", generation="1/first", key="address of 0", value="")
    assert to(sent, 1) == []
    sent = table.hear(0, "store", generation="1/second", key="address of 0", value="")
    assert to(sent, 1) == ["store"]
    assert "recovered" not in to(table.sent, 100)


def test_an_agent_whose_welcome_was_lost_is_not_another_agent() -> None:
    """Its old line is still half open, and the run has room for one host."""
    table = Table(0, maximum_hosts=1)
    sent = table.agent(110, slots=2)
    assert to(sent, 110) == ["welcome"]
    assert [m["host"] for r, m in sent if r == 110 and m["type"] == "welcome"] == [0]
    assert to(table.agent(120, agent="b", slots=2), 120) == ["stop", "hang-up"]


def test_a_number_is_not_shared_by_two_agents() -> None:
    table = Table(2, maximum_hosts=2)
    sent = table.agent(110, agent="b", host=0, slots=2, begun=True)
    assert codes(sent, 110) == [2]
    assert to(table.agent(120, agent="a", host=0, slots=2, begun=True), 120)[0] == "welcome"
