"""Runs scripts on a real agent, coordinator and workers, from a zygote shared by all tests."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.cluster import zygote_keeper
from holdfast.cluster.agent import Agent
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.events import read_events
from holdfast.cluster.local import LocalWorker
from holdfast.measuring import free_port
from tests import warm
from tests.injected import note_planned

TRAIN = Path(__file__).parent / "faults" / "train.py"
HEARTBEAT = 3.0  # seconds: a worker that waits for its turn on a busy machine is not lost
START_FRESH_ZYGOTE = zygote_keeper.start_zygote  # an interpreter of its own, that still has to import torch
_zygote: list[Any] = []
_preloaded: dict[tuple[str, ...], Any] = {}  # zygotes that have imported more than torch
warm.use_nursery()


@dataclass(kw_only=True)
class Result:
    """What a run left behind."""

    code: int
    events: list[dict[str, Any]]
    said: list[str]
    results: list[dict[str, Any]] = field(default_factory=list)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    @property
    def sha256(self) -> str:
        """The hash that every finishing worker agrees on."""
        hashes = {r["sha256"] for r in self.results}
        assert len(hashes) == 1, f"workers disagree or none finished: {hashes}, code {self.code}"
        return hashes.pop()

    @property
    def losses(self) -> list[float]:
        """The loss of each step; every worker must have reported the same."""
        found: dict[int, set[float]] = defaultdict(set)
        for event in self.of("commit"):
            found[event["step"]].add(event["loss"])
        assert all(len(values) == 1 for values in found.values()), found
        return [found[step].pop() for step in sorted(found)]


def _complain(text: str) -> None:
    """Show the error that ends a run on stderr, as ``holdfast run`` does."""
    print(text, file=sys.stderr, flush=True)


def assert_every_worker_commits_each_step_once(result: Result) -> None:
    """No worker skips or repeats a step between its first and its last."""
    steps = defaultdict(list)
    for event in result.of("commit"):
        steps[event["worker"]].append(event["step"])
    for worker, numbers in steps.items():
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"worker {worker}: {numbers}"


def samples_of_steps(result: Result) -> dict[int, list[int]]:
    """The samples that went into each committed step: those of its last, successful vote."""
    votes: dict[tuple[int, int], list[int]] = defaultdict(list)
    last: dict[int, int] = {}
    for event in result.of("vote"):
        votes[event["step"], event["generation"]] += event["samples"]
        last[event["step"]] = max(event["generation"], last.get(event["step"], 0))
    return {step: votes[step, generation] for step, generation in sorted(last.items())}


def assert_each_sample_once_per_epoch(result: Result, *, size: int, steps_per_epoch: int) -> None:
    used = samples_of_steps(result)
    for epoch in range(len(used) // steps_per_epoch):
        first = epoch * steps_per_epoch
        samples = [s for step in range(first, first + steps_per_epoch) for s in used[step]]
        assert sorted(samples) == list(range(size)), f"epoch {epoch}: {sorted(samples)}"


Meddler = Callable[[Agent], Awaitable[None]]


def launch(
    folder: Path,
    *,
    script: Path = TRAIN,
    arguments: list[str] | None = None,
    workers: int = 3,
    faults: str = "",
    environment: dict[str, str] | None = None,
    meddle: Meddler | None = None,
    seconds: float = 200.0,
    said: list[str] | None = None,
    **settings: Any,
) -> Result:
    """One run on this machine, to its end. ``meddle`` may disturb it from outside; ``said`` gets the agent's lines.

    After ``seconds`` it is given up as hung: much longer than any run takes, also on a busy machine.
    """
    said = [] if said is None else said
    defaults = {"heartbeat_timeout": HEARTBEAT, "log_dir": folder / "logs"}
    chosen = AgentSettings(
        command=[str(script), *(arguments or [])],
        workers=workers,
        environment=_environment(folder, faults, environment or {}),
        **{**defaults, **settings},
    )

    async def run() -> int:
        zygote = _zygote_with(chosen.preload) if chosen.preload else _zygote_number(0)
        agent = Agent(chosen, zygote=zygote, say=said.append, complain=_complain)
        job = asyncio.create_task(agent.run())
        if meddle is not None:
            await asyncio.wait_for(asyncio.gather(job, meddle(agent)), seconds)
        return await asyncio.wait_for(job, seconds)

    result = _result(folder, asyncio.run(run()), chosen.log_dir, said)
    note_planned(faults, result.events)
    return result


def _environment(folder: Path, faults: str, more: dict[str, str]) -> dict[str, str]:
    settings = {"OMP_NUM_THREADS": "1", "HOLDFAST_FAULTS": faults, "HOLDFAST_TRACE": "1"}
    return {**settings, "RESULTS": str(folder / "results.jsonl"), "HURRY": str(folder / "hurry"), **more}


def hurry(agent: Agent) -> None:
    """All that was to be seen was seen: from now on the scripts' steps are as fast as they can be."""
    (agent.settings.log_dir.parent / "hurry").touch()


def _zygote_number(number: int) -> Any:
    """Kept from test to test. Each host of a run has one of its own."""
    while len(_zygote) <= number:
        _zygote.append(warm.start_zygote())
    return _zygote[number]


def _zygote_with(preload: tuple[str, ...]) -> Any:
    """Kept from test to test, with these modules imported: some take seconds, which each worker would need again."""
    if preload not in _preloaded:
        _preloaded[preload] = warm.start_zygote(preload)
    return _preloaded[preload]


def end_zygotes() -> None:
    """At the end of the session: they end when nobody holds their sockets."""
    while _zygote:
        _zygote.pop().close()
    while _preloaded:
        _preloaded.popitem()[1].close()


@contextmanager
def doomed_zygote(*, importing: bool = False) -> Iterator[None]:
    """The zygotes of the other tests are kept away; runs get a new one, which they may kill, or does not listen yet.

    A new one: it tells its pid to the first run alone, and without it none can kill a zygote that hangs.
    """
    kept, _zygote[:] = _zygote[:], [START_FRESH_ZYGOTE() if importing else warm.start_zygote()]
    try:
        yield
    finally:
        _zygote[:] = kept


def _result(folder: Path, code: int, log_dir: Path, said: list[str]) -> Result:
    results = folder / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    events = list(read_events(log_dir / "events.jsonl"))
    return Result(code=code, events=events, said=said, results=[json.loads(line) for line in lines])


class Hosts:
    """Several agents in one process: each is a host that may come, be asked to leave, or lose its workers."""

    def __init__(self, folder: Path, said: list[str], environment: dict[str, str], settings: dict[str, Any]) -> None:
        self.agents: list[Agent] = []
        self.jobs: list[asyncio.Task[int]] = []
        self.log_dir = folder / "logs"
        self._zygotes: list[int] = []
        self.said = said
        self._settings = {"environment": environment, "log_dir": self.log_dir, **settings}

    def start(self, workers: int) -> None:
        """One more host. The first one has the coordinator."""
        settings = AgentSettings(workers=workers, **self._settings)
        busy = {zygote for zygote, job in zip(self._zygotes, self.jobs, strict=True) if not job.done()}
        self._zygotes.append(next(number for number in range(len(busy) + 1) if number not in busy))
        self.agents.append(
            Agent(settings, zygote=_zygote_number(self._zygotes[-1]), say=self.said.append, complain=_complain)
        )
        self.jobs.append(asyncio.create_task(self.agents[-1].run()))

    def leave(self, number: int) -> None:
        """As a preemption notice to that host."""
        self.agents[number]._asked_to_stop(signal.SIGTERM)

    @property
    def workers(self) -> dict[str, LocalWorker]:
        return {name: worker for agent in self.agents for name, worker in agent.workers.items()}

    def events(self) -> list[dict[str, Any]]:
        path = self.log_dir / "events.jsonl"
        return list(read_events(path)) if path.exists() else []


def launch_hosts(
    folder: Path,
    *,
    script: Path,
    workers: list[int],
    meddle: Callable[[Hosts], Awaitable[None]],
    environment: dict[str, str],
    faults: str = "",
    seconds: float = 200.0,
    **settings: Any,
) -> Result:
    """One run on several hosts, to its end; the code is that of the first host."""
    said: list[str] = []
    given: dict[str, Any] = {"command": [str(script)], "token": "secret", "endpoint": f"127.0.0.1:{free_port()}"}
    given |= {"minimum_hosts": len(workers), "maximum_hosts": 99, **settings}

    async def run() -> int:
        hosts = Hosts(folder, said, _environment(folder, faults, environment), given)
        for number in workers:
            hosts.start(number)
        await asyncio.wait_for(asyncio.gather(hosts.jobs[0], meddle(hosts)), seconds)
        await asyncio.wait_for(asyncio.gather(*hosts.jobs), seconds)
        return hosts.jobs[0].result()

    result = _result(folder, asyncio.run(run()), folder / "logs", said)
    note_planned(faults, result.events)
    return result


def collect(folder: Path) -> Result:
    """What several agents have left behind so far, each in a folder of its own below this one."""
    events = [e for path in sorted(folder.glob("*/logs/events.jsonl")) for e in read_events(path)]
    events.sort(key=lambda e: e["t"])
    results = folder / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    return Result(code=0, events=events, said=[], results=[json.loads(line) for line in lines])


def wait_until(what: str, condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Returns when the condition holds; the seconds are those after which a test is broken, not slow."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it never came: {what}"
        time.sleep(0.02)


async def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """As ``wait_until``, among other tasks."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it never happened")
        await asyncio.sleep(0.005)


def count_events(agent: Agent, event: str, **fields: Any) -> int:
    path = agent.settings.log_dir / "events.jsonl"
    return sum(e["event"] == event and all(e.get(k) == v for k, v in fields.items()) for e in read_events(path))
