"""An agent that says bye and keeps the coordinator: it hears heartbeats, but is no host of the run any more."""

from __future__ import annotations

from tests.cluster.test_roster import Table


def table_of_two(**settings: int) -> Table:
    """Worker 0.0 of agent 100, and worker 1.0 of agent 101, in one generation."""
    table = Table(1, minimum_hosts=2, maximum_hosts=2, **settings)
    table.agent(101, slots=1, agent="b")
    table.worker(1, worker="1.0", host="1")
    assert table.roster.members == ["0.0", "1.0"]
    return table


def leave(table: Table) -> None:
    """Agent 100 was asked to leave, and its worker has left."""
    table.hear(100, "slots", slots=0)
    for number in (0, 1):
        table.show(number, operation=1, boundary=True, leaving=number == 0)
    assert table.roster.members == ["1.0"]
    table.hear(100, "bye", stays=True)


def told(table: Table, connection: int, kind: str) -> int:
    return sum(recipient == connection and message.get("type") == kind for recipient, message in table.sent)


def test_it_hears_heartbeats_and_does_not_count_as_a_host() -> None:
    table = table_of_two()
    leave(table)
    assert not table.roster.stopped, "the other agent is still there"
    assert list(table.roster.hosts) == [1]
    before = told(table, 100, "beat")
    table.wait(3.0, 1, 100, 101)
    assert told(table, 100, "beat") > before
    table.agent(102, slots=1, agent="c")
    assert list(table.roster.hosts) == [1, 2], "another machine may take its place"


def test_the_run_is_over_when_the_last_other_agent_says_bye() -> None:
    table = table_of_two()
    leave(table)
    table.hear(101, "bye", stays=False)
    assert table.roster.stopped


def test_control_a_bye_of_the_only_agent_ends_the_run_also_if_it_stays() -> None:
    table = Table(1)
    table.hear(100, "bye", stays=True)
    assert table.roster.stopped


def test_after_a_restart_of_the_coordinator_it_does_not_end_the_run_before_the_others_are_back() -> None:
    table = Table(0, maximum_hosts=3, first_host=1000, patience=20.0)
    table.close(100)
    table.agent(103, host=0, slots=0, begun=True, stays=True)
    assert not table.roster.stopped
    assert not table.roster.hosts
    table.agent(101, host=1, slots=1, begun=True, agent="b")
    assert list(table.roster.hosts) == [1]


def test_if_nobody_comes_back_it_does_not_stay_for_ever() -> None:
    table = Table(0, maximum_hosts=3, first_host=1000, patience=20.0)
    table.close(100)
    table.agent(103, host=0, slots=0, begun=True, stays=True)
    table.wait(30.0, 103)
    assert table.roster.stopped
    assert told(table, 103, "stop") == 1
