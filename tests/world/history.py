"""Histories: what a seed does to a run, and what every history is judged by."""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.checkpoint.lease import Superseded
from holdfast.cluster import talk
from holdfast.cluster.membership import machine_of
from holdfast.engine import exchanges
from holdfast.errors import Drift, HoldfastError
from holdfast.plan.layout import Layout
from holdfast.recovery import arrange
from holdfast.run import process as run_process
from holdfast.run import training
from tests.as_loop import AsLoop
from tests.engine.pipelines import lay
from tests.injected import injected
from tests.world.strikes import FAULTS, is_possible, strike
from tests.world.world import LIMIT, Outcome, Process, World, inhabited

Fate = Callable[[World, Process, str], None]
Layouts = Callable[[int, str], Layout]

STEPS = 5
LAYERS = 4
PER_FAULT = 60.0  # simulated seconds more that a history may take for each planned fault
DAILY = 400  # histories that `make test` lives through


def _numbers(seed: int) -> torch.Tensor:
    return torch.randn(14, 4, generator=torch.Generator().manual_seed(seed))


DATA = TensorDataset(_numbers(1), _numbers(2))


class Middle(nn.Module):
    """A layer of which a part is frozen, with running statistics, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.full((1,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.trained(x) + 0.1 * self.norm(x) + self.shift).tanh()


def make_layers() -> list[nn.Module]:
    """Four: the first and the last share a weight, the second has none."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return [first, nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), Middle(), last]


def make_run(**settings: Any) -> holdfast.Run:
    """A small run with dropout, clipping and a ragged last batch.

    Takes the settings of a run in short: ``stages``, ``update``, and ``every`` beside ``checkpoint``. ``loop``: it
    is written as a ``Loop``.
    """
    update, every = settings.pop("update", "commit"), settings.pop("every", "auto")
    if update != "eager":
        settings.setdefault("clip_norm", 0.3)
    placed = {name: settings.pop(name) for name in ("stages", "tolerate") if name in settings}
    settings["placement"] = holdfast.Placement(**placed)
    log = settings.pop("log", False)
    if "checkpoint" in settings:
        settings["checkpoint"] = holdfast.Checkpoints(folder=settings["checkpoint"], every=every, log=log)
    settings["numerics"] = holdfast.Numerics(update=update)
    make: Any = AsLoop if settings.pop("loop", False) else holdfast.Run
    settings = {"data": DATA, "layers": make_layers(), **settings}
    made: holdfast.Run = make(
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        global_batch=6,
        micro_batch=2,
        **settings,
    )
    return made


def own_state() -> dict[str, Any]:
    """The script's own values, of every kind that a joiner takes over in another way."""
    net = nn.Linear(1, 1).requires_grad_(False)
    net.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    return {"count": 0, "seen": [], "mean": torch.zeros(2), "net": net}


def change(run: holdfast.Run, value: float) -> None:
    """Change every value of the script's state: whoever does it once too often, or too seldom, has another hash."""
    run.state["count"] += 1
    run.state["seen"].append(value)
    run.state["mean"].mul_(0.5).add_(value)
    run.state["net"].bias.add_(value)


def train(run: holdfast.Run, outcome: Outcome) -> None:
    """Train with an evaluation in the middle, one at the end, and the hash."""
    for step in run.steps(STEPS):
        outcome.losses[step.number] = step.loss
        if step.number == 2:
            outcome.values.append(run.evaluate(DATA))
    outcome.values.append(run.evaluate(DATA))
    outcome.sha256 = run.sha256()


def train_with_state(run: holdfast.Run, outcome: Outcome) -> None:
    """Train in two loops, of which the first is left early; with evaluations in, between and after them."""
    ema = run.ema(0.5) if run.engine.eager is None and run._apart is None else None
    for step in run.steps(STEPS + 2):
        outcome.losses[step.number] = step.loss
        change(run, step.number)
        if step.number == 1:
            break
    change(run, run.evaluate(DATA, weights=ema))
    for step in run.steps(STEPS):
        outcome.losses[step.number] = step.loss
        change(run, step.number)
        if step.number == 2:
            outcome.values.append(run.evaluate(DATA, weights=ema))
    change(run, 0.5)
    outcome.values.append(run.evaluate(DATA))
    outcome.sha256 = run.sha256()


def script(process: Process, *, own: bool = False, **settings: Any) -> None:
    """What every worker runs. ``own``: with a state of the script's own."""
    os.environ["HOLDFAST_WORKER"] = process.name
    run = process.run = make_run(**settings, **({"state": own_state()} if own else {}))
    (train_with_state if own else train)(run, process.outcome)
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
def expected(eager: bool = False, own: bool = False, loop: bool = False) -> Expected:
    torch.set_num_threads(1)
    noted: dict[int, list[int]] = {}

    class Notes:
        def __init__(self, path: Any) -> None: ...

        def write(self, event: str, **fields: Any) -> None:
            if event == "vote":
                noted[fields["step"]] = fields["samples"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Events", Notes)
        patch.setattr(run_process, "runs", [])
        patch.setenv("HOLDFAST_TRACE", "1")
        settings: dict[str, Any] = {"state": own_state()} if own else {}
        run = make_run(stages=1, loop=loop, update="eager" if eager else "commit", **settings)
        outcome = Outcome()
        (train_with_state if own else train)(run, outcome)
        return Expected(losses=outcome.losses, value=outcome.values[-1], sha256=outcome.sha256, samples=noted)


@dataclass(kw_only=True)
class Plan:
    """One history, before it happens: the run, its machines, and which faults strike at which fault point."""

    seed: int
    kind: str
    hosts: list[int]
    settings: dict[str, Any]
    strikes: dict[int, str] = field(default_factory=dict)  # by the number of the fault point, counted over all workers
    minimum_hosts: int | None = None  # machines that the run needs; None: all
    elected: bool = False  # the coordinator is elected through etcd, and may move
    in_rounds: bool = False  # votes are exchanged in rounds, as among many workers
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
    settings["own"] = seed % 2 == 0
    settings["loop"] = kind in ("replicas", "checkpoints", "apart") and seed % 3 == 1
    count = chance.choice([0, 1, 1, 2, 2, 3, 4])
    points = 30 * sum(hosts) * STEPS // 3
    strikes = {chance.randint(1, points): chance.choice(faults) for _ in range(count)}
    minimum = None
    if is_storm(seed):
        minimum, (hosts, strikes) = 1, storm(chance, faults)
    layouts = random_layout if kind == "layouts" else None
    elected = "fail over" in strikes.values() or seed % 3 == 0
    more: dict[str, Any] = {"elected": elected, "in_rounds": seed % 4 == 1, "minimum_hosts": minimum}
    return Plan(seed=seed, kind=kind, hosts=hosts, settings=settings, strikes=strikes, layouts=layouts, **more)


def is_storm(seed: int) -> bool:
    """Whether a history has dozens of faults: few of those of each day, and every second one of a soak."""
    return seed % 50 == 49 or (seed >= DAILY and seed % 2 == 1)


def storm(chance: random.Random, faults: tuple[str, ...]) -> tuple[list[int], dict[int, str]]:
    """Return machines, and many faults, each soon after the one before: often in the middle of a recovery.

    So much is lost that more machines join than else, and the run needs only one of them.
    """
    hosts = [chance.randint(1, 3) for _ in range(chance.randint(1, 4))]
    hosts[0] += sum(hosts) == 1
    gaps = [chance.randint(1, chance.choice([4, 10, 30])) for _ in range(chance.randint(15, 60))]
    drawn = faults + ("join",) * (len(faults) // 7)
    return hosts, {point: chance.choice(drawn) for point in itertools.accumulate(gaps)}


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
        if kind is not None and is_possible(world, process, kind):
            world.log("fault", kind=kind, phase=phase, worker=process.name)
            strike(world, process, kind)

    return fate


lived: list[World] = []  # the last history, for those who want to know what happened in it


def happen(plan: Plan, fate: Fate | None = None, *, work: Callable[..., None] = script) -> World:
    """Live through a history. ``work``: what every worker runs, with the plan's settings."""

    def run(process: Process) -> None:
        work(process, **plan.settings)

    with pytest.MonkeyPatch.context() as patch:
        if plan.in_rounds:
            patch.setattr(talk, "DIRECT", 1)
            patch.setattr(exchanges, "DIRECT_HOLDERS", 1)
        if plan.layouts is not None:
            patch.setattr(arrange, "lay_out", planner_of(plan.layouts))
        made = World(
            plan.seed,
            run,
            fate or fate_of(plan),
            hosts=plan.hosts,
            minimum_hosts=plan.minimum_hosts,
            elected=plan.elected,
            limit=LIMIT + PER_FAULT * len(plan.strikes),
        )
        with inhabited(made) as world:
            try:
                world.live()
            finally:
                injected.update(f"simulated: {event['kind']}" for event in world.of("fault"))
                lived.append(world)
                del lived[:-1]
    return world


# --- what it is judged by --------------------------------------------------------------------------------


def assert_right(plan: Plan, world: World) -> bool:
    """The same bits, each step once, each sample once; returns whether the run came to its end.

    It may end early only if all copies of a layer were lost, and there was no checkpoint.
    """
    said = f"seed {plan.seed}, {plan.kind}: {[(e['kind'], e['phase'], e['worker']) for e in world.of('fault')]}"
    right = expected(plan.kind == "eager", plan.settings.get("own", False), plan.settings.get("loop", False))
    finished = [process for process in world.processes if process.outcome.sha256]
    assert_commits(world, right, said)
    drifts = [error for error in world.errors if isinstance(error, Drift)]
    assert not drifts, f"{said}: replicas differ: {drifts}"
    crashes = [error for error in world.errors if not isinstance(error, HoldfastError)]
    assert not crashes, f"{said}: scripts failed: {crashes}"
    if not finished:
        lost = not plan.has_checkpoints and is_lost(world)
        assert may_end_early(world, plan) or lost, f"{said}: it ended, and need not have"
        return False
    # A machine that was given up for a moment, and comes back when all is over, finds nobody.
    members = world.of("generation")[-1]["workers"]
    alone = [
        e for e in world.errors if "is gone" in str(e) and (world.coordinator.over or e.__notes__[0] not in members)
    ]
    errors = [e for e in world.errors if e not in alone]
    # One that was given up, and is told so by the folder; the others of its generation hear of it.
    errors = [e for e in errors if not isinstance(e, Superseded) and "was taken for lost" not in str(e)]
    assert not errors, f"{said}: {errors}"
    exact = plan.kind != "apart" and not any(e["inexact"] for e in world.of("entered"))
    hashes = {process.outcome.sha256 for process in finished}
    assert hashes == ({right.sha256} if exact else hashes), f"{said}: other bits"
    if not exact:  # replicas that train apart: a worker may end a run that others, who took it for lost, began anew
        given_up = {event["worker"] for event in world.of("failure")}
        finished = [process for process in finished if process.name not in given_up] or finished
    for together in by_run(world, finished):
        assert len({process.outcome.sha256 for process in together}) == 1, f"{said}: replicas differ"
        assert len({process.outcome.values[-1] for process in together}) == 1, f"{said}: evaluations differ"
    for process in finished:
        assert max(process.outcome.losses, default=STEPS - 1) == STEPS - 1, f"{said}: {process.name} ended early"
    if exact:
        for process in finished:
            assert process.outcome.losses.items() <= right.losses.items(), said
            assert process.outcome.values[-1] == right.value, said
        assert_samples(world, right, said)
    return True


def by_run(world: World, finished: list[Process]) -> Iterable[list[Process]]:
    """The finished workers by the start of the run that they were in.

    Without etcd, a coordinator that is new, and cannot reach those who train, begins the run once more.
    """
    formed: dict[int, int] = {}  # by number: the newest generation's place; numbers may come twice
    begun: dict[str, int] = {}  # by worker: the generation with which its run began
    run = 0
    for place, event in enumerate(world.events):
        if event["event"] == "generation":
            formed[event["number"]] = place
        elif event["event"] == "entered":
            run = run if event["operation"] else formed[event["generation"]]
            begun[event["worker"]] = run
    runs: dict[int, list[Process]] = defaultdict(list)
    for process in finished:
        runs[begun[process.name]].append(process)
    return runs.values()


def may_end_early(world: World, plan: Plan) -> bool:
    """Whether a run that nobody finished did not have to be finished, apart from lost layers."""
    stops = world.of("stop")
    if any("hosts for" in event["message"] for event in stops):  # it waited for a machine in vain
        return any(agent.leaving or agent.code == -9 for agent in world.agents)
    if any("asked to leave" in event["message"] for event in stops):
        # But for machines that are lost or kept out, and joiners that the newest coordinator had not heard of.
        formed = max(place for place, event in enumerate(world.events) if event["event"] == "generation")
        members = {machine_of(worker) for worker in world.events[formed]["workers"]}
        members -= {event["host"] for event in world.of("partition")}
        members -= {event["host"] for event in world.events[formed:] if event["event"] == "host-gone"}
        return all(agent.leaving or agent.code == -9 for agent in world.agents if agent.host in members)
    if any(event["code"] == Superseded.exit_code for event in stops) and not plan.elected:
        # Without etcd, a head that begins anew does not hear of a machine that sleeps. The folder tells it in words
        # that somebody trains on there, as far as anybody knows.
        return any(agent.code is None and not agent.is_connected for agent in world.agents)
    # A machine without a connection to the coordinator cannot be known to be there.
    came = [a for a in world.agents if a.host is not None and (a.is_connected or a.code is not None)]
    # One that was silent when the last of the others left as asked finds no coordinator any more. (With etcd it would
    # be elected itself; this world's role ends with the last agent that is known.)
    known = {event["host"]: event["event"] for event in world.events if event["event"] in ("host", "host-gone")}
    left = [agent for agent in came if agent.leaving]
    came = left + [agent for agent in came if not (left and known.get(agent.host) == "host-gone")]
    return all(agent.leaving or agent.code in (0, -9) for agent in came)


def assert_commits(world: World, right: Expected, said: str) -> None:
    """Every worker commits one step after the other, none twice."""
    steps: dict[tuple[str, int], list[int]] = defaultdict(list)
    lives: dict[str, int] = defaultdict(int)  # an agent that was started anew gives its workers the same names again
    for event in world.events:
        if event["event"] == "exit-of":
            lives[event["worker"]] += 1
        elif event["event"] == "commit":
            steps[event["worker"], lives[event["worker"]]].append(event["step"])
    for (worker, _), committed in steps.items():
        assert committed == list(range(committed[0], committed[0] + len(committed))), f"{said}: {worker} {committed}"


def assert_samples(world: World, right: Expected, said: str) -> None:
    """The generation that voted last for a step has used each of its samples once."""
    votes: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    formed: dict[int, int] = {}  # a number may come twice: its first generation was that of a head that was lost whole
    for place, event in enumerate(world.events):
        if event["event"] == "generation":
            formed[event["number"]] = place
        elif event["event"] == "vote":
            votes[event["step"]][formed[event["generation"]]] += event["samples"]
    for step, by_generation in votes.items():
        used = by_generation[max(by_generation)]
        assert sorted(used) == sorted(right.samples[step]), f"{said}: step {step} used {used}"


def holders_in(world: World, generation: int) -> dict[int, set[str]]:
    """The workers that got each layer in a generation. One that broke while it formed may lack some."""
    holders: dict[int, set[str]] = defaultdict(set)
    for event in world.of("layout"):
        if event["generation"] == generation and "first" in event:
            for layer in range(event["first"], event["stop"]):
                holders[layer].add(event["worker"])
    return holders


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
        return unsure and {*(world.of("generation") or [{"workers": ()}])[-1]["workers"]} <= gone
    number, layers = max(committed), max(event["stop"] for event in world.of("layout") if "stop" in event)
    while number and len(holders := holders_in(world, number)) < layers:
        number -= 1  # some rolled a step of an older generation forward, in which they have their layers
    return any(workers <= gone for workers in holders.values())
