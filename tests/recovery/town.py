"""Workers as threads, with the real cohort, arranger and engine; the coordinator and the wires are made up.

Any of them may be killed at any point that has a name, a vote may fail for some and succeed for others, workers
join and leave; layouts are drawn at random for each generation. Nothing here sleeps, and what happens to whom
depends on a seed; only who is quicker does not.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.cluster import compose
from holdfast.cluster.events import Events
from holdfast.cluster.membership import Generation, Member, Standing, worker_order
from holdfast.commit import settle
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import End
from holdfast.engine.progress import Progress
from holdfast.engine.state import State
from holdfast.engine.step import TrainingStep
from holdfast.plan.layout import Layout
from holdfast.recovery.arrange import Arranger, Wishes
from tests.engine.memory_group import PATIENCE
from tests.engine.pipelines import CPU, Job, Result, lay, same_bits, state_of
from tests.recovery.wires import TownGroup, Wires

Fate = Callable[[str, str, int], bool]  # (worker, point, how often it was there) → whether it strikes


class Killed(BaseException):
    """SIGKILL: nothing but cleaning up after the test may catch it."""


class Sent(BaseException):
    """The coordinator sends a worker away: it left as asked, or the run cannot go on."""


@dataclass
class Town:
    """The coordinator. ``fate`` decides who is struck where; ``target`` workers are wanted."""

    job: Job
    fate: Fate
    target: int
    layouts: Callable[[int, str], Layout]
    generation: Generation | None = None
    generations: list[Generation] = field(default_factory=list)
    over: str | None = None  # why the run cannot go on
    finishing: bool = False  # somebody's script is over: all have committed the last step
    asked: set[str] = field(default_factory=set)  # to leave
    trained: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._standings: dict[str, Standing] = {}
        self._alive: set[str] = set()
        self._callbacks: dict[str, Callable[[int], None]] = {}
        self._dismissed: set[str] = set()
        self._wires: dict[int, Wires] = {}
        self._local = threading.local()
        self._born = 0

    # --- as the coordinator does -----------------------------------------------------------------

    def start(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                name = f"0.{self._born}"
                self._born += 1
                self._alive.add(name)
                self._threads.append(threading.Thread(target=self._live, args=(name,), name=name))
                self._threads[-1].start()

    def let_in(self, count: int) -> None:
        """More workers, which are ready by the time this returns."""
        self.target += count
        self.start(count)
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.waiting()) == count, PATIENCE)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE * 2)
            assert not thread.is_alive(), f"{thread.name} hangs"
        for error in self.errors:
            raise error

    @property
    def members(self) -> list[str]:
        return [] if self.generation is None else self.generation.workers

    def waiting(self) -> list[str]:
        return [w for w in self._standings if w not in self.members and w in self._alive]

    def regroup(self, worker: str, standing: Standing) -> Generation:
        with self._changed:
            self._standings[worker] = standing
            before = self.generation
            if standing.broken and before is not None:
                self._end(before.number)
            self._advance()
            while self.over is None and worker not in self._dismissed:
                if self.finishing and worker not in self.members:
                    raise Sent("the run is finished")
                now = self.generation
                if now is not None and worker in now.workers and worker not in self._standings:
                    return now
                assert self._changed.wait(PATIENCE), f"{worker} waits for ever"
            raise Sent(self.over or "left as asked")

    def lost(self, worker: str) -> None:
        with self._changed:
            self._alive.discard(worker)
            self._standings.pop(worker, None)
            if worker in self.members and self.generation is not None:
                self._end(self.generation.number)
            self._advance()

    def left(self, worker: str) -> None:
        """Its script is over; the others go on with theirs."""
        with self._changed:
            self.finishing = True
            self._alive.discard(worker)
            self._advance()

    def _end(self, number: int) -> None:
        """As the client hears it, in a thread of its own."""
        for worker in self.members:
            if worker in self._callbacks and worker not in self._standings:
                self._callbacks[worker](number)

    def _advance(self) -> None:
        self._changed.notify_all()
        if self.over is not None:
            return
        if self.generation is None:
            if self._standings and self._standings.keys() >= self._alive:  # one may have been lost already
                self._announce(sorted(self._standings, key=worker_order))
            return
        present = [w for w in self.members if w in self._alive]
        standings = {w: self._standings[w] for w in present if w in self._standings}
        if len(standings) < len(present):
            return
        if not standings:
            self.over = None if self.finishing else "nobody is left"
            return
        had_state = any(member.standing.operation for g in self.generations for member in g.members)
        judgement = settle.judge(standings, trained=had_state)
        if not judgement.goes_on and not self.finishing:
            self.over = "a part of the state is lost"
            return
        if self.finishing and not judgement.whole:  # all had voted for the end: the run is over
            self._dismissed |= {*standings}
            return
        waiting = [] if self.finishing else self.waiting()
        made = compose.compose(standings=standings, waiting=waiting, target=self.target, judge=settle.judge)
        self._dismissed |= {*made.dismissed}
        self._alive -= {*made.dismissed}
        for worker in made.dismissed:
            self._standings.pop(worker)
        if made.members:
            self._announce(made.members)

    def _announce(self, names: Sequence[str]) -> None:
        number = 1 if self.generation is None else self.generation.number + 1
        members = tuple(Member(worker=w, address="", standing=self._standings.pop(w)) for w in names)
        self.generation = Generation(number=number, members=members)
        self.generations.append(self.generation)
        self._wires[number] = Wires(len(members))

    # --- as a worker's process does --------------------------------------------------------------

    def strikes(self, point: str) -> bool:
        seen: Counter[str] = self._local.seen
        seen[point] += 1
        return self.fate(self._local.worker, point, seen[point])

    def point(self, phase: str) -> None:
        if hasattr(self._local, "worker") and self.strikes(phase):
            raise Killed(phase)

    def form(self, generation: Generation, worker: str, store: Any, device: torch.device) -> TownGroup:
        return TownGroup(generation.rank_of(worker), self._wires[generation.number], generation, self.strikes)

    def lay_out(self, *, workers: Sequence[str], held: Any, **rest: Any) -> Layout:
        """Any layout will do: pure, and another one for each generation. By then all know where the run is."""
        self.point("layout")
        return self.layouts(len(workers), repr((list(workers), sorted((w, sorted(h)) for w, h in held.items()))))

    def _live(self, name: str) -> None:
        self._local.worker, self._local.seen = name, Counter()
        engine = self.job.engine()
        try:
            self._script(name, engine)
            self.trained[name] = state_of(engine)
            self.left(name)
        except (Killed, Sent):
            self.lost(name)
        except BaseException as e:
            self.errors.append(e)
            self.over = self.over or f"{name} failed"
            self.lost(name)
        finally:
            engine.drop()

    def _script(self, name: str, engine: Any) -> None:
        progress = Progress()
        state = State(engine.model, engine.update, progress, holdings=engine.holdings)
        events = Events(None)
        arranger = Arranger(engine, state, events, Wishes(stages=1), None)
        cohort = Cohort(Voice(name, self), arranger, CPU, events, connect=self.form)
        cohort.boundary()
        while progress.step < self.job.steps:
            number = progress.step
            cohort.commit(TrainingStep(engine, progress))
            self.after_step(name, number)
            cohort.boundary()
        cohort.commit(End())

    def after_step(self, worker: str, step: int) -> None:
        """For tests that let workers come and go."""


@dataclass
class Voice:
    """Membership, as a worker sees it."""

    worker: str
    town: Town

    def regroup(self, standing: Standing) -> Generation:
        return self.town.regroup(self.worker, standing)

    def store(self, generation: Generation) -> Any:
        return None

    def on_break(self, callback: Callable[[int], None]) -> None:
        self.town._callbacks[self.worker] = callback

    def wishes(self) -> tuple[bool, bool]:
        town = self.town
        with town._changed:
            return bool(town.waiting()) and len(town.members) < town.target, self.worker in town.asked

    def doing(self, operation: int, kind: str) -> None: ...

    def formed(self) -> None: ...

    def progressed(self, generation: Generation, operation: int) -> None: ...

    def finished(self) -> None: ...


def random_layout(layers: int, size: int, seed: str) -> Layout:
    """Pipelines of any depth, cut anywhere, on workers in any order; some may have nothing to do."""
    chance = random.Random(seed)
    workers = list(range(size))
    chance.shuffle(workers)
    lines: list[tuple[list[int], list[int]]] = []
    while workers and (not lines or chance.random() < 0.8):
        depth = chance.randint(1, min(len(workers), layers, 3))
        cuts = sorted(chance.sample(range(1, layers), depth - 1))
        counts = [stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True)]
        lines.append(([workers.pop() for _ in range(depth)], counts))
    return lay(*lines, size=size)


def assert_trained(town: Town, expected: Result) -> None:
    """Whoever is left has the bits of one worker, and together they have everything."""
    assert town.over is None, town.over
    found: set[str] = set()
    for worker, tensors in town.trained.items():
        wrong = [name for name, tensor in tensors.items() if not same_bits(tensor, expected.tensors[name])]
        assert not wrong, f"{worker}: {wrong}"
        found |= tensors.keys()
    if town.trained.keys() >= {*town.generations[-1].workers}:  # else one was killed when all was done
        assert found == expected.tensors.keys()
