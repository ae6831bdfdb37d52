"""Generations end to end in threads, with eager updates: replicas stay alike, exact where somebody was untouched."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.cluster import faults
from holdfast.commit import cohort
from holdfast.commit.settle import account_of, settle
from holdfast.engine import gradients, reduce
from holdfast.errors import UsageError
from holdfast.plan.layout import side_by_side
from holdfast.recovery import arrange
from holdfast.undo.undo import undo_step
from tests.engine.pipelines import Result, same_bits, train_alone
from tests.recovery.test_cohort import JOB, LAYERS, STEPS, at, nothing, run, spread_out
from tests.recovery.town import Fate, Town, random_layout

EAGER = replace(JOB, clip_norm=None, inverse=undo_step)
PHASES = ["data", "forward", "backward", "eager", "reduce", "vote", "voted", "update", "regroup", "copy"]


@pytest.fixture(scope="module")
def expected() -> Result:
    return train_alone(replace(EAGER, inverse=None))


@pytest.fixture
def make_town(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As that of ``test_cohort``; here the thread of a reduction can be struck too."""

    def make(fate: Fate, target: int, layouts: Any = None, job: Any = EAGER) -> Town:
        town = Town(job, fate, target, layouts or partial(random_layout, LAYERS))
        monkeypatch.setattr(faults, "point", town.point)
        monkeypatch.setattr(arrange, "lay_out", town.lay_out)
        monkeypatch.setattr(gradients, "SMALL_BYTES", 64)

        class Child(threading.Thread):
            """Strikes at its worker strike here too."""

            def __init__(self, **settings: Any) -> None:
                super().__init__(**settings)
                self.of = {**town._local.__dict__}

            def run(self) -> None:
                town._local.__dict__.update(self.of)
                super().run()

        monkeypatch.setattr(reduce, "threading", SimpleNamespace(Thread=Child))
        return town

    return make


def inexact(town: Town) -> bool:
    """Whether a unit had to be taken from somebody who had updated and undone it."""
    plans = [settle({m.worker: m.standing for m in generation.members}) for generation in town.generations]
    return any(plan.inexact for plan in plans)


def undone(town: Town) -> bool:
    return any(account_of(m.standing).undone for generation in town.generations for m in generation.members)


def assert_trained(town: Town, expected: Result) -> None:
    """Replicas are alike to the bit; and have the bits of one worker, unless all copies of something were undone."""
    assert town.over is None
    first: dict[str, torch.Tensor] = {}
    for worker, tensors in town.trained.items():
        for name, tensor in tensors.items():
            assert same_bits(tensor, first.setdefault(name, tensor)), f"{worker}: {name} differs from a replica's"
            if inexact(town):
                assert torch.allclose(tensor, expected.tensors[name], rtol=1e-3, atol=1e-5), f"{worker}: {name}"
            else:
                assert same_bits(tensor, expected.tensors[name]), f"{worker}: {name}"
    if town.trained.keys() >= {*town.generations[-1].workers}:
        assert first.keys() == expected.tensors.keys()


def test_without_failures_it_is_as_with_updates_at_the_commit(make_town: Any, expected: Result) -> None:
    town = run(make_town(nothing, 4), 4)
    assert_trained(town, expected)
    assert not undone(town)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("count", [1, 4])
def test_one_worker_killed_anywhere(make_town: Any, expected: Result, phase: str, count: int) -> None:
    strikes = [("0.1", phase, count)]
    if phase in ("regroup", "copy"):  # the second loss hits those who are just recovering
        strikes = [("0.1", phase, 1 if phase == "copy" else 2), ("0.3", "eager", count)]
    town = run(make_town(at(*strikes), 4, spread_out), 4)
    if town.over is None:
        assert_trained(town, expected)
        assert len(town.trained) >= 2
    else:
        assert phase in ("regroup", "copy"), "every layer had two holders"


def side(size: int, seed: str) -> Any:
    return side_by_side(LAYERS, size)


@pytest.mark.parametrize("unlucky", [["0.0"], ["0.1", "0.2"], ["0.0", "0.1", "0.2"]])
@pytest.mark.parametrize("how", ["unlucky", "rash"])
def test_a_vote_that_fails_for_some(make_town: Any, expected: Result, unlucky: list[str], how: str) -> None:
    """Whoever has voted has updated everything: it rolls forward as it is, or undoes it all."""
    town = run(make_town(at(*((worker, how, 3) for worker in unlucky)), 3, side), 3)
    assert_trained(town, expected)
    assert len(town.trained) == 3
    assert undone(town)


def test_all_undo_and_one_copy_is_everybodys(make_town: Any, expected: Result) -> None:
    """Nobody sees the vote succeed, so all have updated everything, and drop it."""
    town = run(make_town(at(*((f"0.{i}", "unlucky", 3) for i in range(3))), 3, side), 3)
    assert inexact(town)
    assert_trained(town, expected)


def test_if_all_keep_what_they_have_undone_replicas_differ(make_town: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control. Undoing is the same on all workers here, so that one has to be given another rounding."""

    def keeps(standings: Any) -> Any:
        return settle(
            {w: replace(s, payload=replace(account_of(s), undone=()).to_json()) for w, s in standings.items()}
        )

    def rounds(optimizer: Any, grads: Any, *, first: Any) -> None:
        undo_step(optimizer, grads, first=first)
        with torch.no_grad():
            for p in grads:
                p.add_(1e-6 * (threading.current_thread().name == "0.1"))

    job = replace(EAGER, inverse=rounds)
    strikes = at(*((f"0.{i}", "unlucky", 3) for i in range(3)))
    right = run(make_town(strikes, 3, side, job), 3)
    assert all(same_bits(right.trained["0.0"][name], right.trained["0.1"][name]) for name in right.trained["0.0"])
    monkeypatch.setattr(cohort, "settle", keeps)
    wrong = run(make_town(strikes, 3, side, job), 3)
    assert not all(same_bits(wrong.trained["0.0"][name], wrong.trained["0.1"][name]) for name in wrong.trained["0.0"])


def refusing(*workers: str) -> Any:
    def inverse(optimizer: Any, grads: Any, *, first: Any) -> None:
        if threading.current_thread().name in workers:
            raise UsageError("it cannot be undone")
        undo_step(optimizer, grads, first=first)

    return replace(EAGER, inverse=inverse)


def test_a_torn_layer_comes_from_a_replica(make_town: Any, expected: Result) -> None:
    town = run(make_town(at(*((f"0.{i}", "unlucky", 3) for i in range(3))), 3, side, refusing("0.0")), 3)
    assert_trained(town, expected)
    held = [account_of(m.standing).held for m in town.generations[1].members]
    assert held[0] == held[1], "it had voted: it tried to undo later"
    assert len(town.trained) == 3


def test_what_is_torn_everywhere_is_lost(make_town: Any) -> None:
    town = run(make_town(at(*((f"0.{i}", "unlucky", 3) for i in range(3))), 3, side, refusing("0.0", "0.1", "0.2")), 3)
    assert town.over == "a part of the state is lost"


def test_without_undo_weights_are_far_off(make_town: Any, expected: Result) -> None:
    """The control: the tolerance is not what lets them pass."""
    job = replace(EAGER, inverse=lambda optimizer, grads, first: None)
    town = run(make_town(at(*((f"0.{i}", "unlucky", 3) for i in range(3))), 3, side, job), 3)
    with pytest.raises(AssertionError):
        assert_trained(town, expected)


def chances(seed: int, size: int) -> Fate:
    chance = random.Random(seed)
    strikes: set[tuple[str, str, int]] = set()
    for _ in range(chance.randint(1, 3)):
        phase = chance.choice([*PHASES, "eager", "eager", "eager"])
        strikes.add((f"0.{chance.randrange(size + 1)}", phase, chance.randint(1, 12)))
    for _ in range(chance.randint(0, 3)):
        strikes.add((f"0.{chance.randrange(size)}", chance.choice(["unlucky", "rash"]), chance.randint(1, STEPS)))
    return at(*strikes)


def random_run(make_town: Any, seed: int) -> Town:
    chance = random.Random(seed)
    size = chance.randint(2, 6)
    town: Town = make_town(chances(seed, size), size)
    comes = chance.randrange(STEPS)

    def after_step(worker: str, step: int) -> None:
        if step == comes and worker == "0.0" and chance.random() < 0.5:
            town.start(1)
            town.target += 1

    town.after_step = after_step  # type: ignore[method-assign]
    return run(town, size)


def test_whatever_happens_replicas_stay_alike(make_town: Any, expected: Result) -> None:
    found: Counter[str] = Counter()
    for seed in range(30):
        town = random_run(make_town, seed)
        if town.over is None and town.trained:
            assert_trained(town, expected)
            found["inexact" if inexact(town) else "exact after an undo" if undone(town) else "exact"] += 1
    assert all(found[kind] for kind in ("inexact", "exact after an undo")), f"the control: {found}"
