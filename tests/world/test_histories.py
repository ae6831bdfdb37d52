"""Histories with the real roster, cohort, settle, arranger, engine and Run: kills, hangs, joins, leaves, lost lines.

A failing one is replayed by its number: ``pytest tests/world --history 1234``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.generations import Generations
from holdfast.commit import cohort as cohort_module
from holdfast.commit.settle import settle
from holdfast.engine.engine import Engine
from tests.world.fibers import Stalled
from tests.world.history import KINDS, Plan, assert_right, draw, happen

HISTORIES = 520
CHUNK = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--history")
        if chosen is not None:
            metafunc.parametrize(("first", "count"), [(chosen, 1)])
        else:
            total = max(HISTORIES, 100 * metafunc.config.getoption("--soak"))
            metafunc.parametrize(("first", "count"), [(n, CHUNK) for n in range(0, total, CHUNK)])


def test_every_history_ends_right(tmp_path: Path, first: int, count: int) -> None:
    for seed in range(first, first + count):
        plan = draw(seed, tmp_path)
        assert_right(plan, happen(plan))


def test_most_histories_end_and_many_have_something_to_survive(tmp_path: Path) -> None:
    """The control: not all of them are easy, and not all are losses."""
    plans = [draw(seed, tmp_path) for seed in range(60)]
    worlds = [happen(plan) for plan in plans]
    ended = [assert_right(plan, world) for plan, world in zip(plans, worlds, strict=True)]
    assert sum(ended) > 45
    assert sum(bool(world.of("failure")) for world in worlds) > 20
    assert {plan.kind for plan in plans} == {*KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_history(tmp_path: Path, kind: str) -> None:
    plan = Plan(**vars(draw(7, tmp_path / "a", kind=kind)) | {"strikes": {20: "kill", 70: "hang", 90: "crash"}})
    again = Plan(**vars(draw(7, tmp_path / "b", kind=kind)) | {"strikes": plan.strikes})
    assert without_paths(happen(plan)) == without_paths(happen(again))


def without_paths(world: Any) -> list[Any]:
    """All that happened, but for what names a folder or counts real seconds."""
    hidden = ("path", "seconds", "bytes")
    return [{key: value for key, value in event.items() if key not in hidden} for event in world.events]


# --- controls: what is broken is found ------------------------------------------------------------------


def finds(tmp_path: Path, *errors: type[BaseException], kind: str = "replicas", histories: int = 60) -> bool:
    """Whether one of some histories fails."""
    for seed in range(histories):
        plan = draw(seed, tmp_path, kind=kind)
        try:
            assert_right(plan, happen(plan))
        except errors:
            return True
    return False


def test_control_a_vote_that_is_not_rolled_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(cohort_module, "settle", lambda standings: replace(settle(standings), forward=()))
    assert finds(tmp_path, AssertionError, KeyError, histories=200)


def test_control_an_update_that_is_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.apply
    calls = iter(range(10**9))

    def apply(engine: Engine, step: int) -> None:
        if next(calls) == 4:
            engine.update.apply(step=step, norms=engine._norms)
        real(engine, step)

    monkeypatch.setattr(Engine, "apply", apply)
    assert finds(tmp_path, AssertionError, histories=3)


def test_control_a_roster_that_calls_nobody_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by progress: the history stalls."""
    monkeypatch.setattr(Generations, "_call_back", lambda roster, names: None)
    assert finds(tmp_path, Stalled, histories=60)


def test_control_a_sender_that_does_not_wait_for_the_vote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is read when it arrives: one that is changed before shows in the hash."""
    real = Engine.attempt

    def attempt(engine: Engine, step: int, group: Any) -> list[float]:
        start = group.start

        def early(sends: Any, receives: Any) -> Any:
            works = start(sends, receives)
            for _, tensor, _ in sends:
                if tensor.is_floating_point() and tensor.dtype.itemsize == 4 and not tensor.requires_grad:
                    tensor.mul_(1.5)
            return works

        group.start = early
        try:
            return real(engine, step, group)
        finally:
            del group.start

    monkeypatch.setattr(Engine, "attempt", attempt)
    assert finds(tmp_path, AssertionError, histories=3)
