"""Runs scripts on a real agent, coordinator and workers, from a zygote shared by all tests."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.cluster.agent import Agent, AgentSettings
from holdfast.cluster.events import read_events
from holdfast.cluster.local import start_zygote

TRAIN = Path(__file__).parent / "faults" / "train.py"
_zygote: list[Any] = []


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
    seconds: float = 60.0,
    **settings: Any,
) -> Result:
    """One run on this machine, to its end. ``meddle`` may disturb it from outside."""
    if not _zygote:
        _zygote.append(start_zygote())
    said: list[str] = []
    results = folder / "results.jsonl"
    defaults = {"heartbeat_timeout": 1.0, "log_dir": folder / "logs"}
    chosen = AgentSettings(
        command=[str(script), *(arguments or [])],
        workers=workers,
        environment={
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_FAULTS": faults,
            "HOLDFAST_TRACE": "1",
            "RESULTS": str(results),
            **(environment or {}),
        },
        **{**defaults, **settings},
    )

    async def run() -> int:
        agent = Agent(chosen, zygote=_zygote[0], say=said.append)
        job = asyncio.create_task(agent.run())
        if meddle is not None:
            await asyncio.wait_for(asyncio.gather(job, meddle(agent)), seconds)
        return await asyncio.wait_for(job, seconds)

    code = asyncio.run(run())
    lines = results.read_text().splitlines() if results.exists() else []
    events = list(read_events(chosen.log_dir / "events.jsonl"))
    return Result(code=code, events=events, said=said, results=[json.loads(line) for line in lines])


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError("it never happened")


def count_events(agent: Agent, event: str, **fields: Any) -> int:
    path = agent.settings.log_dir / "events.jsonl"
    return sum(e["event"] == event and all(e.get(k) == v for k, v in fields.items()) for e in read_events(path))
