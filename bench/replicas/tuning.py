"""Search for learning rates of ``bench sync``: a small grid for each method, no limit on the network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.replicas.methods import Method
from bench.replicas.network import loopback
from bench.replicas.processes import SyncOutcome, SyncRun, WorkerFailed, Workers, gather, workers
from bench.replicas.schedule import MOST, ONCE, WORKERS
from bench.replicas.tasks import TASKS, LearningTask
from bench.running import BENCH

GRID = {"gpt": (1e-3, 1.5e-3, 2.2e-3), "digits": (8e-3, 16e-3, 32e-3)}
TUNING_SEED = 1000  # far from the seeds of the races
SHARE = 0.5  # of the task's steps, enough to rank rates
RUN_SECONDS = 120.0  # limit for one run


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One learning rate of a method."""

    task: LearningTask
    method: Method
    lr: float

    def run(self) -> SyncRun:
        """Return the run that tries it."""
        return SyncRun(
            task=self.task.name,
            split="iid",
            rate=None,
            seed=TUNING_SEED,
            method=self.method.name,
            kind=self.method.kind,
            settings=dict(self.method.settings),
            lr=self.lr,
            steps=int(self.task.cheap_steps * SHARE),
        )


def trials() -> Iterator[Trial]:
    """Return the trials of the first method of each name in ``RATES``."""
    methods = {method.tuned_as: method for method in reversed((*MOST, *ONCE)) if method.matched is None}
    for name, rates in GRID.items():
        for method in methods.values():
            factor = 0.5 if method.kind == "DiLoCo" else 1.0  # its outer step goes further
            yield from (Trial(task=TASKS[name], method=method, lr=factor * lr) for lr in rates)


def tune(*, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Return the best rate of each method for each task, and write them to ``.bench/sync-rates.json``."""
    BENCH.mkdir(exist_ok=True)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in GRID}
    with loopback(WORKERS) as network, workers(network, BENCH / "sync-workers.log") as running:
        for trial in trials():
            value = _badness(trial, running, say)
            if value is not None:
                found[trial.task.name].setdefault(trial.method.tuned_as, []).append((value, trial.lr))
    chosen = {task: {name: min(each)[1] for name, each in methods.items()} for task, methods in found.items()}
    (BENCH / "sync-rates.json").write_text(json.dumps(chosen, indent=1))
    say(json.dumps(chosen, indent=1))
    return chosen


def _badness(trial: Trial, running: Workers, say: Callable[[str], None]) -> float | None:
    run = trial.run()
    try:
        said = running.run(run, patience=RUN_SECONDS)
    except WorkerFailed as e:
        say(str(e))
        return None
    outcome = gather(run, said, every=trial.task.every, counts_all=True, capped=False)
    value = badness(trial.task, outcome.scores)
    say(f"{run.task}: {run.method}: rate {run.lr:g}: {value:.4f} ({_last(outcome):.4f} at the end)")
    return value


def _last(outcome: SyncOutcome) -> float:
    return outcome.scores[-1]


def badness(task: LearningTask, scores: Sequence[float]) -> float:
    """Return the mean badness over the last third of the evaluations, as one alone is noisy.

    >>> badness(TASKS["gpt"], [9.0, 9.0, 3.0])
    3.0
    """
    last = scores[-max(1, len(scores) // 3) :]
    return sum(task.worse_by(score, than=0.0) for score in last) / len(last)
