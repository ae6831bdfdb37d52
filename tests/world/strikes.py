"""Faults of the world, by name: whether one can strike now, and what it does."""

from __future__ import annotations

from collections.abc import Callable

from tests.world.world import Process, World

FAULTS = (
    "kill",
    "kill another",
    "kill two",
    "hang",
    "doze",
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
    "fail over",
    "deadlock",
    "flood",
    "clock",
)
NEEDS_OTHERS = frozenset({"kill another", "kill two", "hang", "deadlock", "pause"})  # workers
NEEDS_MACHINES = frozenset({"machine", "leave", "separate", "isolate", "head", "fail over"})
NEEDS_COORDINATOR = frozenset({"crash", "sleep", "head", "fail over"})


def is_possible(world: World, process: Process, kind: str) -> bool:
    """Whether a fault would change anything now; one that would not is not counted."""
    if kind in NEEDS_OTHERS and not any(each is not process for each in world.alive):
        return False
    there = sum(agent.code is None and agent.host is not None for agent in world.agents)
    if kind in NEEDS_MACHINES and there < 2:
        return False
    if kind in NEEDS_COORDINATOR and not world.coordinator.is_awake:
        return False
    return kind != "cut" or world.can_cut


def strike(world: World, process: Process, kind: str) -> None:
    chance = world.scheduler.chance
    others = [each for each in world.alive if each is not process]
    if kind in ("kill another", "kill two", "hang", "deadlock") and others:
        other = chance.choice(others)
        {"hang": world.freeze, "deadlock": world.deadlock}.get(kind, Process.kill)(other)
    if kind in ("kill", "kill two"):
        process.kill()
    elif kind == "pause" and others:
        world.pause(chance.choice(others), chance.uniform(0.5, 12.0))
    elif kind in ("separate", "isolate"):
        cut_network(world, kind)
    elif kind == "head":
        (world.fail_over if world.elected else world.restart_head)(chance.uniform(0.05, 8.0))
    elif kind == "leave":
        staying = [agent for agent in world.agents if not agent.is_over]
        if len(staying) > 1:
            chance.choice(staying).leave()
    elif kind in OTHERS:
        OTHERS[kind](world)


def _machine(world: World) -> None:
    there = [agent for agent in world.agents if agent.code is None]
    if len(there) > 1:
        world.scheduler.chance.choice(there).vanish()


def _flood(world: World) -> None:
    world.coordinator.flooded_until = world.scheduler.now + world.scheduler.chance.uniform(1.0, 20.0)
    _drop_lines(world)


def _drop_lines(world: World) -> None:
    world.scheduler.chance.choice([agent for agent in world.agents if agent.code is None]).drop_lines()


def _doze(world: World) -> None:
    chance = world.scheduler.chance
    chance.choice([agent for agent in world.agents if agent.code is None]).sleep(chance.uniform(0.2, 12.0))


def _slow(world: World) -> None:
    world.slow_until = world.scheduler.now + 1.0


def _clock(world: World) -> None:
    world.scheduler.set_by = world.scheduler.chance.uniform(-1e9, 1e9)


OTHERS: dict[str, Callable[[World], None]] = {
    "lines": _drop_lines,
    "sleep": lambda world: world.coordinator.sleep(world.scheduler.chance.uniform(0.5, 20.0)),
    "machine": _machine,
    "fail over": lambda world: world.fail_over(world.scheduler.chance.uniform(0.05, 3.0)),
    "flood": _flood,
    "clock": _clock,
    "doze": _doze,
    "cut": World.cut,
    "crash": lambda world: world.coordinator.crash(world.scheduler.chance.uniform(0.05, 3.0)),
    "slow": _slow,
    "join": lambda world: world.join(world.scheduler.chance.randint(1, 2)),
    "join one": lambda world: world.join(1),
}


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
