"""Many workers through many losses and joins: the same operations on all, and the run goes on."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.commit import settle as settling
from tests.world import crowd
from tests.world.crowd import Crowd, shared_announcements


@pytest.mark.parametrize(
    ("workers", "faults"),
    [
        (64, 60),
        pytest.param(1000, 200, marks=pytest.mark.thorough("the same with 64 workers")),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_crowd_goes_on_through_losses_and_joins(seed: int, workers: int, faults: int) -> None:
    with shared_announcements():
        made = Crowd(seed, workers=workers, faults=faults)
        made.live()
    made.judge()
    lost = {event["worker"] for event in made.of("failure") if event["member"]}
    joined = [event for event in made.of("generation") if "joined" in event["reason"]]
    assert len(made.of("fault")) == faults
    assert len(lost) + len(joined) > faults / 4


def test_control_a_crowd_that_never_rolls_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    real = settling.settle
    monkeypatch.setattr(crowd, "settle", lambda shown: dataclasses.replace(real(shown), forward=()))
    with shared_announcements():
        made = Crowd(0, workers=64, faults=60)
        with pytest.raises(AssertionError):
            made.live()
