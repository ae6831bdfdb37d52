"""The measurement of a recovery, on progress lines of workers that do not exist."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import HoldfastError
from holdfast.simulate import kill

PIDS = [11, 12, 13]


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Workers:
    """All finish a step each second. The first step after the kill takes ``recovery`` seconds, or never comes."""

    def __init__(self, clock: Clock, recovery: float | None) -> None:
        self.clock, self.recovery = clock, recovery
        self.killed: list[tuple[int, float]] = []

    def kill(self, pid: int, signal: int) -> None:
        self.killed.append((pid, self.clock.now))

    def read(self) -> list[dict[str, Any]]:
        ends = [float(step) for step in range(1, 100)]
        if self.killed:
            when = self.killed[0][1]
            before = [end for end in ends if end <= when]
            after = [] if self.recovery is None else [when + self.recovery + n for n in range(50)]
            ends = [*before, *after]
        dead = [pid for pid, _ in self.killed]
        return [
            {"t": end, "step": step, "pid": pid}
            for step, end in enumerate(ends, 1)
            for pid in PIDS
            if end <= self.clock.now and (pid not in dead or end <= self.killed[0][1])
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(kill, "time", made)
    return made


def test_the_time_to_the_next_step_and_of_a_usual_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(clock, recovery=1.75)
    monkeypatch.setattr(kill.os, "kill", workers.kill)
    recovery, usual = kill.time_kill(workers.read, workers=3, seed=0)
    assert (recovery, usual) == pytest.approx((1.75, 1.0))
    ((victim, when),) = workers.killed
    assert victim in PIDS
    assert kill.KILL_AFTER <= when < kill.KILL_AFTER + 2 * kill.POLL_SECONDS


def test_a_run_that_never_comes_back(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(clock, recovery=None)
    monkeypatch.setattr(kill.os, "kill", workers.kill)
    monkeypatch.setattr(kill, "POLL_SECONDS", 0.5)
    with pytest.raises(HoldfastError):
        kill.time_kill(workers.read, workers=3, seed=0)
    assert clock.now > kill.GIVE_UP_SECONDS
