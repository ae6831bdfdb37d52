"""A worker's seat: what it says after a reconnect, and that a generation is over once."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.cluster.membership import Generation, Member, Standing
from holdfast.cluster.seat import Next, Over, Seat, Stop, Value


def generation(number: int) -> Generation:
    member = Member(worker="0.0", address="", standing=Standing(operation=number))
    return Generation(number=number, members=(member,))


@pytest.fixture
def seat() -> Seat:
    return Seat(worker="0.0", address="127.0.0.1", host="0", label={"what": "a test"})


def enter(seat: Seat, number: int) -> None:
    news = seat.hear({"type": "generation", "generation": generation(number).to_json()})
    assert isinstance(news, Next)


def test_the_hello_of_a_new_worker_knows_nothing(seat: Seat) -> None:
    hello = seat.hello()
    assert (hello["role"], hello["worker"], hello["host"], hello["label"]) == ("worker", "0.0", "0", {"what": "a test"})
    assert (hello["generation"], hello["standing"], hello["finished"], hello["committed"]) == (None, None, False, False)


def test_the_hello_after_a_reconnect_says_all_that_counts(seat: Seat) -> None:
    """Another coordinator may hear it, which knows nothing of this worker."""
    enter(seat, 3)
    seat.formed()
    seat.progressed(generation(3), 7)
    assert seat.disconnected() is None, "training can do without the coordinator"
    hello = seat.hello()
    assert hello["generation"] == generation(3).to_json()
    assert hello["committed"]
    assert hello["standing"] is None
    seat.show(Standing(operation=8, broken=True))
    assert seat.hello()["standing"] == Standing(operation=8, broken=True).to_json()
    seat.finished()
    assert seat.hello()["finished"]


def test_a_standing_is_answered_by_the_next_generation(seat: Seat) -> None:
    assert seat.show(Standing(operation=2))["generation"] == ""
    enter(seat, 1)
    assert seat.hello()["standing"] is None
    assert seat.number == 1


def test_a_generation_is_over_once(seat: Seat) -> None:
    enter(seat, 2)
    seat.formed()
    assert seat.hear({"type": "regroup", "number": 2}) == Over(number=2)
    assert seat.hear({"type": "regroup", "number": 2}) is None
    assert seat.hear({"type": "regroup", "number": 1}) is None, "an older one is long over"
    enter(seat, 3)
    assert seat.hear({"type": "regroup", "number": 3}) == Over(number=3)


def test_a_generation_that_was_forming_is_over_with_the_connection(seat: Seat) -> None:
    """Addresses may have been lost with it. That too is said once."""
    enter(seat, 1)
    assert seat.disconnected() == Over(number=1)
    assert seat.disconnected() is None
    assert seat.hear({"type": "regroup", "number": 1}) is None
    enter(seat, 2)
    seat.formed()
    assert seat.disconnected() is None


def test_what_is_put_into_a_store_comes_out(seat: Seat) -> None:
    enter(seat, 4)
    said = seat.put(generation(4), "address of 0", b"\x00\xff")
    assert seat.hear(said) == Value(generation=4, key="address of 0", value=b"\x00\xff")


def test_an_address_of_another_generation_with_the_same_number_is_not_taken(seat: Seat) -> None:
    enter(seat, 4)
    other = dataclasses.replace(generation(4), life="another coordinator")
    assert seat.hear(seat.put(other, "address of 0", b"")) is None


def test_wishes_are_of_the_present_generation(seat: Seat) -> None:
    enter(seat, 1)
    seat.hear({"type": "pause", "number": 1})
    assert seat.wishes() == (True, False)
    enter(seat, 2)
    seat.leave = True
    assert seat.wishes() == (False, True)


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_is_told_where_the_worker_waits(seat: Seat, shown: bool) -> None:
    if shown:
        seat.show(Standing())
    news = seat.hear({"type": "stop", "code": 3, "message": "too few"})
    assert news == Stop(code=3, message="too few", refused=False, waits=shown)
    assert seat.stopped == news
