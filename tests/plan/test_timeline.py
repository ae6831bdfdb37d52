"""The schedule, its simulation and the fast recurrence, against a simulation that knows nothing of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.timeline import StageTimes, last_ends, one_forward_one_backward, simulate
from tests.plan import judge

seconds = st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0, 10)
pipelines = st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=8)
micro_batches = st.integers(1, 24)


def makespan(stages: Sequence[StageTimes], micro_batches: int) -> float:
    """The end of the last operation, by the recurrence."""
    forward = np.array([times.forward + times.send_forward for times in stages])
    backward = np.array([times.backward + times.send_backward for times in stages])
    return float(last_ends(forward, backward, np.array([micro_batches]))[0, 0])


def stages_of(times: list[judge.Times]) -> list[StageTimes]:
    return [StageTimes(forward=f, backward=b, send_forward=sf, send_backward=sb) for f, b, sf, sb in times]


@pytest.mark.parametrize(("stages", "count"), [*itertools.product(range(1, 7), range(1, 15))])
def test_the_schedule_is_1f1b(stages: int, count: int) -> None:
    for stage in range(stages):
        ops = one_forward_one_backward(stage=stage, stages=stages, micro_batches=count)
        assert [(op.kind[0], op.micro_batch) for op in ops] == judge.order_of(stage, stages, count)


@given(pipelines, micro_batches)
@judge.examples(50)
def test_simulation_and_recurrence_equal_the_judge(times: list[judge.Times], count: int) -> None:
    spans = simulate(stages_of(times), count)
    mine = {(stage, kind, number): (start, end) for stage, kind, number, start, end in judge.run_1f1b(times, count)}
    assert len(spans) == len(mine)
    for span in spans:
        assert (span.start, span.end) == pytest.approx(mine[span.stage, span.kind[0], span.micro_batch])
        assert span.start <= span.computed <= span.end
    assert makespan(stages_of(times), count) == pytest.approx(judge.step_seconds(times, count), rel=1e-9)


@given(pipelines, micro_batches)
@judge.examples(25)
def test_a_worker_does_one_thing_at_a_time_and_waits_for_its_input(times: list[judge.Times], count: int) -> None:
    spans = simulate(stages_of(times), count)
    ends = {(span.stage, span.kind, span.micro_batch): span.end for span in spans}
    for stage in range(len(times)):
        own = sorted((span for span in spans if span.stage == stage), key=lambda span: (span.start, span.end))
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(own))
    for span in spans:
        before = span.stage - 1 if span.kind == "forward" else span.stage + 1
        if 0 <= before < len(times):
            assert ends[before, span.kind, span.micro_batch] <= span.start + 1e-12


@given(pipelines, micro_batches)
@judge.examples(25)
def test_one_more_micro_batch_is_never_faster(times: list[judge.Times], count: int) -> None:
    stages = stages_of(times)
    assert makespan(stages, count) <= makespan(stages, count + 1) + 1e-9


def test_known_by_hand() -> None:
    """Two equal stages, forward 1 and backward 2: N·3 of work and one forward and one backward of the other."""
    stages = stages_of([(1.0, 2.0, 0.0, 0.0)] * 2)
    assert makespan(stages, 1) == 6.0
    assert makespan(stages, 10) == 33.0
    sending = stages_of([(1.0, 2.0, 0.5, 0.0), (1.0, 2.0, 0.0, 0.5)])
    assert makespan(sending, 1) == 7.0


def test_control_sends_occupy_the_sender() -> None:
    """If sends cost nothing the step would be shorter: the judge and the simulation both see them."""
    times = [(1.0, 2.0, 1.0, 0.0), (1.0, 2.0, 0.0, 1.0)]
    free = [(f, b, 0.0, 0.0) for f, b, _, _ in times]
    assert judge.step_seconds(times, 8) > 1.2 * judge.step_seconds(free, 8)
    assert makespan(stages_of(times), 8) > 1.2 * makespan(stages_of(free), 8)


def test_long_pipelines_too() -> None:
    rng = random.Random(0)
    times = [tuple(rng.random() for _ in range(4)) for _ in range(40)]
    for count in (1, 39, 40, 41, 160):
        assert makespan(stages_of(times), count) == pytest.approx(judge.step_seconds(times, count), rel=1e-9)
