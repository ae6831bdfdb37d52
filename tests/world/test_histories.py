"""Histories with the real roster, cohort, settle, arranger, engine and Run: kills, hangs, joins, leaves, lost lines.

A failing one is replayed by its number, and tells what happened: ``pytest tests/world --history 1234``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.generations import Generations
from holdfast.engine.engine import Engine
from holdfast.engine.script_state import ScriptState
from holdfast.run.loops import Loops
from holdfast.sync.driver import Driver
from holdfast.sync.run_training import RunTraining
from tests.conftest import FEW
from tests.world.aimed import History
from tests.world.fibers import Stalled
from tests.world.history import DAILY, KINDS, POLICIES, Plan, assert_right, draw, happen, is_storm
from tests.world.strikes import FAULTS

CHUNK = 20
FOUND = (
    2966,  # a worker in its first step went on with its own state where others had trained and saved
    6600,  # nobody heard that units were taken back on all workers, if that came to light in two generations
    5367,  # the same, with joiners
    1085,  # a new coordinator slept through its wait for those who trained, and began a second run
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        chosen, soak = metafunc.config.getoption("--history"), metafunc.config.getoption("--soak")
        total = DAILY if soak <= FEW else max(DAILY, soak)
        chunks = [(n, min(CHUNK, total - n)) for n in range(0, total, CHUNK)] if chosen is None else [(chosen, 1)]
        metafunc.parametrize(("first", "count"), chunks, ids=[f"{n}-{n + count - 1}" for n, count in chunks])


def test_every_history_ends_right(tmp_path: Path, first: int, count: int) -> None:
    """Also the control: not all of each day's are easy, and not all are losses."""
    ended = survived = 0
    wrong: list[Exception] = []
    for seed in range(first, first + count):
        plan = draw(seed, tmp_path)
        try:
            world = happen(plan)
            ended += assert_right(plan, world)
            survived += bool(world.of("failure"))
        except Exception as e:
            e.add_note(f"again: pytest tests/world --history {seed}")
            wrong.append(e)
    if wrong:
        raise wrong[0] if len(wrong) == 1 else ExceptionGroup("several histories", wrong)
    if count == CHUNK and first < DAILY:
        assert ended > CHUNK / 2
        assert survived > CHUNK / 5


@pytest.mark.parametrize("seed", FOUND)
def test_a_history_of_a_soak_that_has_found_something(tmp_path: Path, seed: int) -> None:
    plan = draw(seed, tmp_path)
    assert assert_right(plan, happen(plan))


def test_histories_are_of_every_kind(tmp_path: Path) -> None:
    plans = [draw(seed, tmp_path) for seed in range(DAILY)]
    assert {plan.kind for plan in plans} == {*KINDS}
    assert any(is_storm(plan.seed) and len(plan.strikes) > 20 for plan in plans)
    assert {fault for plan in plans for fault in plan.strikes.values()} == {*FAULTS}
    assert {repr(plan.settings["sync"]) for plan in plans if plan.kind == "apart"} == {*map(repr, POLICIES)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_history(tmp_path: Path, kind: str) -> None:
    plan = Plan(**vars(draw(7, tmp_path / "a", kind=kind)) | {"strikes": {20: "kill", 70: "hang", 90: "crash"}})
    again = Plan(**vars(draw(7, tmp_path / "b", kind=kind)) | {"strikes": plan.strikes})
    assert without_paths(happen(plan)) == without_paths(happen(again))


def without_paths(world: Any) -> list[Any]:
    """All that happened, but for what names a folder or counts real seconds, also as bytes that are sent."""
    hidden = ("path", "seconds", "bytes", "total")  # a joiner is told rows of the journal, with their times
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


def test_control_an_update_that_is_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.apply
    calls = iter(range(10**9))

    def apply(engine: Engine, step: int) -> None:
        if next(calls) == 4:
            engine.update.apply(step=step, norms=engine._norms)
        real(engine, step)

    monkeypatch.setattr(Engine, "apply", apply)
    assert finds(tmp_path, AssertionError, histories=3)


def test_control_a_roster_that_calls_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by progress: all wait for the last one, who would have called them and was lost before it could."""
    strikes = (("0.0", "vote", 3), ("0.3", "enter", 2))
    assert History(*strikes).judge()
    monkeypatch.setattr(Generations, "_call_back", lambda roster: None)
    with pytest.raises(Stalled):
        History(*strikes).judge()


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


def test_control_replicas_that_are_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that meets the others, and keeps what it has: replicas differ at the end."""
    real = Driver.adopt

    def adopt(driver: Driver, mean: Any, *, full: bool, since: Any) -> None:
        real(driver, [buffer.add(1e-3) for buffer in mean] if driver._peers.rank else mean, full=full, since=since)

    monkeypatch.setattr(Driver, "adopt", adopt)
    assert finds(tmp_path, AssertionError, kind="apart", histories=5)


def test_control_a_replica_that_counts_a_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RunTraining._apply

    def apply(training: RunTraining, number: int) -> None:
        real(training, number)
        if number == 1:
            training._state.progress.step += 1

    monkeypatch.setattr(RunTraining, "_apply", apply)
    assert finds(tmp_path, AssertionError, kind="apart", histories=5)


def test_control_a_joiner_that_keeps_its_first_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptState, "catch_up", lambda state, **more: None)
    assert finds(tmp_path, AssertionError, histories=60)


def test_control_a_joiner_that_enters_a_loop_which_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have left their first loop early: a joiner that trains in it does other things than they do."""
    monkeypatch.setattr(Loops, "is_left", lambda loops, loop: False)
    assert finds(tmp_path, AssertionError, kind="checkpoints", histories=60)
