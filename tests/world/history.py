"""Histories: what a seed does to a run, and what every history is judged by."""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.errors import HoldfastError
from holdfast.plan.layout import Layout
from holdfast.recovery import arrange
from holdfast.run import run as run_module
from tests.engine.pipelines import lay
from tests.world.world import Process, World, inhabited

Fate = Callable[[World, Process, str], None]
Layouts = Callable[[int, str], Layout]

STEPS = 5
LAYERS = 4
FAULTS = (
    "kill",
    "kill another",
    "kill two",
    "hang",
    "drop line",
    "cut",
    "crash",
    "slow",
    "join",
    "leave",
    "machine",
    "lines",
    "sleep",
    "pause",
    "separate",
    "isolate",
    "head",
    "deadlock",
)


def _numbers(seed: int) -> torch.Tensor:
    return torch.randn(14, 4, generator=torch.Generator().manual_seed(seed))


DATA = TensorDataset(_numbers(1), _numbers(2))


class Middle(nn.Module):
    """A layer of which a part is frozen, with a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("shift", torch.full((1,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.trained(x) + self.shift).tanh()


def make_layers() -> list[nn.Module]:
    """Four: the first and the last share a weight, the second has none."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return [first, nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), Middle(), last]


def make_run(**settings: Any) -> holdfast.Run:
    """A small run with dropout, clipping and a ragged last batch.

    Takes the settings of a run in short: ``stages``, ``update``, and ``every`` beside ``checkpoint``.
    """
    update, every = settings.pop("update", "commit"), settings.pop("every", "auto")
    if update != "eager":
        settings.setdefault("clip_norm", 0.3)
    if "stages" in settings:
        settings["placement"] = holdfast.Placement(stages=settings.pop("stages"))
    if "checkpoint" in settings:
        settings["checkpoint"] = holdfast.Checkpoints(folder=settings["checkpoint"], every=every)
    settings["numerics"] = holdfast.Numerics(update=update)
    return holdfast.Run(
        layers=make_layers(),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        data=DATA,
        global_batch=6,
        micro_batch=2,
        **settings,
    )


def script(process: Process, **settings: Any) -> None:
    """What every worker runs: training with an evaluation in the middle, one at the end, and the hash."""
    os.environ["HOLDFAST_WORKER"] = process.name
    run = process.run = make_run(**settings)
    outcome = process.outcome
    for step in run.steps(STEPS):
        outcome.losses[step.number] = step.loss
        if step.number == 2:
            outcome.values.append(run.evaluate(DATA))
    outcome.values.append(run.evaluate(DATA))
    outcome.sha256 = run.sha256()
    run.finish()
    run.leave()
    process.client.bye()


@dataclass(kw_only=True)
class Expected:
    """What an undisturbed run in one process gives."""

    losses: dict[int, float]
    value: float
    sha256: str
    samples: dict[int, list[int]]


@cache
def expected(eager: bool = False) -> Expected:
    torch.set_num_threads(1)
    noted: dict[int, list[int]] = {}

    class Notes:
        def __init__(self, path: Any) -> None: ...

        def write(self, event: str, **fields: Any) -> None:
            if event == "vote":
                noted[fields["step"]] = fields["samples"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "Events", Notes)
        patch.setattr(run_module, "_runs", [])
        patch.setenv("HOLDFAST_TRACE", "1")
        run = make_run(stages=1, update="eager" if eager else "commit")
        losses = {step.number: step.loss for step in run.steps(STEPS)}
        return Expected(losses=losses, value=run.evaluate(DATA), sha256=run.sha256(), samples=noted)


@dataclass(kw_only=True)
class Plan:
    """One history, before it happens: the run, its machines, and which faults strike at which fault point."""

    seed: int
    kind: str
    hosts: list[int]
    settings: dict[str, Any]
    strikes: dict[int, str] = field(default_factory=dict)  # by the number of the fault point, counted over all workers
    minimum_hosts: int | None = None  # machines that the run needs; None: all
    layouts: Layouts | None = None  # in place of the planner: from a number of workers and a seed

    @property
    def has_checkpoints(self) -> bool:
        return "checkpoint" in self.settings


KINDS = ("replicas", "pipelines", "layouts", "eager", "checkpoints", "log", "apart")
POLICIES = (  # for replicas that train apart
    holdfast.LocalSGD(every=2),
    holdfast.LocalSGD(every=3, overlap=1, optimizer_state="average"),
    holdfast.SelSync(delta=0.3),
    holdfast.SelSync(delta=0.3, aggregate="gradients"),
    holdfast.SelSync(target=0.4, warmup=1, max_local_steps=3),
    holdfast.SelSync(delta=0.02, signal="replica-variance"),
    holdfast.FedAvg(fraction=0.5, every=2),
    holdfast.DiLoCo(every=2),
    holdfast.SSP(staleness=1),
    holdfast.SSP(staleness=2),
)


def draw(seed: int, root: Path, *, kind: str | None = None, faults: tuple[str, ...] = FAULTS) -> Plan:
    """Everything that is decided beforehand, from one seed."""
    chance = random.Random(seed)
    kind = kind or chance.choice(KINDS)
    workers = chance.randint(2, 4)
    hosts = [workers] if chance.random() < 0.6 else [workers - workers // 2, max(1, workers // 2)]
    settings: dict[str, Any] = {"stages": 1}
    if kind == "pipelines":
        settings = {"stages": chance.choice([[2, 2], [1, 3], [1, 1, 2]]), "tolerate": 1}
    elif kind == "eager":
        settings["update"] = "eager"
    elif kind == "checkpoints":
        settings |= {"checkpoint": root / str(seed), "every": chance.randint(1, 3)}
    elif kind == "log":
        settings = {"stages": chance.choice([[2, 2], [1, 3]]), "tolerate": 0, "log": True}
        settings |= {"checkpoint": root / str(seed), "every": chance.randint(2, 4)}
    elif kind == "apart":
        settings = {"sync": chance.choice(POLICIES)}
        if chance.random() < 0.5:
            settings |= {"checkpoint": root / str(seed), "every": chance.randint(1, 3)}
    count = chance.choice([0, 1, 1, 2, 2, 3, 4])
    points = 30 * sum(hosts) * STEPS // 3
    strikes = {chance.randint(1, points): chance.choice(faults) for _ in range(count)}
    layouts = random_layout if kind == "layouts" else None
    return Plan(seed=seed, kind=kind, hosts=hosts, settings=settings, strikes=strikes, layouts=layouts)


def random_layout(size: int, seed: str) -> Layout:
    """Pipelines of any depth, cut anywhere, on workers in any order; some may have nothing to do."""
    chance = random.Random(seed)
    workers = list(range(size))
    chance.shuffle(workers)
    lines: list[tuple[list[int], list[int]]] = []
    while workers and (not lines or chance.random() < 0.8):
        depth = chance.randint(1, min(len(workers), LAYERS, 3))
        cuts = sorted(chance.sample(range(1, LAYERS), depth - 1))
        counts = [stop - start for start, stop in itertools.pairwise([0, *cuts, LAYERS])]
        lines.append(([workers.pop() for _ in range(depth)], counts))
    return lay(*lines, size=size)


def planner_of(layouts: Layouts) -> Callable[..., Layout]:
    """In place of the planner: pure, and perhaps another layout for each generation."""

    def lay_out(*, workers: list[str], held: Any, **_: Any) -> Layout:
        return layouts(len(workers), repr((list(workers), sorted((w, sorted(h)) for w, h in held.items()))))

    return lay_out


def fate_of(plan: Plan) -> Fate:
    """Strike as planned."""
    count = itertools.count(1)

    def fate(world: World, process: Process, phase: str) -> None:
        kind = plan.strikes.get(next(count))
        if kind is not None:
            world.log("fault", kind=kind, phase=phase, worker=process.name)
            strike(world, process, kind)

    return fate


def strike(world: World, process: Process, kind: str) -> None:
    chance = world.scheduler.chance
    others = [each for each in world.alive if each is not process]
    if kind in ("kill another", "kill two", "hang", "deadlock") and others:
        other = chance.choice(others)
        {"hang": world.freeze, "deadlock": world.deadlock}.get(kind, Process.kill)(other)
    if kind in ("kill", "kill two"):
        process.kill()
    elif kind == "lines":
        chance.choice([agent for agent in world.agents if agent.code is None]).drop_lines()
    elif kind == "sleep":
        world.coordinator.sleep(chance.uniform(0.5, 20.0))
    elif kind == "pause" and others:
        world.pause(chance.choice(others), chance.uniform(0.5, 12.0))
    elif kind == "machine":
        there = [agent for agent in world.agents if agent.code is None]
        if len(there) > 1:
            chance.choice(there).vanish()
    elif kind == "head" and len([agent for agent in world.agents if agent.code is None]) > 1:
        world.restart_head(chance.uniform(0.05, 8.0))
    elif kind in ("separate", "isolate"):
        cut_network(world, kind)
    elif kind == "drop line":
        process.client.drop_line()
    elif kind == "cut":
        world.cut()
    elif kind == "crash":
        world.coordinator.crash(chance.uniform(0.05, 3.0))
    elif kind == "slow":
        world.slow_until = world.scheduler.now + 1.0
    elif kind in ("join", "join one"):
        world.join(1 if kind == "join one" else chance.randint(1, 2))
    elif kind == "leave":
        staying = [agent for agent in world.agents if not agent.is_over]
        if len(staying) > 1:
            chance.choice(staying).leave()


def cut_network(world: World, kind: str) -> None:
    """Two machines do not reach each other for a while, or one of them reaches nobody."""
    chance, hosts = world.scheduler.chance, [a.host for a in world.agents if a.code is None and a.host is not None]
    if len(hosts) < 2:
        return
    one, other = chance.sample(hosts, 2)
    seconds = chance.uniform(1.0, 25.0)
    if kind == "separate" or any(process.frozen for process in world.processes):
        # A stopped process on a machine that never hears of the coordinator again would be there for ever.
        world.separate(one, other)
        world.scheduler.later(seconds, lambda: world.reunite(one, other))
    else:
        world.isolate(one)
        world.scheduler.later(seconds, lambda: world.end_isolation(one))


lived: list[World] = []  # the last history, for those who want to know what happened in it


def happen(plan: Plan, fate: Fate | None = None) -> World:
    """Live through a history."""

    def run(process: Process) -> None:
        script(process, **plan.settings)

    with pytest.MonkeyPatch.context() as patch:
        if plan.layouts is not None:
            patch.setattr(arrange, "lay_out", planner_of(plan.layouts))
        made = World(plan.seed, run, fate or fate_of(plan), hosts=plan.hosts, minimum_hosts=plan.minimum_hosts)
        with inhabited(made) as world:
            try:
                world.live()
            finally:
                lived.append(world)
                del lived[:-1]
    return world


# --- what it is judged by --------------------------------------------------------------------------------


def assert_right(plan: Plan, world: World) -> bool:
    """The same bits, each step once, each sample once; returns whether the run came to its end.

    It may end early only if all copies of a layer were lost, and there was no checkpoint.
    """
    said = f"seed {plan.seed}, {plan.kind}: {[(e['kind'], e['phase'], e['worker']) for e in world.of('fault')]}"
    right = expected(plan.kind == "eager")
    finished = [process for process in world.processes if process.outcome.sha256]
    assert_commits(world, right, said)
    crashes = [error for error in world.errors if not isinstance(error, HoldfastError)]
    assert not crashes, f"{said}: scripts failed: {crashes}"
    if not finished:
        everybody_left = all(agent.leaving or agent.code == 0 for agent in world.agents)
        if any("hosts for" in event["message"] for event in world.of("stop")):  # it waited for a machine in vain
            everybody_left = any(agent.leaving or agent.code == -9 for agent in world.agents)
        assert everybody_left or (not plan.has_checkpoints and is_lost(world)), f"{said}: it ended, and need not have"
        return False
    # A machine that was given up for a moment, and comes back when all is over, finds nobody.
    errors = [e for e in world.errors if not ("is gone" in str(e) and world.coordinator.over)]
    assert not errors, f"{said}: {errors}"
    exact = plan.kind != "apart" and not any(e["inexact"] for e in world.of("entered"))
    hashes = {process.outcome.sha256 for process in finished}
    assert hashes == ({right.sha256} if exact else hashes), f"{said}: other bits"
    assert len(hashes) == 1, f"{said}: replicas differ"
    assert len({process.outcome.values[-1] for process in finished}) == 1, f"{said}: evaluations differ"
    for process in finished:
        assert max(process.outcome.losses, default=STEPS - 1) == STEPS - 1, f"{said}: {process.name} ended early"
    if exact:
        for process in finished:
            assert process.outcome.losses.items() <= right.losses.items(), said
            assert process.outcome.values[-1] == right.value, said
        assert_samples(world, right, said)
    return True


def assert_commits(world: World, right: Expected, said: str) -> None:
    """Every worker commits one step after the other, none twice."""
    steps: dict[str, list[int]] = defaultdict(list)
    for event in world.of("commit"):
        steps[event["worker"]].append(event["step"])
    for worker, committed in steps.items():
        assert committed == list(range(committed[0], committed[0] + len(committed))), f"{said}: {worker} {committed}"


def assert_samples(world: World, right: Expected, said: str) -> None:
    """The generation that voted last for a step has used each of its samples once."""
    votes: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for event in world.of("vote"):
        votes[event["step"]][event["generation"]] += event["samples"]
    for step, by_generation in votes.items():
        used = by_generation[max(by_generation)]
        assert sorted(used) == sorted(right.samples[step]), f"{said}: step {step} used {used}"


def is_lost(world: World) -> bool:
    """Whether all holders of some layer, in the last generation that has committed a step, were killed or hung.

    If none has, all members: a new coordinator cannot know that nothing is lost, nor can one that has heard of a
    committed operation, such as the one that replicas begin with which train apart.
    """
    committed = [event["generation"] for event in world.of("commit")]
    gone = {e["worker"] for e in world.of("hangs")} | {e["worker"] for e in world.of("exit-of")}
    if not committed:
        begun = any(process.run is not None and process.run._cohort.begun for process in world.processes)
        unsure = begun or bool(world.of("coordinator-restart"))
        return unsure and {*world.of("generation")[-1]["workers"]} <= gone
    holders: dict[int, set[str]] = defaultdict(set)
    for event in world.of("layout"):
        if event["generation"] == max(committed) and "first" in event:
            for layer in range(event["first"], event["stop"]):
                holders[layer].add(event["worker"])
    return any(workers <= gone for workers in holders.values())
