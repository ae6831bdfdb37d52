"""Aimed histories: what happens to which worker in which phase is chosen by a test, not by a seed."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from holdfast.plan.layout import Layout, side_by_side
from tests.engine.pipelines import lay
from tests.world.history import LAYERS, Fate, Layouts, Plan, assert_right, happen
from tests.world.strikes import strike
from tests.world.world import Process, World

DEAF = 1.0  # simulated seconds: longer than any attempt takes, so all have voted by then, and shorter than a heartbeat

# (worker, phase, which time it is there[, what happens]); a kill, unless something else is said.
# "unlucky", in a vote: the others hear this worker, and it hears nobody. "rash": it also gives up at once.
# "kill 0.2": another one is killed; else a word of ``history.FAULTS``.
Strike = tuple[str, str, int] | tuple[str, str, int, str]


def aim(*strikes: Strike) -> Fate:
    """The fate that strikes as it is listed, and notes a ``fault`` each time."""
    planned = {strike[:3]: strike[3] if len(strike) > 3 else "kill" for strike in strikes}
    seen: Counter[tuple[str, str]] = Counter()

    def fate(world: World, process: Process, phase: str) -> None:
        seen[process.name, phase] += 1
        kind = planned.get((process.name, phase, seen[process.name, phase]))
        if kind is None:
            return
        world.log("fault", kind=kind, phase=phase, worker=process.name)
        if kind in ("unlucky", "rash"):
            world.deafen(process, DEAF if kind == "unlucky" else 0.0)
        elif kind.startswith("kill 0."):
            next(other for other in world.alive if other.name == kind.split()[1]).kill()
        else:
            strike(world, process, kind)

    return fate


def votes(workers: str, nth: int, how: str = "unlucky") -> list[Strike]:
    """The nth vote fails for these workers, given by their numbers on the first machine."""
    return [(f"0.{number}", "vote", nth, how) for number in workers]


class History:
    """One aimed history: its plan, its world once it is over, and whether it came to its end."""

    def __init__(
        self,
        *strikes: Strike,
        workers: int | list[int] = 4,
        layouts: Layouts | None = None,
        kind: str = "aimed",
        seed: int = 0,
        minimum_hosts: int | None = None,
        fate: Fate | None = None,
        elected: bool = False,
        in_rounds: bool = False,
        **settings: Any,
    ) -> None:
        hosts = workers if isinstance(workers, list) else [workers]
        settings.setdefault("stages", 1)
        self.plan = Plan(
            seed=seed,
            kind=kind,
            hosts=hosts,
            settings=settings,
            layouts=layouts,
            minimum_hosts=minimum_hosts,
            elected=elected,
            in_rounds=in_rounds,
        )
        self.world = happen(self.plan, fate or aim(*strikes))

    def judge(self) -> bool:
        """Whether it came to its end; all that ``assert_right`` asks for holds."""
        return assert_right(self.plan, self.world)

    def of(self, event: str) -> list[dict[str, Any]]:
        return self.world.of(event)

    @property
    def struck(self) -> int:
        """How many of the strikes came to pass."""
        return len(self.of("fault"))

    @property
    def finished(self) -> set[str]:
        """Names of the workers whose scripts came to their ends."""
        return {process.name for process in self.world.processes if process.outcome.sha256}

    @property
    def members(self) -> list[list[str]]:
        """The workers of each generation that began to form."""
        return [self.world.generations[number].workers for number in sorted(self.world.generations)]


# --- layouts -----------------------------------------------------------------------------------------------


def side(size: int, seed: str) -> Layout:
    """Everybody holds everything."""
    return side_by_side(LAYERS, size)


def spread_out(size: int, seed: str) -> Layout:
    """Two pipelines where there are workers for them; which workers they are made of changes with what is held."""
    workers = random.Random(seed).sample(range(size), size)
    if size < 4:
        return lay(*[([worker], [LAYERS]) for worker in workers[:2]], size=size)
    return lay((workers[:2], [2, 2]), (workers[2:4], [3, 1]), size=size)


def one_pipeline(size: int, seed: str) -> Layout:
    """The first worker has the first layers, the second one the others, and more have nothing to do."""
    return lay(([0, 1], [2, 2]), size=size) if size > 1 else lay(([0], [LAYERS]))


def in_a_row(size: int, seed: str) -> Layout:
    """One copy of each layer, cut into as many stages as there are workers."""
    counts = {1: [4], 2: [2, 2], 3: [1, 2, 1]}.get(size, [1] * LAYERS)
    return lay((range(len(counts)), counts), size=size)
