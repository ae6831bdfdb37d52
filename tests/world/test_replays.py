"""Layers that nobody holds any more: whoever is lost when, they come back as they were, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.commit.cohort import Cohort
from holdfast.commit.settle import Settlement, account_of
from holdfast.engine import again
from holdfast.engine.update import Terms
from holdfast.errors import Broken
from holdfast.log.log import Log, LogSettings
from holdfast.log.spill import Damaged
from holdfast.recovery import replay
from tests.world.aimed import History, Strike, aim, in_a_row, one_pipeline, votes
from tests.world.history import draw, happen
from tests.world.world import Process, World

# Votes of a run with a log: 1 is the checkpoint that it begins with, 2 is step 0, …
STEP = {0: 2, 1: 3, 2: 4, 3: 6}  # an evaluation comes after step 2

Logged = Callable[..., History]


@pytest.fixture
def logged(tmp_path: Path) -> Logged:
    """Make a history of four stages in a row that keep a log, with a checkpoint at the begin and one at the end."""
    count = iter(range(1000))

    def make(*strikes: Strike, memory: int = 1 << 20, **settings: Any) -> History:
        settings.setdefault("layouts", in_a_row)
        settings.setdefault("every", 100)
        folder = tmp_path / str(next(count))
        return History(*strikes, checkpoint=folder, tolerate=0, log=LogSettings(memory=memory), kind="log", **settings)

    return make


def assert_replayed(history: History) -> None:
    """It came to its end, from the log and not from a checkpoint."""
    assert history.judge()
    assert history.of("replay")
    assert not history.of("resumed")


@pytest.mark.parametrize(
    ("phase", "worker"),
    [
        (phase, worker)
        for phase in ("data", "forward", "backward", "reduce", "vote", "voted", "update")
        for worker in ("0.0", "0.1", "0.3")
        if (phase, worker) != ("data", "0.1")  # stages in the middle read no data
    ],
)
def test_a_stage_is_lost(logged: Logged, phase: str, worker: str) -> None:
    """The first, a middle and the last stage, in every phase of a step."""
    nth = {"data": 8, "forward": 8, "backward": 8, "reduce": 3, "update": 3}.get(phase, STEP[2])
    history = logged((worker, phase, nth))
    assert history.struck == 1
    assert_replayed(history)
    place = in_a_row(4, "").role(int(worker[-1])).layers
    assert {(event["layers"][0][0], event["layers"][-1][1]) for event in history.of("replay")} == {
        (place.start, place.stop)
    }


@pytest.mark.parametrize("lost", ["01", "03", "13", "023"])
def test_several_are_lost(logged: Logged, lost: str) -> None:
    assert_replayed(logged(*((f"0.{number}", "vote", STEP[2]) for number in lost)))


@pytest.mark.parametrize("second", [("0.0", 1), ("0.2", 3), ("0.3", 2)])
def test_one_more_is_lost_in_the_replay(logged: Logged, second: tuple[str, int]) -> None:
    worker, nth = second
    history = logged(("0.1", "vote", STEP[3]), (worker, "replay", nth))
    assert history.struck == 2
    assert_replayed(history)


@pytest.mark.parametrize("point", ["regroup", "layout", "copy"])
def test_one_more_is_lost_while_the_others_regroup(logged: Logged, point: str) -> None:
    nth = {"regroup": 2, "layout": 2, "copy": 1}[point]
    history = logged(("0.1", "vote", STEP[3]), ("0.2", point, nth))
    assert_replayed(history)


def test_another_is_lost_before_the_next_checkpoint(logged: Logged) -> None:
    """The layers that were computed again have to be computed once more, from the records of two generations."""
    strikes = aim(("0.1", "vote", STEP[1]))
    replays: list[int] = []

    def fate(world: World, process: Process, phase: str) -> None:
        strikes(world, process, phase)
        if phase == "vote" and not replays and world.of("replay") and process.run and process.run.step == 3:
            replays.append(len(world.of("replay")))
            world.log("fault", kind="kill", phase=phase, worker=process.name)
            process.kill()

    history = logged(fate=fate)
    assert history.struck == 2
    assert history.judge()
    assert len({event["generation"] for event in history.of("replay")}) >= 2


def test_a_vote_that_only_some_have_heard(logged: Logged) -> None:
    """0.0 has voted and hears nobody, 0.2 sees the step committed and 0.1 dies: the lost layers take that step too."""
    history = logged(*votes("0", STEP[3]), ("0.2", "voted", STEP[3], "kill 0.1"))
    assert history.struck == 2
    assert_replayed(history)
    assert {event["stop"] for event in history.of("replay")} == {4}


@pytest.mark.parametrize("memory", [0, 1000])
def test_records_in_files_serve_as_well(logged: Logged, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled: list[int] = []
    real = Log.holdings

    def holdings(log: Log, stop: int) -> Any:
        spilled.append(log.spilled)
        return real(log, stop)

    monkeypatch.setattr(Log, "holdings", holdings)
    history = logged(("0.1", "vote", STEP[3]), memory=memory)
    assert_replayed(history)
    assert any(spilled), "all was in memory"
    left = {path.name for path in Path(history.plan.settings["checkpoint"]).glob("log/*.log")}
    assert not any(worker in name for worker in history.finished for name in left), "files stay when all is over"


def test_survivors_compute_nothing_else(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: set[tuple[int, ...]] = set()
    real = again._Span.compute

    def compute(span: Any, step: int, index: int) -> None:
        computed.add(tuple(span._stage.post.role.layers))
        real(span, step, index)

    monkeypatch.setattr(again._Span, "compute", compute)
    assert_replayed(logged(("0.2", "vote", STEP[3])))
    assert computed == {(2,)}


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("phase", ["snapshot", "write", "commit"])
def test_a_checkpoint_that_breaks(logged: Logged, phase: str, nth: int) -> None:
    """A worker is lost while a checkpoint is taken, written or committed: an older one and the log serve."""
    for worker in ("0.0", "0.1"):
        if phase != "commit" or worker == "0.0":  # the first one commits
            history = logged((worker, phase, nth), every=2)
            assert history.struck == 1
            assert history.judge()


def test_a_checkpoint_that_only_some_have_begun(logged: Logged) -> None:
    """One joins at a boundary where a checkpoint is due, and is lost before all are in that generation."""
    for seed in range(8):
        strikes: list[Strike] = [("0.0", "forward", 5, "join one"), ("1.0", "layout", 1)]
        history = logged(*strikes, workers=2, layouts=one_pipeline, seed=seed)
        assert history.struck == 2
        assert history.judge()


def test_records_go_when_a_checkpoint_is_durable(logged: Logged) -> None:
    kept: dict[int, int] = {}

    def fate(world: World, process: Process, phase: str) -> None:
        run = process.run
        if phase == "vote" and run is not None and run._log is not None:
            kept[run.step] = max(kept.get(run.step, 0), len(run._log._steps))

    history = logged(fate=fate, every=2, workers=3)
    assert history.judge()
    assert max(kept.values()) <= 4
    assert kept[4] <= 4
    endless = {**kept}
    kept.clear()
    assert logged(fate=fate, workers=3).judge()
    assert kept[4] > endless[4], "the control: without checkpoints they stay"


def test_a_damaged_record_sends_all_back_to_the_checkpoint(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record that is said to be there cannot be read: nobody is given wrong layers."""
    real = Log.read

    def read(log: Log, key: Any) -> Any:
        if log.name == "0.0" and key.step == 2:
            raise Damaged(key, "somewhere", "a test")
        return real(log, key)

    monkeypatch.setattr(Log, "read", read)
    history = logged(("0.1", "vote", STEP[3]))
    assert any("step 2, boundary 1" in event["reason"] for event in history.of("log-useless"))
    assert history.judge()
    assert history.of("resumed")


def test_many_random_histories_replay(tmp_path: Path) -> None:
    """The control: there is something to recover from, and the log helps."""
    plans = (draw(seed, tmp_path, kind="log", faults=("kill", "kill another")) for seed in range(20))
    replayed = (plan for plan in plans if happen(plan).of("replay"))
    assert len([*itertools.islice(replayed, 3)]) == 3  # the rest of the twenty would tell no more


@pytest.mark.parametrize("sabotage", ["a bit", "no clipping", "another rate"])
def test_control_a_wrong_replay_shows(logged: Logged, monkeypatch: pytest.MonkeyPatch, sabotage: str) -> None:
    def flipped(message: Any) -> Any:
        """The next larger number, in all that a neighbour gave."""
        text, tensors = message
        return real_read((text, [torch.nextafter(tensor, tensor + 1) for tensor in tensors]))

    def apply(each: Any, step: int, terms: Terms) -> None:
        if sabotage == "no clipping":
            terms = Terms(groups=terms.groups, norm=None)
        if sabotage == "another rate":
            terms = Terms(groups=[{**group, "lr": 0.051} for group in terms.groups], norm=terms.norm)
        real_apply(each, step, terms)

    real_apply, real_read = again.Again.apply, replay.read
    monkeypatch.setattr(again.Again, "apply", apply)
    if sabotage == "a bit":
        monkeypatch.setattr(replay, "read", flipped)
    with pytest.raises(AssertionError, match="other bits"):
        logged(*((f"0.{number}", "vote", STEP[2]) for number in "013")).judge()


def test_who_rolled_forward_is_in_no_step_any_more(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generation breaks while it forms. The next one took it to be in the next step, past the log's checkpoint.

    The other worker, which had come further, was at that checkpoint, and the run ended: they disagreed.
    """
    shown: list[tuple[int | None, str]] = []
    sides, standing = Cohort._take_sides, Cohort._standing

    def break_once(cohort: Cohort, generation: Any, settlement: Settlement) -> None:
        sides(cohort, generation, settlement)
        if not shown and cohort.membership.worker in settlement.forward:
            made = standing(cohort, False, True)
            shown.append((made.operation, account_of(made).doing))
            raise Broken("for this test")

    monkeypatch.setattr(Cohort, "_take_sides", break_once)
    history = logged(*votes("0", STEP[0]))
    assert history.judge()
    assert shown == [(2, "")], "of the next operation, which it has not begun"
