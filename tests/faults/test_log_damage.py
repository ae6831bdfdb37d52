"""What is wrong with a log or its checkpoint is noticed and named; the run goes on, and is never wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.faults.judge import sweep
from tests.faults.logs import (
    STEPS,
    assert_as_if_nothing_had_happened,
    assert_fell_back,
    assert_replayed,
    assert_survivors_went_on,
    layers_of,
    log_sizes,
    logged,
    said_in,
)

FILES = [("spoil", how) for how in ("flip", "cut", "delete", "swap")]
ROTS = [(how,) for how in ("flip", "cut", "delete", "vanish")]
CONTROLS = [("flip 0.0",), ("reseed *",), ("unclipped *",)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweep(metafunc, "damage", FILES, [("spoil", "flip")])
    sweep(metafunc, "rot", ROTS, [("flip",)])
    sweep(metafunc, "sabotage", CONTROLS, CONTROLS[:1])


LONG = pytest.mark.thorough("other tests damage, replay or give up a log")


# --- records -------------------------------------------------------------------------------------


def test_a_record_in_a_file_is_damaged(tmp_path: Path, whole, damage: tuple[str, str]) -> None:
    what, how = damage
    result = logged(tmp_path, lost=["0.1"], LOG_MEMORY="0", LOG_MEDDLE=f"{what} 0.0 {how}")
    assert_fell_back(tmp_path, result, whole(STEPS), "boundary 3, micro-batch", "forward", "saved/log/0.0-")
    assert not result.of("replay")


@LONG
def test_a_record_is_missing(tmp_path: Path, whole) -> None:
    """0.2 has said that it is there."""
    result = logged(tmp_path, lost=["0.1"], LOG_MEDDLE="lose 0.2")
    assert_fell_back(tmp_path, result, whole(STEPS), "boundary 5, micro-batch", "backward", "the log of 0.2")


@pytest.mark.thorough("tests/recovery plans around missing records")
def test_a_record_that_is_known_to_be_missing(tmp_path: Path, whole) -> None:
    """Then the layers beyond it are computed again as well."""
    result = logged(tmp_path, lost=["0.1"], LOG_MEDDLE="forget 0.0; count *")
    assert_as_if_nothing_had_happened(result, whole(STEPS))
    assert_survivors_went_on(result, ["0.1"])
    assert {frozenset(layers_of(event)) for event in result.of("replay")} == {frozenset(range(5))}


@LONG
def test_records_in_files_serve_as_well(tmp_path: Path, whole) -> None:
    result = logged(tmp_path, lost=["0.1"], LOG_MEMORY="0")
    assert_replayed(result, whole(STEPS), ["0.1"])


# --- checkpoints ---------------------------------------------------------------------------------


def test_the_checkpoint_is_damaged(tmp_path: Path, whole, rot: tuple[str]) -> None:
    """The one before it is sound: from there all is done again."""
    result = logged(tmp_path, lost=["0.1"], step=5, EVERY="3", LOG_MEDDLE=f"rot 0.0 {rot[0]}")
    assert_fell_back(tmp_path, result, whole(STEPS))
    assert [event["step"] for event in result.of("resumed")] == [0]
    assert "step-00000003" in said_in(tmp_path)


# --- budgets -------------------------------------------------------------------------------------


def test_a_budget_for_some_boundaries(tmp_path: Path, whole) -> None:
    """What was not logged is computed again together; all logs together stay within the budget."""
    steps, budget = 10, 300_000
    result = logged(tmp_path, lost=["0.1"], steps=steps, EVERY="4", LOG=str(budget), LOG_MEDDLE="watch *; count *")
    assert_as_if_nothing_had_happened(result, whole(steps))
    assert_survivors_went_on(result, ["0.1"])
    boundaries = set(result.of("logging")[0]["boundaries"])
    assert len(boundaries) in (1, 2), "some, but not all"
    assert {frozenset(layers_of(event)) for event in result.of("replay")} == {group_of(3, boundaries)}
    for events in zip(*log_sizes(result).values(), strict=False):
        assert sum(event["bytes"] for event in events) <= budget


def group_of(layer: int, boundaries: set[int]) -> frozenset[int]:
    """The layers that are computed again together."""
    ends = sorted({0, 10, *boundaries})
    return next(frozenset(range(a, b)) for a, b in itertools.pairwise(ends) if a <= layer < b)


def test_a_log_that_outgrows_its_budget_is_given_up_for_a_while(tmp_path: Path, whole) -> None:
    """It is said, and training goes on; after the next checkpoint there is a log again, and it helps."""
    meddle = "watch *; cramp 0.2 100000"
    result = logged(tmp_path, lost=["0.1"], step=5, steps=10, EVERY="4", LOG_MEDDLE=meddle)
    assert_as_if_nothing_had_happened(result, whole(10))
    assert_survivors_went_on(result, ["0.1"])
    usable = {event["step"]: event["usable"] for event in log_sizes(result)["0.2"]}
    assert (usable[0], usable[3], usable[4]) == (True, False, True)
    assert {event["first"] for event in result.of("replay")} == {4}
    assert "more than 100000 bytes" in said_in(tmp_path)


@LONG
def test_a_loss_while_a_log_is_given_up(tmp_path: Path, whole) -> None:
    result = logged(tmp_path, lost=["0.1"], step=3, EVERY="4", LOG_MEDDLE="cramp 0.2 60000")
    assert_as_if_nothing_had_happened(result, whole(STEPS))
    assert [event["step"] for event in result.of("resumed")] == [0]
    assert "more than 60000 bytes" in said_in(tmp_path)


@LONG
def test_too_few_are_left_to_hold_the_model(tmp_path: Path, whole) -> None:
    """Nothing is computed again for nothing: all begin from the checkpoint when there are enough of them."""
    result = logged(tmp_path, lost=["0.1"], workers=3, stages="auto", MEMORY="200kB")
    assert_fell_back(tmp_path, result, whole(STEPS), "takes the memory of at least 3")
    assert not result.of("replay")


@pytest.mark.thorough("a log within a budget lets records go, too")
def test_records_go_when_a_checkpoint_is_durable(tmp_path: Path, whole) -> None:
    """Even if commits take longer than the steps between them."""
    steps = 24
    result = logged(tmp_path, steps=steps, EVERY="2", LOG_MEDDLE="watch *; slow 0.0 0.2")
    assert_as_if_nothing_had_happened(result, whole(steps))
    for worker, events in log_sizes(result).items():
        durable = 0
        for event in result.events:
            durable = event["step"] if event["event"] == "checkpoint" else durable
            if event in events:
                # One more may have become durable since the worker looked.
                assert min(event["steps"], default=durable) >= durable - 4, f"{worker}: {event}"
        assert max(event["bytes"] for event in events) < 12 * events[2]["bytes"]
    assert not list((tmp_path / "saved").glob("log/*.log"))


# --- controls ------------------------------------------------------------------------------------


def test_control_the_hash_notices(tmp_path: Path, whole, sabotage: tuple[str]) -> None:
    """A bit of one record; other random numbers for dropout; gradients that are not clipped."""
    result = logged(tmp_path, lost=["0.1"], LOG_MEDDLE=sabotage[0])
    assert result.code == 0
    assert result.of("replay")
    assert result.sha256 != whole(STEPS).sha256
    assert result.losses[:6] == whole(STEPS).losses[:6]
    assert result.losses != whole(STEPS).losses
