"""Histories of a ``Loop`` whose steps have several commits: two models in turns, with state, through all faults."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import Drift, HoldfastError
from holdfast.run import process as run_process
from holdfast.run.body import Body
from tests.conftest import FEW
from tests.world.history import DATA, STEPS, Plan, draw, happen
from tests.world.world import Outcome, Process, World

HISTORIES = 12
FOUND = (409,)  # a worker that had just joined told the next one what its script had before it joined


def make_loop(**settings: Any) -> holdfast.Loop:
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {
        "g": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)),
        "d": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1)),
    }
    rates = {"g": 0.05, "d": 0.1}
    optimizers = {name: torch.optim.AdamW(models[name].parameters(), lr=rate) for name, rate in rates.items()}
    schedules = {name: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for name, optimizer in optimizers.items()}
    if "checkpoint" in settings:
        settings["checkpoint"] = holdfast.Checkpoints(folder=settings["checkpoint"], every=settings.pop("every"))
    return holdfast.Loop(
        model=models, optimizer=optimizers, data=DATA, global_batch=6, micro_batch=2,
        state={"bodies": 0, "seen": [], **schedules}, **settings,
    )  # fmt: skip


def train(loop: holdfast.Loop, outcome: Outcome) -> None:
    """Two steps of one model to one of the other. What the body changes before a commit counts once as well."""
    models: Any = loop.engine.model.module
    state: Any = loop.state
    for step in loop.steps(STEPS):
        state["bodies"] += 1
        noise = float(torch.rand(()))
        for turn in range(2):
            for real, _ in step.micro_batches():
                fake = models["g"](torch.randn_like(real)).detach()
                step.backward((models["d"](fake) - models["d"](real)).mean())
            if made := step.commit("d", clip_norm=0.3):
                state["seen"].append(made.loss + noise)
                state["d"].step()
            if made and turn == 0 and step.number == 2:
                state["seen"].append(loop.evaluate(DATA, lambda both, batch: both["d"](batch[0]).mean()))
        for real, _ in step.micro_batches():
            step.backward(-models["d"](models["g"](torch.randn_like(real))).mean())
        made = step.commit("g")
        state["g"].step()  # after a broken commit, too
        if made:
            outcome.losses[made.number] = made.loss
    outcome.sha256 = loop.sha256()


def script(process: Process, **settings: Any) -> None:
    os.environ["HOLDFAST_WORKER"] = process.name
    loop = make_loop(**settings)
    process.run = loop  # type: ignore[assignment]
    train(loop, process.outcome)
    loop.finish()
    loop.leave()
    process.client.bye()


@cache
def expected() -> str:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_process, "runs", [])
        outcome = Outcome()
        train(make_loop(), outcome)
    return outcome.sha256


def drawn(seed: int, root: Path) -> Plan:
    plan = draw(seed, root, kind="checkpoints" if seed % 3 == 0 else "replicas")
    plan.settings = {key: value for key, value in plan.settings.items() if key in ("checkpoint", "every")}
    return plan


def assert_right(plan: Plan, world: World) -> bool:
    """The same bits on all that come to the end; returns whether any does."""
    said = f"seed {plan.seed}: {[(e['kind'], e['phase'], e['worker']) for e in world.of('fault')]}"
    wrong = [e for e in world.errors if isinstance(e, Drift) or not isinstance(e, HoldfastError)]
    assert not wrong, f"{said}: {wrong}"
    hashes = {process.outcome.sha256 for process in world.processes if process.outcome.sha256}
    assert hashes <= {expected()}, said
    return bool(hashes)


@pytest.mark.parametrize("seed", FOUND)
def test_what_a_soak_has_found(tmp_path: Path, seed: int) -> None:
    plan = drawn(seed, tmp_path)
    assert assert_right(plan, happen(plan, work=script)), "it came to its end"


def test_every_history_ends_right(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Also the control: most come to their end, and many have lost somebody on the way."""
    ended = survived = 0
    soak = request.config.getoption("--soak")
    for seed in range(HISTORIES if soak <= FEW else max(HISTORIES, soak // 10)):
        plan = drawn(seed, tmp_path)
        world = happen(plan, work=script)
        ended += assert_right(plan, world)
        survived += bool(world.of("failure"))
    assert ended > seed / 2
    assert survived > seed / 5


def nothing(*_: Any, **__: Any) -> None: ...


def finds(tmp_path: Path, histories: int = 60) -> bool:
    """Whether one of some histories fails."""
    for seed in range(histories):
        plan = drawn(seed, tmp_path)
        try:
            assert_right(plan, happen(plan, work=script))
        except AssertionError:
            return True
    return False


def test_control_a_body_that_does_not_begin_as_before_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Body, "take_back", nothing)
    assert finds(tmp_path)
