"""Folders that some machines do not see, and clocks that jump."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import CheckpointError
from tests.world.aimed import aim
from tests.world.history import Fate, Plan, assert_right, script
from tests.world.world import Process, World, inhabited


def live(tmp_path: Path, fate: Fate, *, blind: str = "", seed: int = 0) -> tuple[Plan, World]:
    """A run on two machines, of which the workers in ``blind`` see another, empty folder."""
    settings = {"stages": 1, "checkpoint": tmp_path / "seen", "every": 2}
    plan = Plan(seed=seed, kind="checkpoints", hosts=[1, 1], settings=settings)

    def run(process: Process) -> None:
        folder = tmp_path / ("empty" if process.name == blind else "seen")
        script(process, **plan.settings | {"checkpoint": folder})

    with inhabited(World(plan.seed, run, fate, hosts=plan.hosts)) as world:
        return plan, world.live()


@pytest.mark.parametrize("blind", ["0.0", "1.0"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_run_whose_workers_see_different_folders_does_not_begin(tmp_path: Path, blind: str, saved: bool) -> None:
    """Whether there are checkpoints already, or both folders are empty."""
    if saved:
        plan, world = live(tmp_path, aim())
        assert assert_right(plan, world)
    _, world = live(tmp_path, aim(), blind=blind, seed=1)
    assert not [process for process in world.processes if process.outcome.sha256]
    assert not world.of("commit")
    assert world.errors
    assert all(isinstance(error, CheckpointError) for error in world.errors)
    assert any("0.0" in str(error) and "1.0" in str(error) for error in world.errors), "who sees what"


@pytest.mark.parametrize("seconds", [-1e9, -60.0, 60.0, 1e9])
def test_a_clock_that_jumps_while_everything_is_lost(tmp_path: Path, seconds: float) -> None:
    """The lease and the saves of the first try are there when all begin again."""

    def fate(world: World, process: Process, phase: str) -> None:
        if len(world.of("commit")) > 6 and not world.of("fault"):
            world.log("fault", kind="clock", phase=phase, worker=process.name)
            world.scheduler.set_by = seconds
            for other in [each for each in world.alive if each is not process]:
                other.kill()
            process.kill()

    plan, world = live(tmp_path, fate)
    assert world.of("fault")
    assert assert_right(plan, world)
