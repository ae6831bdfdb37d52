"""Runs that read a stream, with workers killed all the time: the same bits, and no sample is lost or used twice."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.data.audit import Findings, Violation, audit, read_ledgers
from holdfast.data.ledger import Ledger
from holdfast.data.stream_feed import StreamFeed
from holdfast.recovery import arrange
from tests.faults.judge import covered
from tests.world.history import Layouts, make_run, planner_of, random_layout
from tests.world.world import Process, World, inhabited

SHARDS = [5, 0, 9, 4, 7]  # samples of each
Strike = Callable[[World, Process, str], bool]  # whether a worker is killed at a fault point


def samples_of(shard: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draws from its own generator, and adds what depends on the micro-batch that a sample is for."""
    numbers = torch.randn(SHARDS[shard], 4, generator=torch.Generator().manual_seed(shard))
    for x in numbers:
        yield x + 0.01 * torch.rand(1), x


class Stateful:
    """A shard that keeps its position in a state."""

    def __init__(self, shard: int) -> None:
        self._samples, self._at = list(torch.randn(SHARDS[shard], 4, generator=torch.Generator().manual_seed(shard))), 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self._at < len(self._samples):
            self._at += 1
            yield self._samples[self._at - 1] + 0.01 * torch.rand(1), self._samples[self._at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self._at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = int(state["at"])


def stream(
    epochs: int | None = None, *, shards: int = 5, shuffle: bool = False, state: bool = False
) -> holdfast.Stream:
    source: Any = Stateful if state else samples_of
    return holdfast.Stream(source, shards=list(range(shards)), epochs=epochs, shuffle=shuffle)


ALONE = "shuffled, with states"  # has micro-batches of one sample, which BatchNorm refuses: without it
CASES = {
    "for ever": lambda: stream(),
    "two epochs": lambda: stream(2),
    "fewer shards than micro-batches": lambda: stream(8, shards=1, state=True),
    ALONE: lambda: stream(3, shuffle=True, state=True),
}


def train(case: str, steps: int | None, process: Process | None = None, **settings: Any) -> tuple[list[float], str]:
    if case == ALONE:
        torch.manual_seed(0)
        settings["layers"] = [nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4)]
    run = make_run(data=CASES[case](), **settings)
    if process is not None:
        process.run = run
    losses = [step.loss for step in run.steps(steps)]
    return losses, run.sha256()


@cache
def expected(case: str, steps: int | None) -> tuple[list[float], str]:
    torch.set_num_threads(1)
    return train(case, steps, stages=1)


def happen(
    case: str,
    folder: Path,
    *,
    steps: int | None,
    seed: int = 0,
    kills: float = 0.0,
    hosts: tuple[int, ...] = (3,),
    layouts: Layouts | None = None,
    every: int = 3,
    strike: Strike = lambda world, process, phase: False,
) -> World:
    """One history, in which each fault point kills its worker with this chance, and where ``strike`` says so."""
    chance = random.Random(seed)

    def fate(world: World, process: Process, phase: str) -> None:
        if chance.random() < kills or strike(world, process, phase):
            world.log("fault", kind="kill", phase=phase, worker=process.name)
            process.kill()

    def script(process: Process) -> None:
        os.environ["HOLDFAST_WORKER"] = process.name
        losses, process.outcome.sha256 = train(case, steps, process, checkpoint=folder, every=every, stages=1)
        process.outcome.losses = dict(enumerate(losses))
        assert process.run is not None
        process.run.finish()
        process.run.leave()
        process.client.bye()

    with pytest.MonkeyPatch.context() as patch:
        if layouts is not None:
            patch.setattr(arrange, "lay_out", planner_of(layouts))
        with inhabited(World(seed, script, fate, hosts=list(hosts))) as world:
            world.live()
    assert not world.errors, world.errors
    return world


def judge(world: World, case: str, folder: Path, steps: int | None) -> Findings:
    losses, sha256 = expected(case, steps)
    finished = [process.outcome for process in world.processes if process.outcome.sha256]
    assert finished
    assert {outcome.sha256 for outcome in finished} == {sha256}
    for event in world.of("commit"):
        assert event["loss"] == losses[event["step"]]
    found = audit(read_ledgers([folder]))
    assert found.steps == len(losses)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", [3, *(covered("three are more than one, too", number) for number in (1, 2, 4))])
def test_the_number_of_workers_does_not_matter(tmp_path: Path, case: str, workers: int) -> None:
    steps = 9 if case == "for ever" else None
    world = happen(case, tmp_path, steps=steps, hosts=(workers,))
    assert judge(world, case, tmp_path, steps).lost == 0


@pytest.mark.parametrize("case", CASES)
def test_kills_at_any_point(tmp_path: Path, case: str) -> None:
    steps, lost = 9 if case == "for ever" else None, 0
    for seed in range(4):
        folder = tmp_path / str(seed)
        layouts = random_layout if seed % 2 else None
        world = happen(case, folder, steps=steps, seed=seed, kills=0.006, layouts=layouts)
        judge(world, case, folder, steps)
        lost += len(world.of("fault"))
    assert lost > 3


@pytest.mark.parametrize(("kills", "steps"), [(25, 18), covered("25 kills are many, too", 100, 60)])
def test_many_kills_in_one_run(tmp_path: Path, kills: int, steps: int) -> None:
    world = happen("for ever", tmp_path, steps=steps, kills=0.04, hosts=(4,), every=5)
    assert len(world.of("fault")) >= kills
    found = judge(world, "for ever", tmp_path, steps)
    assert found.samples == steps * 6
    assert found.starts > 1, "all were lost at once, too"


# --- controls: what is broken is found ------------------------------------------------------------------


def test_control_positions_that_are_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is alone forgets where a lane was: it reads the same samples again."""
    real = StreamFeed.keep

    def keep(feed: StreamFeed) -> None:
        lanes = None if feed._state is None else feed._state["lanes"][0]
        real(feed)
        if feed._step == 3 and lanes is not None and feed._state is not None:
            feed._state["lanes"][0] = lanes
            feed.set_state(dict(feed._state))

    monkeypatch.setattr(StreamFeed, "keep", keep)
    happen("for ever", tmp_path, steps=6, hosts=(1,))
    with pytest.raises(Violation, match=r"step 4: .* used twice"):
        audit(read_ledgers([tmp_path]))


def test_control_a_first_worker_that_does_not_write_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies between its vote and its record, and the next one knows only its own record."""

    def strike(world: World, process: Process, phase: str) -> bool:
        return process.name == "0.0" and phase == "update" and process.run is not None and process.run.step == 3

    world = happen("for ever", tmp_path / "right", steps=6, strike=strike)
    assert len(world.of("fault")) == 1
    judge(world, "for ever", tmp_path / "right", 6)
    monkeypatch.setattr(Ledger, "hold", lambda ledger, record: setattr(ledger, "_before", None))
    happen("for ever", tmp_path / "wrong", steps=6, strike=strike)
    with pytest.raises(Violation, match="step 3 is not in the ledger"):
        audit(read_ledgers([tmp_path / "wrong"]))
