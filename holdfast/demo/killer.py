"""Kills of workers: their choice, a pure function of the seed, and their execution."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.cluster.agent import Agent
from holdfast.demo.story import Story
from holdfast.errors import UsageError

CALM_STEPS = 2  # steps without kills at either end: the curve has to begin, and the last recovery needs steps
STEPS_PER_KILL = 4  # least steps between kills: the recovery, and mostly the replacement's arrival, show in them
POLL_SECONDS = 0.005  # between two looks at the events: much less than a step


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A planned kill: of the member with this rank, at ``moment`` (0 to 1) of the way through a step."""

    step: int
    rank: int
    moment: float


def choose_kills(*, steps: int, workers: int, kills: int, seed: int) -> list[Kill]:
    """Return random kills, one in each of as many equal stretches of the run; raises ``UsageError``.

    >>> [(kill.step, kill.rank) for kill in choose_kills(steps=80, workers=4, kills=3, seed=0)]
    [(20, 3), (48, 3), (70, 2)]
    """
    check_kills(steps=steps, workers=workers, kills=kills)
    dice = random.Random(seed)
    stretch = (steps - 2 * CALM_STEPS) / max(1, kills)
    chosen = []
    for number in range(kills):
        first = CALM_STEPS + number * stretch
        # Only the first part of a stretch: the rest is for the recovery and the replacement.
        step = int(first + dice.random() * (stretch - STEPS_PER_KILL + 1))
        chosen.append(Kill(step=step, rank=dice.randrange(workers), moment=dice.random()))
    return chosen


def check_kills(*, steps: int, workers: int, kills: int, minimum: int = 1) -> None:
    """Raise ``UsageError`` if the kills cannot be shown. ``minimum``: the fewest workers that hold the model."""
    if workers < minimum:
        raise UsageError(f"the model takes the memory of {minimum} workers", hint=f"--workers {2 * minimum} or more")
    if kills and workers < 2 * minimum:
        why = "with one worker a kill leaves nobody to go on"
        if minimum > 1:
            why = f"with {workers} workers there is one pipeline, and a kill takes the only copy of some layers"
        raise UsageError(why, hint=f"--workers {2 * minimum} or more, or --kills 0")
    needed = 2 * CALM_STEPS + STEPS_PER_KILL * kills
    if kills and steps < needed:
        most = (steps - 2 * CALM_STEPS) // STEPS_PER_KILL
        fewer = f"--kills {most}" if most > 0 else "--kills 0"
        raise UsageError(
            f"--steps {steps} is too few for --kills {kills}", hint=f"--steps {needed} or more, or {fewer}"
        )


async def kill_workers(plan: Sequence[Kill], agent: Agent, story: Story, tell: Callable[[str], None]) -> None:
    """Carry the plan out on an agent's workers; drop the rest of it when the run is nearly over."""
    for kill in plan:
        await _until(lambda kill=kill: story.step >= kill.step and may_kill(story))  # type: ignore[misc]
        await asyncio.sleep(kill.moment * story.step_seconds)
        await _until(lambda: may_kill(story))  # things may have changed in the meantime
        if story.step > story.steps - CALM_STEPS:
            return
        victim = story.members[kill.rank % len(story.members)]
        worker = agent.workers.get(victim)
        if worker is None or worker.pid is None:
            continue  # it has ended by itself, which the story is about to hear
        at = time.time()
        os.kill(worker.pid, signal.SIGKILL)
        tell(story.killed(victim, at))


def may_kill(story: Story) -> bool:
    """Return whether a worker may be killed now: not during a recovery, and not the last holder of a layer.

    >>> may_kill(Story(steps=9, members=["0.0", "0.1"])), may_kill(Story(steps=9, members=["0.0"]))
    (True, False)
    """
    return len(story.members) > 1 and story.survives_a_loss and not story.recovering


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(POLL_SECONDS)
