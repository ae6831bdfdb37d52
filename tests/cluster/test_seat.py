"""A worker's seat: what it says and hears, and that a generation is over once."""

from __future__ import annotations

import pytest

from holdfast.cluster.announce import announce
from holdfast.cluster.membership import Generation, Member, Standing
from holdfast.cluster.seat import Next, Over, Seat, Stop

LOST = {"type": "line", "lost": "head:1"}
BACK = {"type": "line", "lost": ""}


def generation(number: int) -> Generation:
    member = Member(worker="0.0", address="", standing=Standing(operation=number))
    return Generation(number=number, members=(member,))


@pytest.fixture
def seat() -> Seat:
    return Seat(worker="0.0", address="127.0.0.1", host="0", label={"what": "a test"})


def enter(seat: Seat, number: int) -> None:
    news = seat.hear(announce(generation(number), seat.generation))
    assert isinstance(news, Next)
    assert news.generation.number == seat.number == number


def test_the_hello_of_a_worker_says_who_it_is(seat: Seat) -> None:
    hello = seat.hello()
    assert (hello["type"], hello["worker"], hello["host"], hello["label"]) == ("came", "0.0", "0", {"what": "a test"})


def test_a_standing_is_answered_by_the_next_generation(seat: Seat) -> None:
    assert seat.show(Standing(operation=2))["generation"] == ""
    enter(seat, 1)
    assert seat.standing is None
    assert seat.show(Standing(operation=3))["generation"] == "1/"


def test_a_generation_is_over_once(seat: Seat) -> None:
    enter(seat, 2)
    seat.formed()
    assert seat.hear({"type": "regroup", "number": 2}) == Over(number=2)
    assert seat.hear({"type": "regroup", "number": 2}) is None
    assert seat.hear({"type": "regroup", "number": 1}) is None, "an older one is long over"
    enter(seat, 3)
    assert seat.hear({"type": "regroup", "number": 3}) == Over(number=3)


def test_a_generation_that_was_forming_is_over_with_the_coordinator(seat: Seat) -> None:
    """Others may not have heard of it. That too is said once."""
    enter(seat, 1)
    assert seat.hear(LOST) == Over(number=1)
    assert seat.coordinator == "head:1"
    assert seat.hear(LOST) is None
    assert seat.hear(BACK) is None
    assert seat.coordinator == ""
    assert seat.hear({"type": "regroup", "number": 1}) is None
    enter(seat, 2)
    seat.formed()
    assert seat.hear(LOST) is None, "training can do without the coordinator"


def test_wishes_are_of_the_present_generation(seat: Seat) -> None:
    enter(seat, 1)
    seat.hear({"type": "pause", "number": 1})
    assert seat.wishes() == (True, False)
    enter(seat, 2)
    seat.hear({"type": "leave"})
    assert seat.wishes() == (False, True)


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_is_told_where_the_worker_waits(seat: Seat, shown: bool) -> None:
    if shown:
        seat.show(Standing())
    news = seat.hear({"type": "stop", "code": 3, "message": "too few"})
    assert news == Stop(code=3, message="too few", refused=False, waits=shown)
    assert seat.stopped == news
