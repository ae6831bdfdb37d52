"""The roster as a state machine: events and the time in, messages out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.cluster.generations import LAST_WORDS_SECONDS
from holdfast.cluster.membership import GIVEN_UP, Generation
from holdfast.cluster.pulse import Still
from holdfast.cluster.register import HANG_UP, Sent
from holdfast.cluster.roster import Connected, Disconnected, Tick
from tests.cluster.table import Message, Table, logged, to
from tests.standings import standing

BROKEN = standing(operation=1, broken=True, units=1, held=(0,)).to_json()


def two_machines(**settings: Any) -> Table:
    """Worker 0.0 of machine 0 and 1.0 of machine 1, which have trained together."""
    table = Table(None, maximum_hosts=2, minimum_hosts=2, **settings)
    for machine in (0, 1):
        table.agent(machine)
        table.worker(f"{machine}.0")
    assert table.roster.members == ["0.0", "1.0"]
    table.commit("0.0")
    return table


def test_the_first_generation_is_announced_once_all_are_there() -> None:
    table = Table(3)
    for number in range(3):
        assert table.news(f"0.{number}") == ["generation"]
    assert to(table.sent, 100) == ["welcome", "run", "generation"], "one message for a machine"


def test_an_announcement_is_one_object_for_all_machines() -> None:
    table = Table(None, minimum_hosts=3, maximum_hosts=3)
    for machine in range(3):
        table.agent(machine)
    for machine in range(3):
        table.worker(f"{machine}.0")
    announced = [message for _, message in table.sent if message.get("type") == "generation"]
    assert len(announced) == 3
    assert all(message is announced[0] for message in announced)


def test_an_announcement_does_not_grow_with_those_who_could_not_reach_each_other() -> None:
    """In a burst of losses each worker may name another one that refused it. Nobody but the roster needs to know."""
    table = Table(8)
    table.die("0.0")
    for number in range(1, 8):
        sent = table.show(f"0.{number}", operation=5, broken=True, refused=(f"0.{number - 1}",))
    (announced,) = [message for _, message in sent if message.get("type") == "generation"]
    assert len(announced["standings"]) == 1


def test_a_loss_calls_each_machine_back_once() -> None:
    """However many standings and signs of life come in meanwhile."""
    size = 20
    table = Table(None, minimum_hosts=size, maximum_hosts=size)
    for machine in range(size):
        table.agent(machine)
    for machine in range(size):
        table.worker(f"{machine}.0")
    sent = table.die("0.0")
    for number in range(1, size - 1):
        sent += table.show(f"{number}.0", operation=5, broken=True)
        sent += table.wait(1.0)
    calls = [recipient for recipient, message in sent if message.get("type") == "regroup"]
    assert sorted(calls) == list(range(101, 100 + size))
    table.news("1.0")
    table.show(f"{size - 1}.0", operation=5, broken=True)
    assert table.news("1.0") == ["generation"]
    assert table.roster.members == [f"{n}.0" for n in range(1, size)]


def test_a_generation_after_a_loss_is_told_in_a_few_bytes() -> None:
    """However many members it has."""
    sizes = []
    for workers in (8, 64):
        table = Table(workers)
        table.die("0.3")
        for number in range(workers):
            if number != 3:
                sent = table.show(f"0.{number}", operation=5, broken=True)
        (message,) = [m for r, m in sent if r == 100 and m["type"] == "generation"]
        sizes.append(len(repr(message)))
        assert table.roster.generation is not None
        assert table.desks[100].generation is not None
        assert as_json(table.desks[100].generation) == as_json(table.roster.generation)
    assert sizes[1] <= 1.1 * sizes[0]


def as_json(made: Generation) -> str:
    return json.dumps(made.to_json(), sort_keys=True)


def test_who_reconnects_is_called_again() -> None:
    table = two_machines()
    table.die("0.0")
    table.news("1.0")
    old = table.at[1]
    table.back(1, connection=111)
    assert table.news("1.0") == ["regroup"]
    table.at[1] = old
    assert logged(table.close(1)) == [], "its old connection is nobody's any more"


def test_members_are_invited_once_to_let_somebody_join() -> None:
    table = Table(2)
    table.die("0.1")
    table.show("0.0", operation=3, broken=True)
    table.news("0.0")
    table.worker("0.2")
    assert table.news("0.0") == ["pause"]
    table.wait(2.0)
    assert table.news("0.0") == []
    table.show("0.0", operation=4, boundary=True)
    assert table.news("0.2") == ["generation"]
    assert table.roster.members == ["0.0", "0.2"]


def test_a_farewell_is_no_failure() -> None:
    table = Table(2)
    table.say("0.1", "bye")
    assert "failure" not in logged(table.die("0.1", 0))


@pytest.mark.parametrize("code", [-9, 1])
def test_a_worker_that_died_is_a_failure_at_once(code: int) -> None:
    table = Table(2)
    table.news("0.0")
    assert "failure" in logged(table.die("0.1", code))
    assert table.news("0.0") == ["regroup"]
    assert "failure" not in logged(table.die("0.1", code)), "told once"


# --- connections that are lost ------------------------------------------------------------------------------


def test_a_lost_line_is_no_loss_if_it_comes_back() -> None:
    table = two_machines()
    assert "failure" not in logged(table.close(1))
    table.news("0.0")
    table.news("1.0")
    table.back(1, connection=111)
    assert table.news("0.0") == table.news("1.0") == [], "nobody has noticed"
    table.close(1)
    assert "failure" in logged(table.wait(10.0, 1)), "it did not come back"


def test_a_machine_whose_line_is_lost_is_lost_at_once_if_others_say_that_the_generation_is_broken() -> None:
    table = two_machines()
    table.close(1)
    sent = table.show("0.0", operation=2, broken=True)
    assert "failure" in logged(sent)
    assert table.roster.members == ["0.0"]


def test_the_line_of_a_machine_that_comes_back_before_anything_else_happened_ends_nothing() -> None:
    table = Table(2)
    table.commit("0.0")
    table.close(0)
    table.back(0, connection=110, slots=2)
    for number in range(2):
        table.show(f"0.{number}", operation=1, broken=True)
    assert "stop" not in logged(table.wait(5.0))
    assert table.roster.members == ["0.0", "0.1"]
    assert table.roster.generation is not None
    assert table.roster.generation.number == 2


def test_all_that_an_agent_tells_is_taken_in_before_anything_is_decided() -> None:
    """The first of its workers has shown its standing, and one is dead: the others are not left behind."""
    table = Table(3)
    table.commit("0.0")
    table.close(0)
    table.end("0.1")
    for name in ("0.0", "0.2"):
        table.desks[100].hear(
            name,
            {"type": "standing", "generation": "1/", "standing": BROKEN},
            0.0,
        )
    table.back(0, connection=110, slots=3)
    assert table.roster.members == ["0.0", "0.2"]


def test_a_worker_that_ended_while_the_coordinator_was_away_is_a_loss() -> None:
    table = Table(2)
    table.commit("0.0")
    table.close(0)
    table.end("0.1")
    sent = table.back(0, connection=110, slots=2)
    assert [m["cause"] for r, m in sent if m.get("event") == "failure"] == ["exited with code -9"]


@pytest.mark.parametrize("told", [True, False])
def test_a_script_that_ended_while_nobody_could_be_told_is_the_end(told: bool) -> None:
    table = Table(2)
    table.close(0)
    table.end("0.1", 0)
    sent = table.back(0, connection=110, slots=2, finished=told, over=1 if told else 0)
    assert "finished" in logged(sent)
    assert "failure" not in logged(sent)


def test_a_new_coordinator_asks_one_agent_for_the_generation() -> None:
    """It is large, so they do not all tell it."""
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=2, minimum_hosts=2)
    for machine in (0, 1):
        table.at[machine] = 100 + machine
    table.desks = dict(before.desks)
    sent = table.back(0, connection=110) + table.back(1, connection=111)
    assert [m.get("type") for _, m in table.sent].count("recall") == 1
    assert table.roster.members == ["0.0", "1.0"]
    assert list(table.roster.workers) == ["0.0", "1.0"]
    assert not table.roster.absent
    assert "failure" not in logged(sent)


def test_who_is_asked_for_the_generation_and_dies_is_not_waited_for() -> None:
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=2, minimum_hosts=2)
    for machine in (0, 1):
        table.at[machine] = 100 + machine
        before.desks[100 + machine].take({"type": "beat"})
    silent = before.desks[100]
    words = silent.hello(0.0) | {"host": 0, "agent": "agent 0", "begun": True, "finished": False, "over": 0, "slots": 1}
    table._step(Connected(connection=7, hello=words | {"run": True, "stays": False}))
    assert to(table.sent, 7) == ["recall"]
    table.desks[101] = before.desks[101]
    table.back(1, connection=111)
    assert not table.roster.members
    table._step(Disconnected(connection=7))
    assert table.roster.members == ["0.0", "1.0"]


def test_what_an_agent_says_while_another_is_asked_is_not_lost() -> None:
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=2, minimum_hosts=2)
    for number, machine in ((7, 0), (8, 1)):
        hello = before.desks[100 + machine].hello(0.0) | {"host": machine, "agent": f"agent {machine}", "begun": True}
        hello |= {"finished": False, "over": 0, "slots": 1, "run": True, "stays": False}
        table._step(Connected(connection=number, hello=hello))
    table.desks[8], table.at[1] = before.desks[101], 8
    table.say("1.0", "standing", generation="1/", standing=BROKEN)
    table._step(Disconnected(connection=7))
    assert table.roster.workers["1.0"].standing is not None


def test_an_agent_that_was_asked_and_does_not_answer_is_hung_up_on() -> None:
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=2, minimum_hosts=2)
    hello = before.desks[100].hello(0.0) | {"host": 0, "agent": "agent 0", "begun": True, "finished": False, "over": 0}
    table._step(Connected(connection=7, hello=hello | {"slots": 1, "run": True, "stays": False}))
    assert (7, HANG_UP) in table.wait(20.0)


def test_who_was_asked_for_a_generation_that_counts_no_more_is_not_hung_up_on() -> None:
    """Others have begun meanwhile. What the agent would tell is not needed any more."""
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=3)
    table.agent(2, host=2)
    table.worker("2.0")
    table.wait(4.0)
    for number, machine in ((7, 0), (8, 1)):
        hello = before.desks[100 + machine].hello(0.0) | {"host": machine, "agent": f"agent {machine}", "begun": True}
        hello |= {"finished": False, "over": 0, "slots": 1, "run": True, "stays": False}
        table._step(Connected(connection=number, hello=hello))
    assert to(table.sent, 7) == ["recall"]
    table.wait(1.5)
    assert table.roster.members == ["2.0"]
    table._step(Disconnected(connection=8))
    sent = table.wait(4.0)
    assert (7, HANG_UP) not in sent
    table.desks[7], table.at[0] = before.desks[100], 7
    assert "protocol-error" not in logged(table.wait(10.0))


def test_a_joiner_that_ended_as_asked_delays_nobody() -> None:
    table = Table(2)
    table.worker("0.2")
    table.die("0.2", 0, finished=False)
    table.news("0.0")
    table.die("0.1")
    assert table.news("0.0") == ["regroup"]


def test_no_generation_without_members() -> None:
    table = Table(0)
    table.hear(0, "slots", slots=0)
    assert table.roster.generation is None


def test_an_agent_that_was_away_is_told_what_it_missed() -> None:
    table = Table(1)
    table.close(0)
    sent = table.back(0, connection=110, begun=False)
    assert [message["begun"] for recipient, message in sent if recipient == 110 and "begun" in message] == [True]


def test_a_process_that_was_given_up_with_its_host_is_sent_away_and_killed_if_it_hangs() -> None:
    for hangs in (False, True):
        table = two_machines()
        table.close(1)
        table.show("0.0", operation=2, broken=True)
        table.now += 10.0 if hangs else 0.0
        sent = table.back(1, connection=111)
        assert table.code("1.0") == GIVEN_UP
        assert ("kill" in to(sent, 111)) == hangs


@pytest.mark.parametrize("hangs", [True, False])
def test_a_process_that_hangs_after_it_was_sent_away_is_killed_once(hangs: bool) -> None:
    """It cannot hear that it is to end, and would keep its slot for ever. One that is slow to end is left alone."""
    table = two_machines()
    table.close(1)
    table.show("0.0", operation=2, broken=True)
    table.back(1, connection=111)
    assert table.code("1.0") == GIVEN_UP
    table.silent = {"1.0"} if hangs else set()
    sent = table.wait(20.0)
    assert [m["worker"] for _, m in sent if m.get("type") == "kill"] == (["1.0"] if hangs else [])


@pytest.mark.parametrize("dies", [True, False])
def test_a_member_that_counted_as_lost_and_is_back_is_lost_once_more(dies: bool) -> None:
    """Its machine was away for a moment while the others broke, and has it still; then it hangs, or dies."""
    table = Table(2, minimum_hosts=2, maximum_hosts=2)
    table.agent(1)
    table.worker("1.0")
    table.close(1)
    table.show("0.0", operation=2, broken=True)
    table.back(1, connection=111)
    table.silent = set() if dies else {"1.0"}
    table.show("0.1", operation=2, broken=True)
    assert table.roster.members == ["0.0", "0.1", "1.0"], "it is waited for"
    table.die("1.0") if dies else table.wait(10.0)
    assert table.roster.members == ["0.0", "0.1"]
    table.commit("0.0", 3)
    (recovery,) = [message for _, message in table.sent if message.get("event") == "recovery"]
    assert recovery["lost"] == ["1.0"]


def test_an_agent_that_says_bye_takes_its_workers_along() -> None:
    """It was stopped at once, and nobody has reported how they ended."""
    table = two_machines()
    assert "failure" in logged(table.hear(1, "bye"))
    table.show("0.0", operation=2, broken=True)
    assert table.roster.members == ["0.0"]


# --- silence ------------------------------------------------------------------------------------------------


def test_silence_is_a_loss_and_the_process_is_killed() -> None:
    table = Table(2, heartbeat_timeout=5.0)
    table.silent.add("0.1")
    sent = table.wait(10.0)
    assert "kill" in to(sent, 100)
    assert "regroup" in table.news("0.0")


def test_a_silent_machine_is_lost_with_its_workers() -> None:
    table = two_machines(heartbeat_timeout=5.0)
    sent = table.wait(10.0, 1)
    assert (101, HANG_UP) in sent
    assert logged(sent).count("failure") == 1


def test_nobodys_silence_counts_when_an_agent_was_asleep_itself() -> None:
    """Its workers' signs of life wait in its sockets."""
    table = two_machines(heartbeat_timeout=5.0)
    table.wait(2.0)
    table.now += 4.0
    table.roster.step(Tick(), table.now)
    table.hear(1, "beat", starting={}, workers=table.desks[101].beat(table.now))
    assert "failure" not in logged(table.sent)


def hang(table: Table, seconds: float, stills: dict[str, str], **starting: float) -> list[Sent]:
    """Let time pass while these workers beat and stay where they are, without a sign of progress."""
    until, begin, sent = table.now + seconds, table.now, []
    while table.roster.deadline <= until and not table.roster.stopped:
        passed = table.roster.deadline - begin
        table.stills = {n: Still(where=where, seconds=passed) for n, where in stills.items()}  # type: ignore[arg-type]
        table.starting[0] = {name.replace("_", "."): age + passed for name, age in starting.items()}
        sent += table.wait(table.roster.deadline - table.now)
    table.now = until
    return sent


def killed(sent: list[Sent]) -> list[Message]:
    return [message for recipient, message in sent if recipient == 100 and message["type"] == "kill"]


def test_a_worker_that_hangs_while_it_beats_is_a_loss_and_is_killed_once() -> None:
    table = Table(3, step_timeout="60:600")
    sent = hang(table, 300.0, {"0.0": "wait", "0.1": "step", "0.2": "wait"})
    (kill,) = killed(sent)
    assert kill["worker"] == "0.1"
    assert kill["cause"].startswith("stuck: no sign of progress for 6")
    assert kill["details"].items() >= {"operation": 7, "kind": "step", "limit": 60.0}.items()
    assert logged(sent) == ["failure"]
    assert table.news("0.0").count("regroup") == table.news("0.2").count("regroup") == 1
    assert table.code("0.1") is None, "it would end before it shows its stacks"
    table.show("0.0", operation=7, broken=True)
    table.show("0.2", operation=7, broken=True)
    assert table.roster.members == ["0.0", "0.2"]


def test_by_default_a_slow_script_has_half_an_hour() -> None:
    assert killed(hang(Table(2), 1795.0, {"0.0": "wait", "0.1": "script"})) == []
    found = killed(hang(Table(2), 1810.0, {"0.0": "wait", "0.1": "script"}))
    assert [kill["worker"] for kill in found] == ["0.1"]


def test_a_worker_that_never_connects_is_killed_if_another_has() -> None:
    table = Table(0)
    table.hear(0, "slots", slots=2)
    assert killed(hang(table, 4000.0, {}, **{"0_0": 0.0, "0_1": 0.0})) == [], "a script need not make a Run"
    table.worker("0.0")
    (kill,) = killed(hang(table, 100.0, {"0.0": "wait"}, **{"0_1": 4000.0}))
    assert kill["worker"] == "0.1"
    assert kill["details"]["kind"] == "start"


def test_a_limit_that_is_set_holds_for_workers_that_never_connect() -> None:
    table = Table(0, step_timeout="10:20")
    assert [kill["worker"] for kill in killed(hang(table, 30.0, {}, **{"0_0": 0.0}))] == ["0.0"]


def test_members_that_all_wait_for_each_other_begin_another_generation() -> None:
    table = Table(2, step_timeout="60:600")
    sent = hang(table, 700.0, {"0.0": "wait", "0.1": "wait"})
    assert killed(sent) == []
    assert logged(sent) == ["stalled"]
    assert table.news("0.0").count("regroup") == table.news("0.1").count("regroup") == 1
    for number in (0, 1):
        table.show(f"0.{number}", operation=7, broken=True)
    assert table.roster.generation is not None
    assert table.roster.generation.number == 2


def test_nobodys_silence_counts_when_the_roster_was_asleep_itself() -> None:
    table = two_machines(heartbeat_timeout=5.0)
    table.now += 60.0
    assert "failure" not in logged(table._step(Tick()))
    assert "failure" not in logged(table.close(1)), "it may come back"
    assert "failure" not in logged(table.show("0.0", operation=2, broken=True)), "also if others are broken"
    assert 1 in table.roster.absent
    assert "failure" in logged(table.wait(10.0, 1))


@pytest.mark.parametrize("come_back", [True, False])
def test_a_new_coordinator_that_slept_still_waits_for_those_who_hold_the_state(come_back: bool) -> None:
    """They could not report while it slept. What a new machine had said before is what it reads first."""
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=3)
    table.agent(2, host=2)
    table.now += 60.0
    table.worker("2.0")
    table._step(Tick())
    assert not table.roster.members
    if come_back:
        table.desks |= before.desks
        for machine in (0, 1):
            table.at[machine] = 100 + machine
            table.back(machine, connection=110 + machine)
        assert table.roster.members == ["0.0", "1.0"]
    else:
        table.wait(4.5)
        assert not table.roster.members
        table.wait(0.5)
        assert table.roster.members == ["2.0"]


def test_after_a_sleep_a_bye_is_not_the_end_before_the_others_are_back() -> None:
    table = Table(None, first_host=1000, maximum_hosts=3, patience=20.0)
    table.agent(0, host=0, slots=0, begun=True)
    table.now += 60.0
    table.hear(0, "bye", stays=False)
    assert not table.roster.stopped
    table.agent(1, host=1, begun=True)
    assert not table.roster.stopped


# --- the end ------------------------------------------------------------------------------------------------


def test_the_last_words_are_waited_for() -> None:
    table = Table(1)
    table.show("0.0", operation=2)
    table.commit("0.0", 2)
    sent = table.die("0.0")
    assert "stop" not in logged(sent)
    assert table.roster.deadline <= table.now + LAST_WORDS_SECONDS
    assert "stop" in logged(table.wait(2 * LAST_WORDS_SECONDS))
    assert table.roster.stopped


def test_without_survivors_a_run_with_checkpoints_begins_again() -> None:
    table = Table(1)
    table.show("0.0", operation=2, resumable=True)
    table.commit("0.0", 2)
    table.die("0.0")
    table.worker("0.1")
    assert table.news("0.1") == ["generation"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("standing", {"worker": "0.1"}),
        ("standing", {"worker": "0.1", "generation": 1, "standing": {"nonsense": 1}}),
        ("progress", {}),
        ("beat", {}),
        ("beat", {"starting": {}, "workers": {"0.1": {"silent": "long", "doing": None, "still": None}}}),
        ("beat", {"starting": {}, "workers": {"0.1": {"silent": 0.0, "doing": None, "still": {"where": "here"}}}}),
        ("came", {"worker": {"worker": "0.2"}}),
        ("came", {"worker": 7}),
    ],
)
def test_a_malformed_message_costs_its_sender_the_connection(kind: str, message: Message) -> None:
    table = Table(2)
    sent = table.hear(0, kind, **message)
    assert logged(sent) == ["protocol-error"]
    assert (100, HANG_UP) in sent
    assert not table.roster.stopped


@pytest.mark.parametrize("hello", [{"workers": [{}]}, {"generation": 7}, {"slots": None, "workers": None}])
def test_a_malformed_hello_does_too(hello: Message) -> None:
    table = Table(1, maximum_hosts=2)
    sent = table.agent(1, **hello)
    assert "protocol-error" in logged(sent)
    assert (101, HANG_UP) in sent
    assert not table.roster.stopped


# --- labels ---------------------------------------------------------------------------------------


def test_a_worker_with_another_label_is_refused_by_the_name_of_what_differs() -> None:
    table = Table(2)
    table.worker("0.2", label={"what": "a test", "seed": "1", "rate": "0.1"})
    assert not table.refusal("0.2"), "nobody else has a seed or a rate"
    table.worker("0.3", label={"rate": "0.2", "what": "a test"})
    assert "worker 0.3 does not train the same as 0.2: rate is 0.2 against 0.1 (" in table.refusal("0.3")
    assert "0.3" not in table.roster.workers


def test_a_refused_joiner_ends_neither_the_run_nor_the_generation() -> None:
    table = Table(2)
    table.worker("0.2", label={"what": "another test"})
    error = {"text": "refused", "code": 2, "final": True, "refused": True}
    sent = table.die("0.2", 2, error=error)
    assert not table.roster.stopped
    assert logged(sent) == ["exit"]
    assert table.roster.members == ["0.0", "0.1"]


def test_a_label_of_somebody_who_is_gone_refuses_nobody() -> None:
    table = Table(1)
    table.show("0.0", operation=2, resumable=True)
    table.die("0.0")
    table.worker("0.1", label={"what": "an edited test"})
    assert not table.refusal("0.1")


def test_a_joiner_that_came_before_a_member_was_back_is_refused_then() -> None:
    """The coordinator was restarted: the first who comes is compared with nobody."""
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=3)
    table.agent(2, host=2)
    table.worker("2.5", label={"what": "another test"})
    assert not table.refusal("2.5")
    table.desks[100], table.at[0] = before.desks[100], 100
    table.back(0, connection=110)
    assert "worker 2.5 does not train the same as 0.0: what is another test against a test" in table.refusal("2.5")
    assert list(table.roster.workers) == ["0.0"]


@pytest.mark.parametrize("label", [None, "text of an older version", 7, ["a"]])
def test_a_malformed_label_costs_its_sender_the_connection(label: Any) -> None:
    table = Table(1)
    sent = table.worker("0.1", label=label)
    assert "protocol-error" in logged(sent)
    assert (100, HANG_UP) in sent
    assert not table.roster.stopped


def test_members_of_an_older_generation_do_not_train_what_others_have_finished() -> None:
    """They had been given up. The coordinator that knew it was killed, and the run ended before there was another."""
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=2)
    table.desks, table.at = dict(before.desks), dict(before.at)
    table.say("1.0", "standing", generation="1/", standing=BROKEN)
    table.back(1, connection=111, finished=True, over=2)
    assert table.code("1.0") == 0
    assert not [m for _, m in table.sent + table.wait(20.0) if m.get("type") == "generation"]


def test_control_members_of_the_last_generation_end_together() -> None:
    before = two_machines()
    table = Table(None, first_host=1000, maximum_hosts=2)
    table.desks, table.at = dict(before.desks), dict(before.at)
    table.back(1, connection=111, finished=True, over=1)
    assert table.code("1.0") is None


def test_what_a_worker_did_in_an_older_generation_is_no_disagreement() -> None:
    """It is stopped before it begins anything in the new one, where the same operation is of another kind."""
    table = two_machines()
    for name in ("0.0", "1.0"):
        table.say(name, "beat", doing=(4, "step"), still=None)
    table.show("0.0", operation=4, broken=True)
    table.show("1.0", operation=4, broken=True)
    assert table.roster.generation is not None
    now = table.roster.generation.name
    table.say("0.0", "beat", doing=(4, "checkpoint"), still=None, generation=now)
    table.say("1.0", "beat", doing=(4, "step"), still=None, generation="1/")
    for machine in (0, 1):
        table.hear(machine, "beat", starting={}, workers=table.desks[table.at[machine]].beat(table.now))
    table.now = table.roster.deadline
    table._step(Tick())
    assert not table.roster.stopped
    assert table.roster.workers["0.0"].doing == (4, "checkpoint")
