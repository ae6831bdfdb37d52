"""What every run of ``pipeline.py`` is judged by: the same weights, nobody restarted, nothing done or sent twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.model import LayeredModel
from tests.conftest import FEW
from tests.faults import pipeline
from tests.harness import Result, assert_each_sample_once_per_epoch, assert_every_worker_commits_each_step_once, launch

PIPELINE = Path(pipeline.__file__)
STEPS = 8
HEARTBEAT = 5.0  # a worker that waits for a core is not lost
HEADER = 1600  # bytes, at most, that describe one unit when it is sent


def train(folder: Path, *, workers: int, stages: str, tolerate: int = 1, steps: int = STEPS, **settings: Any) -> Result:
    """One run; names in capitals are the script's settings, the others the harness's or the agent's."""
    environment = {name: settings.pop(name) for name in list(settings) if name.isupper()}
    environment |= {"STEPS": str(steps), "STAGES": stages, "TOLERATE": str(tolerate)}
    settings.setdefault("heartbeat_timeout", HEARTBEAT)
    folder.mkdir(exist_ok=True)
    return launch(folder, script=PIPELINE, workers=workers, environment=environment, **settings)


def is_thorough(config: pytest.Config) -> bool:
    """Whether every case of the sweeps is to be run."""
    return bool(config.getoption("--soak") > FEW)


def scenarios(config: pytest.Config) -> range:
    """The seeds of a soak with real processes: `make test` has one, and hundreds of them in tests/world."""
    return range(config.getoption("--soak") if is_thorough(config) else 1)


def sweep(metafunc: pytest.Metafunc, name: str, complete: Sequence[Any], some: Sequence[Any]) -> None:
    """All cases in `make thorough`, some of them in `make test`."""
    if name in metafunc.fixturenames:
        cases = complete if is_thorough(metafunc.config) else some
        metafunc.parametrize(
            name, cases, ids=[case if isinstance(case, str) else "-".join(map(str, case)) for case in cases]
        )


def covered(by: str, *values: Any) -> Any:
    """A case of ``parametrize`` that only `make thorough` runs; ``by`` says what covers it in `make test`."""
    return pytest.param(*values, marks=pytest.mark.thorough(by))


def kill(workers: Iterable[str], *, step: int = 4, phase: str = "backward") -> str:
    return "; ".join(f"kill worker={worker} step={step} phase={phase}" for worker in workers)


def kill_at_once(workers: Sequence[str], *, step: int = 4, phase: str = "backward") -> str:
    """At once for certain: who does not come to the phase dies when it misses another, before a replacement joins."""
    _, *others = workers
    return "; ".join([kill(workers, step=step, phase=phase), kill(others, step=step, phase="regroup")])


def assert_same(result: Result, whole: Result) -> None:
    """The same losses, evaluations, weights and optimizer state as those of one worker, each step once."""
    assert result.code == 0, result.said
    assert result.losses == whole.losses
    assert result.sha256 == whole.sha256
    expected = whole.results[0]["values"]
    for line in result.results:
        assert line["weights"] == whole.results[0]["weights"]
        assert line["values"].items() <= expected.items(), f"evaluations of {line['worker']}: {line['values']}"
    assert_every_worker_commits_each_step_once(result)
    per_epoch = -(-pipeline.SIZE // pipeline.GLOBAL_BATCH)
    assert_each_sample_once_per_epoch(result, size=pipeline.SIZE, steps_per_epoch=per_epoch)


def assert_went_on(result: Result, lost: set[str], *, first: int) -> None:
    """All survivors trained to the end as they were, without a checkpoint, and no step but a running one came again."""
    assert {e["worker"] for e in result.of("failure") if e["member"]} == lost
    assert not result.of("resumed")
    survivors = {f"0.{number}" for number in range(first)} - lost
    assert survivors <= {line["worker"] for line in result.results}, "survivors never restart"
    assert_nothing_twice(result)


def assert_nothing_twice(result: Result) -> None:
    """A generation begins at the step that the one before it had under way, or at the next."""
    voted: dict[int, list[int]] = {}
    for event in result.of("vote"):
        voted.setdefault(event["generation"], []).append(event["step"])
    for before, after in itertools.pairwise(sorted(voted)):
        assert min(voted[after]) >= max(voted[before]), f"generation {after} went back to step {min(voted[after])}"


# --- who holds what ------------------------------------------------------------------------------------


def places(result: Result, generation: int) -> dict[str, range]:
    """The layers of each worker in a generation; those without a place have none."""
    found = [e for e in result.of("layout") if e["generation"] == generation]
    return {e["worker"]: range(e.get("first", 0), e.get("stop", 0)) for e in found}


def generations(result: Result) -> list[int]:
    """Those in which something was committed."""
    return sorted({e["generation"] for e in result.of("commit")})


@cache
def sizes() -> dict[int, tuple[frozenset[int], int]]:
    """The layers of each unit, and its bytes with AdamW's slots: two tensors, and a counter of 4 bytes."""
    model = LayeredModel(pipeline.make_layers(), seed=0, device=torch.device("cpu"))
    found = {}
    for unit in model.units:
        trained = [p for p in unit.parameters if p.requires_grad]
        slots = sum(2 * p.nbytes + 4 for p in trained)
        found[unit.number] = (unit.layers, sum(t.nbytes for t in unit.tensors) + slots)
    return found


def units_of(layers: Iterable[int]) -> set[int]:
    return {number for number, (users, _) in sizes().items() if users & set(layers)}


def assert_only_what_is_missing_moves(result: Result, before: int, after: int) -> dict[str, int]:
    """Counts the bytes; returns what each worker has sent."""
    held, wanted = places(result, before), places(result, after)
    entered = {e["worker"]: e for e in result.of("entered") if e["generation"] == after}
    missing = {worker: units_of(layers) - units_of(held.get(worker, ())) for worker, layers in wanted.items()}
    for worker, units in missing.items():
        payload = sum(sizes()[unit][1] for unit in units)
        received = entered[worker]["received"]
        assert payload <= received <= payload + HEADER * len(units), f"{worker} lacks {payload}, received {received}"
    assert sum(e["sent"] for e in entered.values()) == sum(e["received"] for e in entered.values())
    return {worker: e["sent"] for worker, e in entered.items()}


def assert_load_is_spread(result: Result, before: int, after: int, sent: dict[str, int]) -> None:
    """Nobody sends more than its part of what it holds, but for one unit."""
    held = {worker: units_of(layers) for worker, layers in places(result, before).items()}
    wanted = {worker: units_of(layers) for worker, layers in places(result, after).items()}
    part: dict[str, float] = dict.fromkeys(sent, 0.0)
    count = 0
    for receiver, units in wanted.items():
        for unit in units - held.get(receiver, set()):
            holders = [worker for worker in held if worker in sent and unit in held[worker]]
            count += 1
            for worker in holders:
                part[worker] += sizes()[unit][1] / len(holders)
    largest = max(size for _, size in sizes().values())
    for worker, number in sent.items():
        assert number <= part[worker] + largest + HEADER * count, f"{worker} sent {number} of {sent}"
