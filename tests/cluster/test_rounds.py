"""Rounds of scripts without a ``Run``, as the roster decides them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cluster.register import Sent
from holdfast.cluster.rounds import Failure, judge_round
from tests.cluster.table import Table, to

ERROR = {"text": "Traceback …\nValueError: a bug", "code": 1, "final": False}


def ended(table: Table, worker: str, *, host: int = 0, number: int = 0, error: Any = None, **more: Any) -> list[Sent]:
    report = {"worker": worker, "incarnation": worker, "pid": 1, "code": 1 if error else -9, "finished": False}
    report |= {"cause": "exited with code 1" if error else "killed by SIGKILL", "error": error, "cleared": False}
    return table.hear(host, "exit", **report | {"round": number} | more)


def cleared(table: Table, *, host: int = 0, number: int = 0, left: int = 3) -> list[Sent]:
    said = {"left": left, "address": f"10.0.0.{host}", "master_port": 29500 + host}
    return table.hear(host, "cleared", round=number, **said)


def two_hosts(**settings: Any) -> Table:
    table = Table(None, minimum_hosts=2, maximum_hosts=2, **settings)
    table.agent(0, host=0)
    table.agent(1)
    return table


def of_kind(sent: list[Sent], kind: str) -> list[dict[str, Any]]:
    return [message for _, message in sent if message.get("type", message.get("event")) == kind]


def test_all_hosts_clear_the_round_before_the_next_one_begins() -> None:
    table = two_hosts()
    sent = ended(table, "1.0", host=1)
    assert to(sent, 100) == to(sent, 101) == ["clear"]
    assert ended(table, "0.0", error=ERROR)[-1][1]["event"] == "exit", "a consequence: nothing is sent again"
    assert not of_kind(cleared(table, host=1), "again"), "the other host has not cleared it yet"
    sent = cleared(table, host=0)
    (order,) = {id(order): order for order in of_kind(sent, "again")}.values()
    assert order["round"] == 1
    assert (order["hosts"], order["address"], order["master_port"]) == ([0, 1], "10.0.0.0", 29500)
    (event,) = of_kind(sent, "restart")
    assert "worker 1.0 was lost" in event["reason"]
    assert not table.roster.stopped


def test_the_run_ends_when_all_workers_have_ended_well() -> None:
    table = two_hosts()
    assert not of_kind(table.hear(0, "done", round=0), "finishing")
    assert len(of_kind(table.hear(1, "done", round=0), "finishing")) == 2


def test_a_short_script_that_is_over_on_one_host_is_not_over_before_the_others_have_come() -> None:
    """As under SLURM: one is enough to go on, but all four tasks of the step begin."""
    table = Table(None, maximum_hosts=9, first_hosts=2, patience=30.0)
    table.agent(0, host=0)
    assert not of_kind(table.hear(0, "done", round=0), "finishing")
    table.agent(1)
    assert len(of_kind(table.hear(1, "done", round=0), "finishing")) == 2


def test_a_host_of_the_first_round_that_never_comes_is_not_waited_for_longer_than_the_patience() -> None:
    table = Table(None, maximum_hosts=9, first_hosts=2, patience=30.0)
    table.agent(0, host=0)
    table.hear(0, "done", round=0)
    assert not of_kind(table.wait(29.0), "finishing")
    assert of_kind(table.wait(5.0), "finishing")


def test_a_failure_counts_after_others_have_ended_well() -> None:
    table = two_hosts()
    table.hear(0, "done", round=0)
    assert to(ended(table, "1.0", host=1), 100) == ["clear"]
    assert not of_kind(table.hear(1, "done", round=0), "finishing")


def test_a_worker_that_connects_ends_the_rounds() -> None:
    """From then on losses are survived: agents replace workers one by one."""
    table = Table(None)
    table.agent(0, slots=2, host=0)
    assert to(table.worker("0.0"), 100) == ["run"]
    assert not of_kind(ended(table, "0.1"), "clear")


def test_a_worker_that_connects_while_its_round_is_cleared_does_not_stop_the_next_one() -> None:
    table = Table(None)
    table.agent(0, slots=2, host=0)
    ended(table, "0.1")
    table.worker("0.0")
    ended(table, "0.0", cleared=True)
    assert of_kind(cleared(table), "again")


def test_an_agent_that_missed_a_round_has_to_clear_its_own() -> None:
    table = two_hosts()
    table.roster.settings.__dict__["minimum_hosts"] = 1
    ended(table, "0.0")
    table.close(1)
    assert of_kind(cleared(table, host=0), "again"), "the host that is gone is not waited for"
    assert to(table.agent(1, connection=102, host=1, round=0), 102) == ["welcome", "clear"]
    sent = table.hear(1, "cleared", round=0, left=3, address="10.0.0.1", master_port=1)
    assert of_kind(sent, "clear")[0]["round"] == 1, "all start again, with it"


def test_a_new_coordinator_is_told_which_round_it_is() -> None:
    table = Table(None, first_host=1000)
    table.agent(0, slots=2, host=0, round=4)
    ended(table, "0.9", number=4)
    assert of_kind(cleared(table, number=4), "again")[0]["round"] == 5


def test_the_first_number_is_kept_for_the_head() -> None:
    table = Table(None, minimum_hosts=2, maximum_hosts=2, head="head")
    assert [of_kind(table.agent(1), "welcome")[0]["host"]] == [1]
    assert [of_kind(table.agent(0, agent="head"), "welcome")[0]["host"]] == [0]


def test_ranks_begin_with_0_in_a_run_whose_name_etcd_knows_from_before() -> None:
    """Its hosts have higher numbers than those of the first start. Rank 0 is the head, where the coordinator is."""
    names = {"first_host": 1000, "recalls": True, "head": "head"}
    table = Table(None, minimum_hosts=2, maximum_hosts=2, **names)
    table.roster.recall(None, alive=())
    found = [of_kind(table.agent(1), "welcome")[0], of_kind(table.agent(0, agent="head"), "welcome")[0]]
    assert [(each["host"], each["rank"], each["waits"]) for each in found] == [(1001, 1, False), (1000, 0, False)]


def test_who_comes_after_a_fail_over_starts_again_with_the_others() -> None:
    """They are in a round that the new coordinator knows nothing of yet."""
    table = Table(None, first_host=1000, recalls=True, maximum_hosts=2)
    table.roster.recall(None, alive={0})
    assert of_kind(table.agent(1), "welcome")[0]["waits"]
    assert not of_kind(table.agent(0, host=0, run=True), "welcome")[0]["waits"], "it has a Run"


@pytest.mark.parametrize(
    ("failures", "before", "left", "code", "said"),
    [
        ([None], [], 0, 1, "worker 0.0 was lost"),
        ([None, ERROR], ["ValueError: a bug"], 1, None, "worker 0.0 was lost"),
        ([ERROR, None], ["ValueError: a bug"], 1, None, "worker 0.1 was lost"),
        ([ERROR], [], 1, None, "worker 0.0 failed (ValueError: a bug)"),
        ([ERROR], ["ValueError: a bug"], 1, 1, "the same error again"),
        ([ERROR, ERROR], [], 1, 1, "the same error again"),
        ([ERROR], [], 0, 1, "ValueError: a bug\nstopped"),
    ],
)
def test_what_follows_a_round_that_failed(
    failures: list[Any], before: list[str], left: int, code: int | None, said: str
) -> None:
    found = [Failure(who=f"worker 0.{n}", cause="killed by SIGKILL", error=error) for n, error in enumerate(failures)]
    verdict = judge_round(found, before=before, number=2, left=left)
    assert (verdict.code if verdict.stop else None) == code
    assert said in verdict.text
