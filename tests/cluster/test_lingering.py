"""An agent that says bye and keeps the coordinator: it hears heartbeats, but is no host of the run any more."""

from __future__ import annotations

import pytest

from tests.cluster.table import Table


def table_of_two(**settings: int) -> Table:
    """Worker 0.0 of machine 0, and worker 1.0 of machine 1, in one generation."""
    table = Table(1, minimum_hosts=2, maximum_hosts=2, **settings)
    table.agent(1)
    table.worker("1.0")
    assert table.roster.members == ["0.0", "1.0"]
    return table


def leave(table: Table) -> None:
    """Agent 0 was asked to leave, and its worker has left."""
    table.hear(0, "slots", slots=0)
    for number in (0, 1):
        table.show(f"{number}.0", operation=1, boundary=True, leaving=number == 0)
    assert table.roster.members == ["1.0"]
    table.die("0.0", 0, finished=False)
    table.hear(0, "bye", stays=True)


def told(table: Table, connection: int, kind: str) -> int:
    return sum(recipient == connection and message.get("type") == kind for recipient, message in table.sent)


def test_it_hears_heartbeats_and_does_not_count_as_a_host() -> None:
    table = table_of_two()
    leave(table)
    assert not table.roster.stopped, "the other agent is still there"
    assert list(table.roster.hosts) == [1]
    before = told(table, 100, "beat")
    table.wait(3.0)
    assert told(table, 100, "beat") > before
    table.agent(2)
    assert list(table.roster.hosts) == [1, 2], "another machine may take its place"


def test_the_run_is_over_when_the_last_other_agent_says_bye() -> None:
    table = table_of_two()
    leave(table)
    table.hear(1, "bye", stays=False)
    assert table.roster.stopped


def test_control_a_bye_of_the_only_agent_ends_the_run_also_if_it_stays() -> None:
    table = Table(1)
    table.hear(0, "bye", stays=True)
    assert table.roster.stopped


def test_after_a_restart_of_the_coordinator_it_does_not_end_the_run_before_the_others_are_back() -> None:
    table = Table(None, maximum_hosts=3, first_host=1000, patience=20.0)
    table.agent(0, host=0, slots=0, begun=True, stays=True)
    assert not table.roster.stopped
    assert not table.roster.hosts
    table.agent(1, host=1, begun=True)
    assert list(table.roster.hosts) == [1]


def test_if_nobody_comes_back_it_does_not_stay_for_ever() -> None:
    table = Table(None, maximum_hosts=3, first_host=1000, patience=20.0)
    table.agent(0, host=0, slots=0, begun=True, stays=True)
    table.wait(30.0)
    assert table.roster.stopped
    assert told(table, 100, "stop") == 1


@pytest.mark.parametrize("begun", [True, False])
def test_after_a_restart_the_end_of_the_agent_that_comes_first_is_not_the_end_of_the_run(begun: bool) -> None:
    """It was asked to leave while the coordinator was away. Those who train are not back yet."""
    table = Table(None, maximum_hosts=3, first_host=1000, recalls=not begun)
    table.agent(1, host=1 if begun else None, slots=0, begun=begun)
    table.hear(1, "bye", stays=False)
    assert not table.roster.stopped
    table.agent(0, host=0, begun=begun)
    table.wait(10.0)
    assert not table.roster.stopped


def test_members_whose_machines_are_away_are_waited_for_when_the_last_other_agent_says_bye() -> None:
    table = table_of_two()
    table.close(1)
    table.hear(0, "bye", stays=False)
    assert not table.roster.stopped
    table.wait(10.0)
    assert table.roster.stopped, "they have not come back"
