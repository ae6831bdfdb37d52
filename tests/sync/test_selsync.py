"""SelSync's decisions, with replicas that are stood in for by their gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.sync.policy import Context, Decision, Policy
from holdfast.sync.selsync import Selective, SelSync

Gradient = Callable[[int, int], float]  # from step and rank


@dataclass
class Cohort:
    """Replicas with one parameter each, that take the decisions of a policy as the loop does."""

    policy: SelSync
    workers: int = 4
    rate: float = 0.1
    synchronised: list[int] = field(default_factory=list)  # how many steps were done
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trackers: list[Selective] = [self.policy.tracker(Context()) for _ in range(self.workers)]
        self.parameters = [torch.ones(64, requires_grad=True) for _ in self.trackers]
        self._ballots: dict[int, list[float]] = {}
        self._tell(0)

    def run(self, steps: range, gradient: Gradient) -> Cohort:
        for step in steps:
            ballots = []
            for rank, (tracker, parameter) in enumerate(zip(self.trackers, self.parameters, strict=True)):
                parameter.grad = torch.full((64,), gradient(step, rank) / 8)
                ballots.append(tracker.observe(step, [parameter]))
                with torch.no_grad():
                    parameter -= self.rate * parameter.grad
            if all(ballots) or not self.trackers[0].ballot:
                self._ballots[step] = [sum(column) for column in zip(*ballots, strict=True)]
            assert all(ballots) or not any(ballots), "some tell, and some do not"
            self._decide(step)
        return self

    def _decide(self, step: int) -> None:
        about = step - (self.policy.delay if self.trackers[0].ballot else 0)
        if about not in self._ballots:
            return
        decisions = [tracker.decide(about, self._ballots[about], self.workers) for tracker in self.trackers]
        assert all(decision == decisions[0] for decision in decisions)  # what all of it rests on
        del self._ballots[about]
        self.decisions.append(decisions[0])
        if decisions[0].synchronise:
            self._average(step + 1)

    def _average(self, done: int, *, full: bool = False) -> None:
        mean = torch.stack([each.detach() for each in self.parameters]).mean(0)
        for parameter in self.parameters:
            parameter.data.copy_(mean)
        if full:  # else replicas keep what they alone know
            states = [tracker.state() for tracker in self.trackers]
            shared = [a + sum(b - a for b in (a, *rest)) / self.workers for a, *rest in zip(*states, strict=True)]
            for tracker in self.trackers:
                tracker.load(shared)
        self._ballots.clear()  # those in flight are thrown away
        self.synchronised.append(done)
        self._tell(done)

    def _tell(self, done: int) -> None:
        for tracker, parameter in zip(self.trackers, self.parameters, strict=True):
            tracker.synchronised(done, [parameter])


def noisy(seed: int = 0, *, spread: float = 0.3, decay: float = 0.0) -> Gradient:
    def gradient(step: int, rank: int) -> float:
        chance = random.Random(1_000_003 * seed + 101 * step + rank)
        return math.exp(chance.gauss(0, spread) - decay * step)

    return gradient


def spike(at: int, *, ranks: Sequence[int] = (2,), by: float = 10.0) -> Gradient:
    return lambda step, rank: by if step == at and rank in ranks else 1.0


def test_one_flag_is_enough() -> None:
    cohort = Cohort(SelSync(delta=0.3)).run(range(30), spike(20))
    # The gradient's square is 100 times as large at step 20, with a weight of 4% · 100: a flag. It stays in the mean.
    assert cohort.synchronised[0] == 21
    assert "1 of 4" in cohort.decisions[20].reason
    assert cohort.decisions[20].threshold == 0.3


def test_no_flag_no_synchronisation() -> None:
    assert Cohort(SelSync(delta=0.3)).run(range(30), spike(20, by=1.5)).synchronised == []


def test_a_delayed_vote_acts_one_step_later() -> None:
    cohort = Cohort(SelSync(delta=0.3, wait=False)).run(range(30), spike(20))
    assert cohort.synchronised[0] == 22


def test_negative_control_a_vote_by_the_mean_would_miss_it() -> None:
    cohort = Cohort(SelSync(delta=2.0), workers=16).run(range(30), spike(20, by=5.0))
    signal = cohort.decisions[20].signal
    assert signal is not None
    assert signal < 2.0
    assert cohort.synchronised == [21]


def unequal(step: int, rank: int) -> float:
    """Gradients of replicas with different data: those of some are always larger."""
    return noisy(spread=0.2)(step, rank) * (1 + 2 * rank)


def test_unequal_replicas_keep_their_own_history() -> None:
    """A change has no unit, so always larger gradients raise no more flags."""
    same = Cohort(SelSync(delta=0.1)).run(range(200), noisy(spread=0.2)).synchronised
    assert Cohort(SelSync(delta=0.1)).run(range(200), unequal).synchronised == same
    assert 0 < len(same) < 30


def test_negative_control_a_history_of_the_mean_raises_false_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    average = Cohort._average
    monkeypatch.setattr(Cohort, "_average", lambda self, done: average(self, done, full=True))
    assert len(Cohort(SelSync(delta=0.1)).run(range(200), unequal).synchronised) > 40


def test_zero_is_together_always_and_infinity_tells_nothing() -> None:
    assert all(SelSync(delta=0).together(step) for step in range(100))
    assert all(SelSync(target=1.0).together(step) for step in range(100))
    assert not SelSync(delta=1e-9).together(0)
    never = Cohort(SelSync(delta=math.inf)).run(range(30), spike(20, by=math.nan))
    assert never.trackers[0].ballot == 0
    assert never.synchronised == []
    assert Cohort(SelSync(delta=math.inf, max_local_steps=10)).run(range(35), noisy()).synchronised == [10, 20, 30]


@pytest.mark.parametrize(
    ("policy", "done"),
    [
        (SelSync(delta=1e9), 11),
        (SelSync(target=0.01), 12),  # a step later, as its votes are
        (SelSync(delta=1.0, signal="replica-variance"), 12),  # seen in the parameters only after the update
    ],
)
def test_what_is_not_finite_synchronises(policy: SelSync, done: int) -> None:
    cohort = Cohort(policy).run(range(done), spike(10, by=math.nan))
    assert cohort.synchronised == [done]
    assert cohort.decisions[-1].reason == "something is not finite on a replica"
    assert cohort.decisions[-1].signal is None


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("signal", ["gradient-change", "replica-variance"])
@pytest.mark.parametrize(
    "decay",
    [pytest.param(0.0, marks=pytest.mark.thorough("a signal that decays is harder to follow")), 0.002],
)
def test_the_target_is_kept(wait: bool, signal: str, decay: float) -> None:
    policy = SelSync(target=0.1, signal=signal, wait=wait)  # type: ignore[arg-type]
    cohort = Cohort(policy, rate=0.01).run(range(1000), noisy(decay=decay))
    assert len(cohort.synchronised) / 1000 == pytest.approx(0.1, abs=0.012)


def test_the_target_does_not_depend_on_the_number_of_workers() -> None:
    for workers in (1, 2, 8):
        cohort = Cohort(SelSync(target=0.2), workers=workers).run(range(600), noisy())
        assert len(cohort.synchronised) / 600 == pytest.approx(0.2, abs=0.03)


def test_negative_control_a_fixed_delta_does() -> None:
    rates = [len(Cohort(SelSync(delta=0.08), workers=n).run(range(300), noisy()).synchronised) for n in (2, 8)]
    assert rates[1] > 2 * rates[0]


@settings(max_examples=8, deadline=None)
@given(
    target=st.floats(0.05, 0.25),
    min_gap=st.integers(1, 4),
    longest=st.integers(20, 40),
    wait=st.booleans(),
    seed=st.integers(0, 100),
)
def test_gaps_are_kept(target: float, min_gap: int, longest: int, wait: bool, seed: int) -> None:
    policy = SelSync(target=target, min_gap=min_gap, max_local_steps=longest, wait=wait, warmup=3)
    cohort = Cohort(policy, workers=2).run(range(3, 200), noisy(seed, spread=1.0))
    gaps = [b - a for a, b in zip([3, *cohort.synchronised], cohort.synchronised, strict=False)]
    assert gaps
    assert min_gap <= min(gaps)
    assert max(gaps) <= longest


def test_forced_ones_count_and_say_why() -> None:
    cohort = Cohort(SelSync(target=0.1, max_local_steps=10)).run(range(500), lambda step, rank: 1.0)
    assert {d.reason for d in cohort.decisions if d.synchronise} == {"10 steps apart"}
    assert len(cohort.synchronised) == 50


@pytest.mark.parametrize(
    "policy",
    [
        SelSync(delta=0.1),
        SelSync(target=0.1),
        SelSync(target=0.1, signal="replica-variance", max_local_steps=30),
        SelSync(delta=1e-6, signal="replica-variance"),
    ],
)
def test_goes_on_from_the_state_at_a_synchronisation(policy: SelSync) -> None:
    """New trackers that load a state, as from a checkpoint, decide like the old ones."""
    one = Cohort(policy).run(range(100), noisy())
    one._average(100, full=True)
    other = Cohort(policy)
    for old, new, theirs, ours in zip(one.trackers, other.trackers, one.parameters, other.parameters, strict=True):
        new.load(old.state())
        ours.data.copy_(theirs.detach())
        new.synchronised(100, [ours])
    one.decisions.clear()
    one.run(range(100, 200), noisy())
    other.run(range(100, 200), noisy())
    assert other.decisions == one.decisions
    assert any(decision.synchronise for decision in one.decisions)


def test_states_are_finite_and_always_as_long() -> None:
    for policy in (SelSync(target=0.2), SelSync(delta=0.2), SelSync(target=0.2, signal="replica-variance")):
        cohort = Cohort(policy)
        begin = cohort.trackers[0].state()
        cohort.run(range(50), noisy())
        end = cohort.trackers[0].state()
        assert len(begin) == len(end)
        assert all(map(math.isfinite, begin + end))


def test_replicas_that_drift_apart_synchronise() -> None:
    def gradient(step: int, rank: int) -> float:
        return 1.0 if rank else -1.0

    far = Cohort(SelSync(delta=1e-3, signal="replica-variance"), rate=0.1).run(range(100), gradient)
    assert 5 <= len(far.synchronised) <= 40
    assert Cohort(SelSync(delta=1e-3, signal="replica-variance")).run(range(100), lambda s, r: 1.0).synchronised == []


def test_delays() -> None:
    assert SelSync(delta=0.3).delay == 0
    assert SelSync(delta=0.3, wait=False).delay == 1
    assert SelSync(target=0.3).delay == 1
    assert SelSync(target=0.3, wait=True).delay == 0
    assert SelSync(target=0.3, aggregate="gradients").delay == 0
    assert SelSync(target=0.3, aggregate="gradients").aggregate == "gradients"
    assert SelSync(target=0.3).aggregate == "parameters"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SelSync(), "delta="),
        (lambda: SelSync(delta=0.3, target=0.1), "target="),
        (lambda: SelSync(delta=-0.1), "delta=-0.1"),
        (lambda: SelSync(delta=math.nan), "delta=nan"),
        (lambda: SelSync(delta="0.3"), "delta='0.3'"),  # type: ignore[arg-type]
        (lambda: SelSync(delta=True), "delta=True"),
        (lambda: SelSync(target=0), "target=0"),
        (lambda: SelSync(target=1.5), "target=1.5"),
        (lambda: SelSync(target=0.7), "target=0.7"),
        (lambda: SelSync(target=0.4, overlap=3), "target=0.4"),
        (lambda: SelSync(target=0.3, min_gap=4), "target=0.3"),
        (lambda: SelSync(target=0.1, max_local_steps=5), "at least 10"),
        (lambda: SelSync(delta=0.1, max_local_steps=1, wait=False), "max_local_steps=1"),
        (lambda: SelSync(delta=0.1, max_local_steps=0), "max_local_steps=0"),
        (lambda: SelSync(delta=0, max_local_steps=-3), "max_local_steps=-3"),
        (lambda: SelSync(target=1, max_local_steps="x"), "max_local_steps='x'"),  # type: ignore[arg-type]
        (lambda: SelSync(delta=0, overlap=7), "overlap="),
        (lambda: SelSync(target=1, min_gap=9), "min_gap="),
        (lambda: SelSync(delta=0.1, wait="no"), "wait='no'"),  # type: ignore[arg-type]
        (lambda: SelSync(delta=0.1, min_gap=0), "min_gap=0"),
        (lambda: SelSync(delta=0.1, window=1), "window=1"),
        (lambda: SelSync(delta=0.1, smoothing=0), "smoothing=0"),
        (lambda: SelSync(delta=0.1, signal="loss"), "signal='loss'"),  # type: ignore[arg-type]
        (lambda: SelSync(delta=0.1, aggregate="both"), "aggregate='both'"),  # type: ignore[arg-type]
        (lambda: SelSync(delta=0.1, aggregate="gradients", overlap=1), "overlap=0"),
        (lambda: SelSync(delta=0.1, aggregate="gradients", wait=False), "wait=True"),
        (lambda: SelSync(delta=0.1, aggregate="gradients", signal="replica-variance"), "aggregate="),
    ],
)
def test_bad_settings_are_refused(make: type[Policy], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


@pytest.mark.parametrize("signal", ["gradient-change", "replica-variance"])
@pytest.mark.parametrize("wait", [False, True])
def test_nobody_is_asked_while_it_would_be_too_soon(signal: Any, wait: bool) -> None:
    """Replicas need not wait for each other then; and the decisions are those of who is always asked."""
    policy = SelSync(target=0.05, min_gap=8, signal=signal, wait=wait)
    cohort = Cohort(policy).run(range(200), noisy(5, spread=1.0))
    assert cohort.synchronised
    for done in cohort.synchronised:
        parameters = [cohort.parameters[0]]
        tracker = policy.tracker(Context())
        tracker.synchronised(done, parameters)
        asked = [step for step in range(done, done + 20) if tracker.observe(step, parameters)]
        assert asked[0] == done + 7 - policy.delay
        assert asked == list(range(asked[0], done + 20))
