"""Policies that follow the calendar, or chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.sync.periodic import FedAvg, LocalSGD, RandomSync
from holdfast.sync.policy import Context, Policy, Tracker


def synchronised_steps(tracker: Tracker, steps: range) -> list[int]:
    """The steps after which replicas are equal, counted from 1."""
    found = []
    for step in steps:
        assert tracker.observe(step, []) == []
        if tracker.decide(step, [], 4).synchronise:
            tracker.synchronised(step + 1, [])
            found.append(step + 1)
    return found


def test_every_so_many_steps() -> None:
    assert synchronised_steps(LocalSGD(every=3).tracker(Context()), range(10)) == [3, 6, 9]
    assert synchronised_steps(LocalSGD(every=1).tracker(Context()), range(3)) == [1, 2, 3]


def test_counts_from_the_last_time_whatever_it_was_for() -> None:
    tracker = LocalSGD(every=5).tracker(Context())
    assert synchronised_steps(tracker, range(7)) == [5]
    tracker.synchronised(7, [])  # as for an evaluation
    assert synchronised_steps(tracker, range(7, 20)) == [12, 17]


def test_counts_from_the_end_of_the_warmup() -> None:
    policy = LocalSGD(every=4, warmup=6)
    assert [policy.together(step) for step in (0, 5, 6)] == [True, True, False]
    tracker = policy.tracker(Context())
    tracker.synchronised(0, [])
    assert synchronised_steps(tracker, range(6, 20)) == [10, 14, 18]


@given(st.integers(1, 20), st.integers(0, 40))
def test_goes_on_from_its_state(every: int, at: int) -> None:
    one, other = (LocalSGD(every=every).tracker(Context()) for _ in range(2))
    synchronised_steps(one, range(at))
    other.load(one.state())
    assert synchronised_steps(one, range(at, 80)) == synchronised_steps(other, range(at, 80))


def test_the_reason_is_told() -> None:
    decision = LocalSGD(every=3).tracker(Context()).decide(2, [], 4)
    assert (decision.synchronise, decision.reason) == (True, "3 of 3 steps apart")


@pytest.mark.parametrize(("period", "steps"), [(1.0, 40), (0.25, 10), (0.001, 1), (2, 80)])
def test_a_period_is_in_epochs(period: float, steps: int) -> None:
    tracker = FedAvg(period=period).tracker(Context(steps_per_epoch=40))
    assert synchronised_steps(tracker, range(100))[0] == steps


def test_a_period_needs_to_know_what_an_epoch_is() -> None:
    with pytest.raises(UsageError, match="steps an epoch has"):
        FedAvg(period=0.5).tracker(Context())
    assert synchronised_steps(FedAvg(every=7).tracker(Context()), range(15)) == [7, 14]


@given(st.floats(0.01, 1), st.integers(1, 12), st.integers(0, 1000), st.integers(0, 100))
def test_a_fraction_of_the_replicas_counts(fraction: float, workers: int, step: int, seed: int) -> None:
    policy, context = FedAvg(fraction=fraction, every=1), Context(seed=seed)
    shares = policy.shares(step, workers, context)
    assert shares == policy.shares(step, workers, context)
    if shares is None:
        assert fraction * workers > workers - 1
        return
    count = sum(share > 0 for share in shares)
    assert count - 1 < fraction * workers <= count + 1e-9
    assert sum(shares) == pytest.approx(1)
    assert len(shares) == workers


def test_rounding_adds_no_replica() -> None:
    for tenths in range(1, 10):
        shares = FedAvg(fraction=tenths / 10, every=1).shares(0, 10, Context())
        assert shares is not None
        assert sum(share > 0 for share in shares) == tenths
    assert FedAvg(every=1).shares(0, 10, Context()) is None


def test_everyone_gets_a_turn() -> None:
    policy = FedAvg(fraction=0.25, every=1)
    turns = [0] * 4
    for step in range(400):
        for rank, share in enumerate(policy.shares(step, 4, Context(seed=3)) or []):
            turns[rank] += share > 0
    assert min(turns) > 70


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_chance_has_its_share_and_is_the_same_everywhere(share: float) -> None:
    one, other = (RandomSync(share=share).tracker(Context(seed=2)) for _ in range(2))
    found = synchronised_steps(one, range(2000))
    assert len(found) == pytest.approx(2000 * share, rel=0.2)
    assert found == synchronised_steps(other, range(2000))
    assert share == 1 or found != synchronised_steps(RandomSync(share=share).tracker(Context(seed=3)), range(2000))
    assert synchronised_steps(other, range(1000, 2000)) == [step for step in found if step > 1000]  # no memory


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(every=0), "every=0"),
        (lambda: LocalSGD(every=2.0), "every=2.0"),  # type: ignore[arg-type]
        (lambda: LocalSGD(every=2, warmup=-1), "warmup=-1"),
        (lambda: LocalSGD(every=2, optimizer_state="keep"), "optimizer_state='keep'"),  # type: ignore[arg-type]
        (lambda: RandomSync(share=0), "share=0"),
        (lambda: RandomSync(share=1.5), "share=1.5"),
        (lambda: FedAvg(fraction=0.5), "how often"),
        (lambda: FedAvg(period=1, every=1), "how often"),
        (lambda: FedAvg(period=0), "period=0"),
        (lambda: FedAvg(every=-3), "every=-3"),
        (lambda: FedAvg(fraction=0, every=1), "fraction=0"),
        (lambda: FedAvg(fraction=float("nan"), every=1), "fraction=nan"),
    ],
)
def test_bad_settings_are_refused(make: type[Policy], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
