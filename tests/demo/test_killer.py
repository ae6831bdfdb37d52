"""Whom the demo kills when, and what counts as a recovery."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.demo.killer import CALM_STEPS, STEPS_PER_KILL, check_kills, choose_kills, may_kill
from holdfast.demo.story import Story
from holdfast.errors import UsageError


@given(kills=st.integers(0, 20), more_steps=st.integers(0, 200), workers=st.integers(2, 9), seed=st.integers(0, 2**32))
def test_kills_are_spaced_and_leave_steps_to_recover_in(kills: int, more_steps: int, workers: int, seed: int) -> None:
    steps = 2 * CALM_STEPS + STEPS_PER_KILL * kills + more_steps
    plan = choose_kills(steps=steps, workers=workers, kills=kills, seed=seed)
    moments = [kill.step for kill in plan]
    assert len(plan) == kills
    assert all(CALM_STEPS <= step <= steps - CALM_STEPS - STEPS_PER_KILL + 1 for step in moments)
    assert all(after - before >= STEPS_PER_KILL - 1 for before, after in pairwise(moments))
    assert all(0 <= kill.rank < workers and 0 <= kill.moment < 1 for kill in plan)


def test_the_seed_decides() -> None:
    plans = [choose_kills(steps=80, workers=4, kills=6, seed=seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize(("steps", "workers", "hint"), [(80, 1, "--workers 2"), (27, 4, "--steps 28 .* --kills 5")])
def test_what_cannot_be_shown_is_refused_with_a_hint(steps: int, workers: int, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        check_kills(steps=steps, workers=workers, kills=6)


@pytest.mark.parametrize(("workers", "kills", "hint"), [(1, 0, "--workers 4"), (3, 1, "--workers 4")])
def test_pipelines_need_workers(workers: int, kills: int, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        check_kills(steps=80, workers=workers, kills=kills, minimum=2)
    check_kills(steps=80, workers=workers, kills=kills)  # the same is right where one worker holds everything


def commit(step: int, *, generation: int, t: float) -> dict[str, object]:
    return {"event": "commit", "worker": "0.0", "step": step, "loss": 1.0, "generation": generation, "t": t}


def enter(story: Story, *, generation: int) -> None:
    """All members get a place of their own, with the whole model."""
    for number, worker in enumerate(story.members):
        place = {"pipeline": number, "stage": 0, "first": 0, "stop": 4, "reason": ""}
        story.hear({"event": "layout", "t": 0.0, "worker": worker, "generation": generation, **place})
        story.hear({"event": "entered", "t": 0.0, "worker": worker, "generation": generation, "received": 0})


def test_a_recovery_ends_with_the_first_commit_of_a_generation_without_the_dead() -> None:
    story = Story(steps=9)
    story.hear({"event": "generation", "t": 0.0, "number": 1, "workers": ["0.0", "0.1"]})
    assert not may_kill(story)  # nobody knows yet who holds what
    enter(story, generation=1)
    assert may_kill(story)
    story.hear(commit(0, generation=1, t=1.0))
    story.killed("0.1", 2.0)
    assert not may_kill(story)
    story.hear({"event": "failure", "t": 2.005, "worker": "0.1", "cause": "connection lost"})
    story.hear(commit(1, generation=1, t=2.01))  # was under way: no recovery
    story.hear({"event": "generation", "t": 2.02, "number": 2, "workers": ["0.0", "0.1", "0.2"]})
    story.hear(commit(2, generation=2, t=2.03))  # a join was under way too, and the dead one still in it
    assert story.recovering
    story.hear({"event": "generation", "t": 2.04, "number": 3, "workers": ["0.0", "0.2"]})
    enter(story, generation=3)
    story.hear(commit(3, generation=3, t=2.5))
    story.hear(commit(4, generation=3, t=3.5))
    assert story.recoveries_ms == [pytest.approx(500)]
    assert story.deaths[0].noticed_ms == pytest.approx(5)
    assert may_kill(story)
