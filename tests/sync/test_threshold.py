"""The share of steps that reach the threshold is the target, whatever the signal does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sync import threshold as module
from holdfast.sync.threshold import FEW, Threshold

STEPS = 2000
Signal = Callable[[int, int, random.Random], float]  # from the step, the steps since the last hit, and chance

SIGNALS: dict[str, Signal] = {
    "stationary": lambda step, age, chance: math.exp(chance.gauss(0, 1)),
    "heavy-tailed": lambda step, age, chance: math.exp(chance.gauss(0, 2)),
    "decaying": lambda step, age, chance: math.exp(chance.gauss(0, 0.7) - step / 300),
    "growing": lambda step, age, chance: math.exp(chance.gauss(0, 0.7) + step / 300),
    "spiky": lambda step, age, chance: math.exp(chance.gauss(0, 0.1)) * (100 if chance.random() < 0.02 else 1),
    "dropping": lambda step, age, chance: math.exp(chance.gauss(0, 1)) * (1 if step < STEPS / 2 else 0.01),
    "back to nothing at each hit": lambda step, age, chance: age**1.5 * math.exp(chance.gauss(0, 0.3)),
}


def share(signal: Signal, target: float, *, seed: int = 0, silent: int = 0) -> float:
    """The share of synchronised steps. After each, ``silent`` steps decide nothing, as with delayed votes."""
    threshold, chance, hits, last = Threshold(target), random.Random(seed), 0, 0
    for step in range(STEPS):
        value = signal(step, step - last, chance)
        if hits and step <= last + silent:
            continue
        hit = threshold.reached(value)
        threshold.follow(step, value, hit=hit)
        if hit:
            hits, last = hits + 1, step
    return hits / STEPS


@pytest.mark.parametrize("target", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("name", SIGNALS)
def test_the_share_is_the_target(name: str, target: float) -> None:
    for seed in range(3):
        assert share(SIGNALS[name], target, seed=seed) == pytest.approx(target, rel=0.05, abs=0.003)


@pytest.mark.parametrize("name", SIGNALS)
def test_steps_without_a_decision_count(name: str) -> None:
    assert share(SIGNALS[name], 0.3, silent=1) == pytest.approx(0.3, rel=0.05)


def test_negative_control_without_making_up_a_decaying_signal_gets_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULL", 0.0)
    assert share(SIGNALS["decaying"], 0.1) < 0.095


def test_negative_control_a_threshold_that_stays_misses_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULL", 0.0)
    monkeypatch.setattr(module, "GAIN", 0.0)
    assert share(SIGNALS["decaying"], 0.1) < 0.06
    assert share(SIGNALS["growing"], 0.1) > 0.5


@settings(max_examples=40, deadline=None)
@given(
    scale=st.floats(1e-9, 1e9),
    spread=st.floats(0.1, 2.0),
    drift=st.floats(-6.0, 6.0),
    target=st.floats(0.05, 0.5),
    seed=st.integers(0, 1000),
)
def test_any_scale_spread_and_drift(scale: float, spread: float, drift: float, target: float, seed: int) -> None:
    def signal(step: int, age: int, chance: random.Random) -> float:
        return scale * math.exp(chance.gauss(0, spread) + drift * step / STEPS)

    assert share(signal, target, seed=seed) == pytest.approx(target, rel=0.1)


def test_it_picks_the_high_signals_and_not_just_any() -> None:
    threshold, chance = Threshold(0.1), random.Random(0)
    picked, all_of_them = [], []
    for step in range(STEPS):
        value = chance.gauss(0, 1)
        hit = threshold.reached(math.exp(value))
        threshold.follow(step, math.exp(value), hit=hit)
        all_of_them.append(value)
        if hit:
            picked.append(value)
    best = sorted(all_of_them)[-len(picked) :]
    assert sum(picked) / len(picked) > 0.8 * sum(best) / len(best)


def test_no_hit_before_the_first_few() -> None:
    threshold = Threshold(0.5)
    for step in range(FEW):
        assert not threshold.reached(1e9)
        threshold.follow(step, 1.0, hit=False)
    assert threshold.reached(1e9)


def test_a_spike_among_the_first_does_not_silence_it() -> None:
    threshold = Threshold(0.1)
    for step, value in enumerate([1.0, 1.0, math.inf, 1e12, 1.0, 1.0, 1.0, 1.0, 1.0]):
        threshold.follow(step, value, hit=False)
    assert threshold.value < 2


@pytest.mark.parametrize("silence", [0.0, math.nan])
def test_no_burst_and_no_silence_after_nothing(silence: float) -> None:
    threshold = Threshold(0.1)
    for step in range(20):
        threshold.follow(step, 1.0, hit=False)
    before = threshold.value
    for step in range(20, 1000):
        threshold.follow(step, silence, hit=math.isnan(silence))
    assert threshold.value == before
    threshold.follow(1000, 0.5, hit=False)
    assert 0.3 * before < threshold.value < before


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(0, 60))
def test_goes_on_from_its_state(signals: list[float], at: int) -> None:
    one, other = Threshold(0.2), Threshold(0.2)
    for step, value in enumerate(signals):
        if step == at:
            other.load(one.state())
        for each in (one, other) if step >= at else (one,):
            each.follow(step, value, hit=each.reached(value))
    if at < len(signals):
        assert one.state() == other.state()
    assert all(map(math.isfinite, one.state()))  # a mean of states must not become nan
