"""An agent's desk: what it passes on, to whom, and what it tells a new coordinator."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.cluster.announce import announce
from holdfast.cluster.desk import COORDINATOR, Desk
from holdfast.cluster.membership import Generation, Member, Standing

Message = dict[str, Any]


def desk_of(*workers: str) -> Desk:
    desk = Desk(beat=1.0)
    for name in workers:
        come(desk, name)
    return desk


def come(desk: Desk, name: str, label: str = "a test") -> list[tuple[str, Message]]:
    who = {"worker": name, "address": "", "port": 7, "host": "0", "incarnation": name, "label": {"what": label}}
    return desk.hear(name, {"type": "came", **who}, 0.0)


def generation(number: int, *workers: str) -> Generation:
    members = tuple(Member(worker=name, address="", port=7, host="0", incarnation=name) for name in workers)
    return Generation(number=number, members=members, run="run", life="life")


def kinds(out: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(recipient, message["type"]) for recipient, message in out]


def test_a_generation_goes_to_its_members_here() -> None:
    desk = desk_of("0.0", "0.1", "0.2")
    first = generation(1, "0.0", "0.1", "1.0")
    assert kinds(desk.take(announce(first, None))) == [("0.0", "generation"), ("0.1", "generation")]
    assert kinds(desk.take({"type": "regroup", "number": 1})) == [("0.0", "regroup"), ("0.1", "regroup")]
    assert kinds(desk.take({"type": "pause", "number": 1})) == [("0.0", "pause"), ("0.1", "pause")]


def test_a_new_member_hears_all_and_the_others_what_has_changed() -> None:
    desk = desk_of("0.0")
    first, second = generation(1, "0.0", "1.0"), generation(2, "0.0", "0.1", "1.0")
    desk.take(announce(first, None))
    come(desk, "0.1")
    told = dict(desk.take(announce(second, first)))
    assert told["0.0"]["base"] == first.name
    assert told["0.1"]["base"] == ""
    assert len(told["0.1"]["come"]) == 3


def test_what_builds_on_something_unknown_is_an_error() -> None:
    """The agent connects again then, and says what it knows."""
    with pytest.raises(ValueError, match="not known"):
        desk_of("0.0").take(announce(generation(2, "0.0"), generation(1, "0.0")))


def test_a_new_coordinator_is_told_everything() -> None:
    desk = desk_of("0.0", "0.1", "0.2")
    desk.take(announce(generation(3, "0.0", "0.1"), None))
    shown = {"type": "standing", "generation": "3/life", "standing": Standing(operation=5, broken=True).to_json()}
    assert kinds(desk.hear("0.0", shown, 1.0)) == [(COORDINATOR, "standing")]
    desk.hear("0.0", {"type": "progress", "generation": "3/life", "operation": 5}, 1.0)
    desk.ended("0.1", {"worker": "0.1", "code": -9})
    hello = json.loads(json.dumps(desk.hello(2.0)))
    assert hello["generation"] == {"number": 3, "run": "run", "life": "life"}
    assert hello["committed"]
    assert hello["labels"] == [{"what": "a test"}], "the same one once"
    assert [(w["worker"], w["generation"], w["silent"]) for w in hello["workers"]] == [
        ("0.0", "3/life", 1.0),
        ("0.2", "", 2.0),
    ]
    assert hello["workers"][0]["standing"]["standing"]["operation"] == 5
    assert hello["exits"] == [{"worker": "0.1", "code": -9}]
    (answer,) = desk.take({"type": "recall"})
    assert answer[0] == COORDINATOR
    assert [worker for worker, *_ in answer[1]["generation"]["come"]] == ["0.0", "0.1"]


def test_a_standing_is_forgotten_when_a_generation_answers_it() -> None:
    desk = desk_of("0.0")
    desk.hear("0.0", {"type": "standing", "generation": "", "standing": {}}, 0.0)
    desk.take(announce(generation(1, "0.0"), None))
    assert desk.hello(0.0)["workers"][0]["standing"] is None


def test_the_end_of_a_member_is_repeated_until_the_next_generation() -> None:
    desk = desk_of("0.0", "0.1", "0.2")
    desk.take(announce(generation(1, "0.0", "0.1"), None))
    desk.ended("0.1", {"worker": "0.1"})
    desk.ended("0.2", {"worker": "0.2"})  # never a member
    assert [report["worker"] for report in desk.hello(0.0)["exits"]] == ["0.1"]
    desk.take(announce(generation(2, "0.0"), None))
    assert desk.hello(0.0)["exits"] == []


def test_the_first_commit_of_a_machine_is_told_once() -> None:
    desk = desk_of("0.0", "0.1")
    said = {"type": "progress", "generation": "1/life", "operation": 1}
    assert kinds(desk.hear("0.0", said, 0.0)) == [(COORDINATOR, "progress")]
    assert desk.hear("0.1", said, 0.0) == []
    assert desk.hear("0.1", said | {"generation": "2/life"}, 0.0) != []


def test_who_is_sent_away_and_who_has_said_bye() -> None:
    desk = desk_of("0.0", "0.1")
    order = {"type": "dismiss", "worker": "0.1", "code": 75, "message": "given up", "refused": False}
    assert kinds(desk.take(order)) == [("0.1", "stop")]
    assert kinds(desk.hear("0.1", {"type": "bye"}, 0.0)) == [(COORDINATOR, "bye")]
    assert desk.hear("0.1", {"type": "beat", "doing": None}, 0.0) == [], "it is about to end"
    assert desk.take(order) == []
    assert kinds(desk.take({"type": "stop", "code": 3, "message": "too few"})) == [("0.0", "stop")]


def test_workers_are_told_that_the_coordinator_is_lost_once() -> None:
    desk = desk_of("0.0")
    assert desk.line("head:1") == [("0.0", {"type": "line", "lost": "head:1"})]
    assert desk.line("head:1") == []
    assert ("0.1", {"type": "line", "lost": "head:1"}) in come(desk, "0.1"), "who comes meanwhile, too"
    assert kinds(desk.line("")) == [("0.0", "line"), ("0.1", "line")]
    assert desk.line("") == []


def test_the_silence_of_workers_is_told_unless_the_agent_slept_itself() -> None:
    desk = desk_of("0.0", "0.1")
    for now in (1.0, 2.0, 3.0, 4.0):
        desk.hear("0.0", {"type": "beat", "doing": [3, "step"], "still": None}, now)
        said = desk.beat(now)
    assert (said["0.0"]["silent"], said["0.1"]["silent"]) == (0.0, 4.0)
    assert said["0.0"]["doing"] == [3, "step"]
    said = desk.beat(60.0)
    assert (said["0.0"]["silent"], said["0.1"]["silent"]) == (0.0, 0.0), "their words may wait in its sockets"
