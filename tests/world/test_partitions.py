"""Partitions: machines that cannot reach each other, or the coordinator. One side trains, and the bits are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cluster.generations import Generations
from holdfast.cluster.membership import machine_of
from tests.world.aimed import History, one_pipeline
from tests.world.history import STEPS, Fate
from tests.world.strikes import strike
from tests.world.world import Process, World

NEVER = 10_000.0  # simulated seconds: longer than any history


def at_vote(nth: int, happens: Callable[[World], None]) -> Fate:
    """Let something happen when worker 0.0 votes for the nth time."""
    seen: Counter[str] = Counter()

    def fate(world: World, process: Process, phase: str) -> None:
        if process.name == "0.0":
            seen[phase] += 1
        if process.name == "0.0" and phase == "vote" and seen[phase] == nth:
            world.log("fault", kind="partition", phase=phase, worker=process.name)
            happens(world)

    return fate


def separate(one: int, other: int, seconds: float = NEVER) -> Callable[[World], None]:
    """Separate two machines, given by their places in the history's list of machines."""

    def happens(world: World) -> None:
        first, second = host_of(world, one), host_of(world, other)
        world.separate(first, second)
        world.scheduler.later(seconds, lambda: world.reunite(first, second))

    return happens


def isolate(machine: int, seconds: float) -> Callable[[World], None]:
    def happens(world: World) -> None:
        host = host_of(world, machine)
        world.isolate(host)
        world.scheduler.later(seconds, lambda: world.end_isolation(host))

    return happens


def host_of(world: World, machine: int) -> int:
    """The number that a machine got: they connect in any order."""
    number = world.agents[machine].host
    assert number is not None
    return number


def numbers(history: History, *machines: int) -> set[int]:
    return {host_of(history.world, machine) for machine in machines}


def machines_that_finished(history: History) -> set[int]:
    return {machine_of(name) for name in history.finished}


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_smaller_side_of_a_partial_partition_is_kept_out(nth: int, seed: int) -> None:
    """Machine 2 has one worker and cannot reach machine 1; both reach machine 0, and the coordinator."""
    history = History(workers=[2, 2, 1], fate=at_vote(nth, separate(1, 2)), seed=seed, minimum_hosts=1)
    assert history.judge()
    assert {event["host"] for event in history.of("partition")} == numbers(history, 2)
    assert machines_that_finished(history) == numbers(history, 0, 1)
    assert len(history.of("generation")) <= 4, "the same generation is not formed again and again"


def test_of_two_equal_sides_the_first_goes_on() -> None:
    history = History(workers=[2, 2], fate=at_vote(2, separate(0, 1)), minimum_hosts=1)
    assert history.judge()
    assert machines_that_finished(history) == {0}


def test_the_smaller_side_goes_on_if_only_it_holds_the_state() -> None:
    """The first machine has both stages; the second has more workers, which have nothing to do."""
    history = History(workers=[2, 3], layouts=one_pipeline, fate=at_vote(2, separate(0, 1)), minimum_hosts=1, seed=3)
    assert numbers(history, 0) == {0}, "its workers have the first ranks"
    assert history.judge()
    assert machines_that_finished(history) == {0}


def test_a_side_that_holds_only_a_part_begins_again_from_the_checkpoint(tmp_path: Path) -> None:
    """Each machine holds one stage: without the other none can go on."""
    fate = at_vote(4, separate(0, 1))
    history = History(workers=[1, 1], layouts=one_pipeline, fate=fate, minimum_hosts=1, checkpoint=tmp_path, every=1)
    assert history.judge()
    assert any("checkpoint" in event["reason"] for event in history.of("generation"))


@pytest.mark.parametrize("seed", range(4))
def test_a_partition_before_the_first_generation(seed: int) -> None:
    def fate(world: World, process: Process, phase: str) -> None:
        if not world.of("separated") and all(agent.host is not None for agent in world.agents):
            separate(1, 2)(world)

    history = History(workers=[2, 2, 1], fate=fate, seed=seed)
    assert history.judge()
    assert machines_that_finished(history) == numbers(history, 0, 1)


@pytest.mark.parametrize("seconds", [1.0, 4.0, 7.0, 12.0])
@pytest.mark.parametrize("machine", [0, 1])
def test_a_machine_that_reaches_nobody_for_a_while(machine: int, seconds: float) -> None:
    """Whether it counts as lost or not, the bits are right, and no two halves train."""
    history = History(workers=[2, 2], fate=at_vote(2, isolate(machine, seconds)), minimum_hosts=1)
    assert history.judge()
    assert_one_side_trains(history)


def test_a_machine_that_never_comes_back_is_not_waited_for() -> None:
    history = History(workers=[2, 2], fate=at_vote(2, isolate(1, NEVER)), minimum_hosts=1)
    assert machines_that_finished(history) == numbers(history, 0)
    assert_one_side_trains(history)


def assert_one_side_trains(history: History) -> None:
    """A generation that was left commits nothing new once a later one has committed."""
    newest, done = 0, 0
    for event in history.of("commit"):
        if event["generation"] < newest:
            assert event["step"] <= done, "an old half has trained on"
        newest, done = max(newest, event["generation"]), max(done, event["step"])


def test_control_without_a_choice_of_sides_a_partition_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generations, "_largest_side", lambda self, standings: standings)
    history = History(workers=[2, 2, 1], fate=at_vote(2, separate(1, 2)), minimum_hosts=1)
    assert not history.finished
    (stop,) = history.of("stop")
    assert "could not work together" in stop["message"]


def test_a_machine_that_missed_all_of_the_training_begins_where_the_checkpoint_is(tmp_path: Path) -> None:
    """It was in its first step when it was cut off. The others have trained to the end, saved, and are gone."""

    def fate(world: World, process: Process, phase: str) -> None:
        alone = f"{world.agents[0].host}.0"
        if (process.name == alone and phase == "backward" and not world.of("isolated")) or (
            process.name != alone and phase == "vote" and len(world.of("checkpoint")) == 3 and not world.of("crash")
        ):
            kind = "crash" if world.of("isolated") else "partition"
            world.log("fault", kind=kind, phase=phase, worker=process.name)
            if kind == "partition":
                isolate(0, 20.0)(world)
            else:
                world.log("crash")
                strike(world, process, "crash")  # the next coordinator does not know that the others have ended well

    settings = {"checkpoint": tmp_path / "saved", "every": 1, "own": True}
    history = History(workers=[1, 2], fate=fate, minimum_hosts=1, **settings)
    assert history.judge()
    assert [event["step"] for event in history.world.of("resumed")] == [STEPS] * 2, "it was started anew"
