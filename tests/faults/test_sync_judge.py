"""The judge's own controls: journals of a made-up run, right and wrong in every way that it must notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.faults.sync_judge import (
    Life,
    Rules,
    Trial,
    assert_nothing_lost,
    assert_nothing_lost_by_a_server,
    times_apart,
)
from tests.harness import Result

STEPS, EVERY, KILL = 9, 3, 5


def made_up(flaw: str = "", *, workers: int = 3) -> dict[str, Life]:
    """Local SGD: 0.1 is lost in step 5, before its update; the others meet at 5 and go on; 0.3 comes in there."""
    rng = np.random.default_rng(0)
    weights = {f"0.{n}": np.zeros(4) for n in range(workers)}
    lives = {worker: Life() for worker in weights}
    synced = np.zeros(4)
    for step in range(STEPS):
        if step == KILL:
            lost = weights.pop("0.1")
            synced = meet(weights, flaw, lost=lost, stale=synced)
            lives["0.3"], weights["0.3"] = Life(), synced if flaw != "stale joiner" else np.full(4, 1.25)
        for number, (worker, own) in enumerate(weights.items()):
            lives[worker].before[step] = own
            share = rng.integers(0, 64, 3) / 64
            gradient = np.array([*share, 1 - share.sum()])
            twice = flaw == "twice" and step == 4 and number == 0
            weights[worker] = own + gradient * (2 if twice else 1)
            lives[worker].after[step + 1] = own + gradient
        if step % EVERY == EVERY - 1:
            synced = meet(weights, flaw)
    for worker, own in weights.items():
        lives[worker].before[STEPS] = own
    return lives


def meet(
    weights: dict[str, np.ndarray], flaw: str, *, lost: np.ndarray | None = None, stale: np.ndarray | None = None
) -> np.ndarray:
    everybody = list(weights.values())
    mean = np.mean(everybody, axis=0)
    if lost is not None and flaw == "copied":  # the first one's, and the others' steps are gone
        mean = everybody[0]
    if lost is not None and flaw == "forgotten":  # one survivor's steps count for nothing
        mean = np.mean(everybody[:-1], axis=0)
    if lost is None and flaw == "lopsided":
        mean = 0.75 * everybody[0] + 0.25 * everybody[1]
    for number, worker in enumerate(weights):
        if not (lost is None and flaw == "deaf" and number == 1):
            weights[worker] = mean
    return mean


def test_a_right_run_passes() -> None:
    lives = made_up()
    assert_nothing_lost(lives, Rules(), steps=STEPS)
    assert times_apart(lives, steps=STEPS) > 4


@pytest.mark.parametrize("flaw", ["copied", "forgotten", "lopsided", "deaf", "stale joiner"])
def test_a_wrong_run_is_noticed(flaw: str) -> None:
    with pytest.raises(AssertionError):
        assert_nothing_lost(made_up(flaw), Rules(), steps=STEPS)


def test_a_step_that_counts_twice_is_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_nothing_lost(made_up("twice"), Rules(), steps=STEPS)


def test_a_lost_replica_may_or_may_not_be_in_the_average() -> None:
    """It may have contributed everything before it was lost; a made-up number never counts."""
    lives = made_up()
    lost = lives["0.1"].before[4] + 0.25  # as if it had made step 5 too
    lives["0.1"].after[5] = lost
    for worker in ("0.0", "0.2", "0.3"):
        lives[worker].before[5] = np.mean([lives["0.0"].after[5], lives["0.2"].after[5], lost], axis=0)
    assert_nothing_lost(lives, Rules(), steps=5)
    lives["0.1"].after[5] = lost + 1
    with pytest.raises(AssertionError, match="no average"):
        assert_nothing_lost(lives, Rules(), steps=5)


def pushed(*, forgotten: int = 0, twice: int = 0) -> Trial:
    """Three replicas push updates of which two are the same at every step; one is lost, and heard by nobody."""
    rng = np.random.default_rng(0)
    journals: dict[str, list[dict[str, Any]]] = {"0.0": [], "0.1": [], "0.2": []}
    final = np.zeros(20)
    for step in range(4):
        gradients = [rng.integers(0, 64, 19) / 64 for _ in range(2)]
        for worker, lines in journals.items():
            share = gradients[worker == "0.2"]
            update = np.array([*share, 1 - share.sum()])
            lines.append({"kind": "update", "before": [0.0] * 20, "after": update.tolist()})
            lines.append({"kind": "step", "workers": 3})
            final += 0 if worker == "0.2" or step < forgotten else update / 3 * (1 + twice)
    results = [{"worker": worker, "count": final.tolist(), "steps": 4} for worker in ("0.0", "0.1")]
    result = Result(code=0, events=[{"event": "failure"}], said=[], results=results)
    return Trial(result=result, journals=journals)


def test_updates_that_are_alike_are_still_counted() -> None:
    assert_nothing_lost_by_a_server(pushed())
    with pytest.raises(AssertionError, match="steps are in the weights"):
        assert_nothing_lost_by_a_server(pushed(forgotten=1))
    with pytest.raises(AssertionError, match="steps are in the weights"):
        assert_nothing_lost_by_a_server(pushed(twice=3))
