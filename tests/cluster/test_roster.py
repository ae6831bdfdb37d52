"""The roster as a state machine: events and the time in, messages out."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cluster.generations import LAST_WORDS_SECONDS, RosterSettings
from holdfast.cluster.membership import Standing
from holdfast.cluster.pulse import Still
from holdfast.cluster.register import EVENTS, HANG_UP, Sent
from holdfast.cluster.roster import Connected, Disconnected, Heard, Roster, Tick
from holdfast.commit.settle import judge
from tests.standings import standing

Message = dict[str, Any]


class Table:
    """A roster, and what it has said so far. Agents have connections 100, 101 …; worker 0.n has n."""

    def __init__(self, workers: int, **settings: Any) -> None:
        self.now = 0.0
        self.sent: list[Sent] = []
        self.roster = Roster(RosterSettings(**settings), judge=judge, now=0.0)
        self.agent(100, slots=workers)
        for number in range(workers):
            self.worker(number)

    def agent(self, connection: int, **hello: Any) -> list[Sent]:
        """An agent connects. The first one's name is "a"."""
        words = {"host": None, "agent": "a", "begun": False, "finished": False}
        return self.connect(connection, role="agent", **words | hello)

    def _step(self, event: Any) -> list[Sent]:
        sent = self.roster.step(event, self.now)
        self.sent += sent
        return sent

    def connect(self, connection: int, **hello: Any) -> list[Sent]:
        return self._step(Connected(connection=connection, hello=hello))

    def worker(self, number: int, *, connection: int | None = None, **hello: Any) -> list[Sent]:
        shown: Standing | None = hello.pop("standing", standing(boundary=True, units=1))
        words = {"address": "", "label": {"what": "a test"}, "host": "0", "generation": None, "finished": False}
        words |= {"committed": False, "standing": None if shown is None else shown.to_json(), "worker": f"0.{number}"}
        words["incarnation"] = f"process {number}"
        return self.connect(number if connection is None else connection, role="worker", **words | hello)

    def hear(self, connection: int, kind: str, **message: Any) -> list[Sent]:
        return self._step(Heard(connection=connection, message={"type": kind, **message}))

    def show(self, number: int, **fields: Any) -> list[Sent]:
        assert self.roster.generation is not None
        shown = standing(**{"units": 1, "held": (0,)} | fields).to_json()
        return self.hear(number, "standing", generation=self.roster.generation.name, standing=shown)

    def close(self, connection: int) -> list[Sent]:
        return self._step(Disconnected(connection=connection))

    def die(self, number: int) -> list[Sent]:
        """A worker is killed: its line closes, and its agent says so."""
        return self.close(number) + self.hear(100, "exit", **report(f"0.{number}", -9))

    def wait(self, seconds: float, *beating: int) -> list[Sent]:
        """Let time pass, deadline by deadline, while these connections give signs of life."""
        until, sent = self.now + seconds, []
        while self.roster.deadline <= until and not self.roster.stopped:
            self.now = self.roster.deadline
            sent += self._step(Tick())
            for connection in beating:
                sent += self.hear(connection, "beat", doing=None)
        self.now = until
        return sent


def to(sent: list[Sent], connection: int) -> list[str]:
    return [message["type"] for recipient, message in sent if recipient == connection]


def logged(sent: list[Sent]) -> list[str]:
    return [message["event"] for recipient, message in sent if recipient == EVENTS]


def test_the_first_generation_is_announced_once_all_are_there() -> None:
    table = Table(3)
    for number in range(3):
        assert to(table.sent, number) == ["generation"]
    assert to(table.sent, 100) == ["welcome", "generation"]


def test_an_announcement_is_one_object_for_all() -> None:
    announced = [message for _, message in Table(3).sent if message.get("type") == "generation"]
    assert len(announced) == 4
    assert all(message is announced[0] for message in announced)


def test_a_loss_calls_each_member_back_once() -> None:
    """However many standings and signs of life come in meanwhile."""
    size = 20
    table = Table(size)
    sent = table.die(0)
    for number in range(1, size - 1):
        sent += table.show(number, operation=5, broken=True)
        sent += table.wait(1.0, *range(1, size), 100)
    calls = [recipient for recipient, message in sent if message.get("type") == "regroup"]
    assert sorted(calls) == list(range(1, size))
    sent = table.show(size - 1, operation=5, broken=True)
    assert to(sent, 1) == ["generation"]
    assert table.roster.members == [f"0.{n}" for n in range(1, size)]


def test_who_reconnects_is_called_again() -> None:
    table = Table(3)
    table.die(0)
    assert table.roster.generation is not None
    known = table.roster.generation.to_json()
    sent = table.worker(1, connection=11, standing=None, generation=known)
    assert to(sent, 11) == ["regroup"]
    assert to(table.close(1), EVENTS) == [], "its old connection is nobody's any more"


def test_members_are_invited_once_to_let_somebody_join() -> None:
    table = Table(2)
    table.die(1)
    table.show(0, operation=3, broken=True)
    sent = table.worker(2)
    assert to(sent, 0) == ["pause"]
    assert "pause" not in to(table.wait(2.0, 0, 2, 100), 0)
    sent = table.show(0, operation=4, boundary=True)
    assert to(sent, 2) == ["generation"]
    assert table.roster.members == ["0.0", "0.2"]


def report(worker: str, code: int, error: Message | None = None) -> Message:
    words = {"worker": worker, "code": code, "cause": f"exited with code {code}", "error": error}
    words["incarnation"] = f"process {worker.partition('.')[2]}"
    return words | {"finished": code == 0}


def test_a_farewell_behind_the_agents_word_is_no_failure() -> None:
    table = Table(2)
    sent = table.hear(100, "exit", **report("0.1", 0))
    assert (1, HANG_UP) not in sent, "the farewell would be lost with the line"
    assert "failure" not in logged(sent + table.hear(1, "bye") + table.close(1))


@pytest.mark.parametrize("code", [-9, 1])
def test_a_worker_that_died_is_a_failure_at_once(code: int) -> None:
    table = Table(2)
    sent = table.hear(100, "exit", **report("0.1", code))
    assert "failure" in logged(sent)
    assert (1, HANG_UP) in sent
    assert to(sent, 0) == ["regroup"]
    assert table.close(1) == [], "told once"


def test_a_lost_line_is_no_loss_while_an_agent_could_tell() -> None:
    table = Table(2)
    table.hear(0, "progress", generation="1/", operation=1)
    assert "failure" not in logged(table.close(1))
    assert table.roster.generation is not None
    sent = table.worker(1, connection=11, standing=None, generation=table.roster.generation.to_json())
    assert to(sent, 0) == to(sent, 11) == [], "nobody has noticed"
    table.close(11)
    assert "failure" in logged(table.wait(10.0, 0, 100)), "it did not come back"


def test_a_machine_whose_lines_are_all_lost_is_lost_at_once() -> None:
    table = Table(1)
    table.hear(0, "progress", generation="1/", operation=1)
    assert "failure" not in logged(table.close(0))
    assert "failure" in logged(table.close(100))


def test_lines_of_a_machine_that_come_back_before_anything_else_happened_end_nothing() -> None:
    """Everybody who holds the state is there again, before the run is declared over."""
    table = Table(2)
    table.hear(0, "progress", generation="1/", operation=1)
    assert table.roster.generation is not None
    known = table.roster.generation.to_json()
    for connection in (0, 1, 100):
        table.close(connection)
    table.agent(110, host=0, slots=2, begun=True, finished=False)
    for number in range(2):
        sent = table.worker(number, connection=10 + number, standing=None, generation=known, committed=True)
        assert to(sent, 10 + number) == ["regroup"]
    for number in range(2):
        table.show(10 + number, operation=1, broken=True)
    assert "stop" not in logged(table.wait(5.0, 10, 11, 110))
    assert table.roster.members == ["0.0", "0.1"]
    assert table.roster.generation.number == 2


def test_a_script_that_ended_before_a_new_coordinator_knew_of_it_is_the_end() -> None:
    before = Table(2).roster.generation
    assert before is not None
    table = Table(0, first_host=1000)
    table.agent(110, host=0, slots=2, begun=True, finished=False)
    table.hear(110, "exit", **report("0.1", 0))
    sent = table.worker(0, standing=None, generation=before.to_json(), committed=True)
    assert "finished" in logged(sent)
    assert not table.roster.absent


def test_a_joiner_that_ended_as_asked_delays_nobody() -> None:
    table = Table(2)
    table.worker(2)
    table.close(2)
    table.hear(100, "exit", **report("0.2", 0) | {"finished": False})
    assert not table.roster.absent
    assert to(table.die(1), 0) == ["regroup"]


def test_no_generation_without_members() -> None:
    table = Table(0)
    table.hear(100, "slots", slots=0)
    assert table.roster.generation is None


def test_an_agent_that_was_away_is_told_what_it_missed() -> None:
    table = Table(1)
    table.close(100)
    sent = table.agent(110, host=0, slots=1, begun=False, finished=False)
    assert [message["begun"] for recipient, message in sent if recipient == 110 and "begun" in message] == [True]


def test_a_process_that_was_given_up_with_its_host_is_killed_when_that_is_back() -> None:
    table = Table(1, maximum_hosts=2)
    table.wait(1.0, 0, 100)
    table.agent(101, agent="b", slots=1)
    table.hear(0, "progress", generation="1/", operation=1)
    table.worker(0, connection=1, worker="1.0")
    table.show(0, operation=1, boundary=True)
    table.hear(0, "progress", generation="2/", operation=2)
    table.close(1)
    table.close(101)
    table.show(0, operation=2, broken=True)
    sent = table.agent(111, agent="b", host=1, slots=1, begun=True, finished=False)
    assert "kill" in to(sent, 111)


def test_a_line_that_was_lost_while_a_generation_forms_ends_it() -> None:
    """Another member may wait for an address that was on it."""
    table = Table(2)
    table.close(1)
    assert table.roster.generation is not None
    sent = table.worker(1, connection=11, standing=None, generation=table.roster.generation.to_json())
    assert to(sent, 0) == to(sent, 11) == ["regroup"]


def test_a_script_that_ended_while_nobody_could_be_told_is_the_end() -> None:
    table = Table(2)
    table.close(1)
    sent = table.hear(100, "exit", **report("0.1", 0))
    assert "finished" in logged(sent)
    assert "failure" not in logged(sent)


def test_silence_is_a_loss_and_the_process_is_killed() -> None:
    table = Table(2, heartbeat_timeout=5.0)
    sent = table.wait(10.0, 0, 100)
    assert (1, HANG_UP) in sent
    assert "kill" in to(sent, 100)
    assert "regroup" in to(sent, 0)


def hang(table: Table, seconds: float, stills: dict[int, str], **starting: float) -> list[Sent]:
    """Let time pass while these workers beat and stay where they are, without a sign of progress."""
    until, begin, sent = table.now + seconds, table.now, []
    while table.roster.deadline <= until and not table.roster.stopped:
        table.now = table.roster.deadline
        for number, where in stills.items():
            report = Still(where=where, seconds=table.now - begin)  # type: ignore[arg-type]
            sent += table.hear(number, "beat", doing=(7, "step"), still=report.to_json())
        ages = {name.replace("_", "."): age + table.now - begin for name, age in starting.items()}
        sent += table.hear(100, "beat", starting=ages)
        sent += table._step(Tick())
    table.now = until
    return sent


def killed(sent: list[Sent]) -> list[Message]:
    return [message for recipient, message in sent if recipient == 100 and message["type"] == "kill"]


def test_a_worker_that_hangs_while_it_beats_is_a_loss_and_is_killed_once() -> None:
    table = Table(3, step_timeout="60:600")
    sent = hang(table, 300.0, {0: "wait", 1: "step", 2: "wait"})
    (kill,) = killed(sent)
    assert kill["worker"] == "0.1"
    assert kill["cause"].startswith("stuck: no sign of progress for 6")
    assert kill["details"].items() >= {"operation": 7, "kind": "step", "limit": 60.0}.items()
    assert logged(sent) == ["failure"]
    assert to(sent, 0).count("regroup") == to(sent, 2).count("regroup") == 1
    assert (1, HANG_UP) not in sent, "it would connect again, and end before it shows its stacks"
    table.show(0, operation=7, broken=True)
    table.show(2, operation=7, broken=True)
    assert table.roster.members == ["0.0", "0.2"]


def test_by_default_a_slow_script_has_half_an_hour() -> None:
    table = Table(2)
    assert killed(hang(table, 1795.0, {0: "wait", 1: "script"})) == []
    assert [kill["worker"] for kill in killed(hang(Table(2), 1810.0, {0: "wait", 1: "script"}))] == ["0.1"]


def test_a_worker_that_never_connects_is_killed_if_another_has() -> None:
    table = Table(0)
    table.hear(100, "slots", slots=2)
    assert killed(hang(table, 4000.0, {}, **{"0_0": 0.0, "0_1": 0.0})) == [], "a script need not make a Run"
    table.worker(0)
    (kill,) = killed(hang(table, 100.0, {0: "wait"}, **{"0_1": 4000.0}))
    assert kill["worker"] == "0.1"
    assert kill["details"]["kind"] == "start"


def test_a_limit_that_is_set_holds_for_workers_that_never_connect() -> None:
    table = Table(0, step_timeout="10:20")
    assert [kill["worker"] for kill in killed(hang(table, 30.0, {}, **{"0_0": 0.0}))] == ["0.0"]


def test_members_that_all_wait_for_each_other_begin_another_generation() -> None:
    table = Table(2, step_timeout="60:600")
    sent = hang(table, 700.0, {0: "wait", 1: "wait"})
    assert killed(sent) == []
    assert logged(sent) == ["stalled"]
    assert to(sent, 0).count("regroup") == to(sent, 1).count("regroup") == 1
    for number in (0, 1):
        table.show(number, operation=7, broken=True)
    assert table.roster.generation is not None
    assert table.roster.generation.number == 2


def test_nobodys_silence_counts_when_the_roster_was_asleep_itself() -> None:
    table = Table(2, heartbeat_timeout=5.0)
    table.now += 60.0
    assert "failure" not in logged(table._step(Tick()))
    assert "failure" not in logged(table.close(1)), "it may come back"
    assert "0.1" in table.roster.absent
    assert "failure" in logged(table.wait(10.0, 0, 100))


def test_the_last_words_are_waited_for() -> None:
    table = Table(1)
    table.show(0, operation=2)
    table.hear(0, "progress", generation="2/", operation=2)
    sent = table.die(0)
    assert "stop" not in logged(sent)
    assert table.roster.deadline <= table.now + LAST_WORDS_SECONDS
    assert "stop" in logged(table.wait(2 * LAST_WORDS_SECONDS, 100))
    assert table.roster.stopped


def test_without_survivors_a_run_with_checkpoints_begins_again() -> None:
    table = Table(1)
    table.show(0, operation=2, resumable=True)
    table.hear(0, "progress", generation="2/", operation=2)
    table.die(0)
    assert to(table.worker(1), 1) == ["generation"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("standing", {}),
        ("standing", {"generation": 1, "standing": {"nonsense": 1}}),
        ("progress", {}),
        ("beat", {}),
        ("beat", {"doing": None, "still": {}}),
    ],
)
def test_a_malformed_message_costs_its_sender_the_connection(kind: str, message: Message) -> None:
    table = Table(2)
    sent = table.hear(1, kind, **message)
    assert logged(sent) == ["protocol-error"]
    assert (1, HANG_UP) in sent
    assert not table.roster.stopped


# --- labels ---------------------------------------------------------------------------------------


def told(sent: list[Sent], connection: int) -> str:
    """The text with which a worker is refused, if it is."""
    texts = [message["message"] for recipient, message in sent if recipient == connection and message.get("refused")]
    return "".join(texts)


def test_a_worker_with_another_label_is_refused_by_the_name_of_what_differs() -> None:
    table = Table(2)
    sent = table.worker(2, label={"what": "a test", "seed": "1", "rate": "0.1"})
    assert not told(sent, 2), "nobody else has a seed or a rate"
    sent = table.worker(3, label={"rate": "0.2", "what": "a test"})
    assert "worker 0.3 does not train the same as 0.2: rate is 0.2 against 0.1 (" in told(sent, 3)
    assert (3, HANG_UP) in sent
    assert "0.3" not in table.roster.workers


def test_a_refused_joiner_ends_neither_the_run_nor_the_generation() -> None:
    table = Table(2)
    table.worker(2, label={"what": "another test"})
    error = {"text": "refused", "code": 2, "final": True, "refused": True}
    sent = table.hear(100, "exit", **report("0.2", 2) | {"error": error})
    assert not table.roster.stopped
    assert logged(sent) == ["exit"]
    assert table.roster.members == ["0.0", "0.1"]


def test_a_joiner_that_came_before_a_member_was_back_is_refused_then() -> None:
    """The coordinator was restarted: the first who comes is compared with nobody."""
    known = Table(2).roster.generation
    assert known is not None
    table = Table(0)
    assert not told(table.worker(5, label={"what": "another test"}), 5)
    sent = table.worker(0, standing=None, generation=known.to_json())
    assert "worker 0.5 does not train the same as 0.0: what is another test against a test" in told(sent, 5)
    assert list(table.roster.workers) == ["0.0"]
    assert not told(table.worker(1, standing=None, generation=known.to_json()), 1)


@pytest.mark.parametrize("label", [None, "text of an older version", 7, ["a"]])
def test_a_malformed_label_costs_its_sender_the_connection(label: Any) -> None:
    table = Table(1)
    sent = table.worker(1, label=label)
    assert logged(sent) == ["protocol-error"]
    assert (1, HANG_UP) in sent
    assert not table.roster.stopped
