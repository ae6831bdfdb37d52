"""Race of methods that decide when replicas talk, over a slow network: BSP, Local SGD, DiLoCo, SelSync and others.

Four workers run in network namespaces of one machine, each with one thread and a limit on what it sends. They are
plain torch loops on Gloo. All methods see the same samples in the same order, with a learning rate that was tuned for
each (``--tune``). Methods with cheap steps make about 1.4 times as many as BSP; their score after as many steps as BSP
is reported too. The average of all weights is evaluated every few steps, after training, so that evaluation takes no
time and sends nothing. A method whose replicas were apart at the target is charged one more exchange for that average.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.race_report import Bar, Say
from bench.replicas import findings, signal_cost, sync_pictures
from bench.replicas.network import Network, loopback, namespaces, why_not
from bench.replicas.processes import SyncOutcome, SyncRun, WorkerFailed, Workers, gather, workers
from bench.replicas.schedule import FULL, QUICK, WORKERS, Turn, order
from bench.replicas.tasks import TASKS
from bench.running import BENCH

Done = dict[tuple[str, str, int | None, int, str], SyncOutcome]  # by task, split, rate, seed and method
COLUMNS = findings.COLUMNS


def race(*, quick: bool, resume: bool, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Run what is scheduled and write each outcome at once; return results and bars.

    With ``quick`` a short schedule; with ``resume`` outcomes of the last time are kept.
    """
    turns = order(QUICK if quick else FULL)
    BENCH.mkdir(exist_ok=True)
    notes = BENCH / ("sync-quick-runs.jsonl" if quick else "sync-runs.jsonl")
    if not resume:
        notes.unlink(missing_ok=True)
    reason = why_not()
    if reason is not None:
        say(f"{reason}: workers share the loopback device, without any limit. Times say nothing about slow networks")
    say(f"{len(turns)} runs, about {sum(turn.seconds for turn in turns) / 60:.0f} minutes")
    done = {key_of(outcome.run): outcome for outcome in read(notes)}
    for rate in dict.fromkeys(turn.contest.rate for turn in turns):
        here = [turn for turn in turns if turn.contest.rate == rate]
        place = namespaces(WORKERS, rate) if reason is None else loopback(WORKERS)
        _take_turns(here, done, place=place, notes=notes, say=say)
    costs = signal_cost.cost()  # at the end: nothing else runs now
    outcomes = list(done.values())
    sync_pictures.draw(BENCH, outcomes, say=say, prefix="sync-quick" if quick else "sync")
    return findings.rows(outcomes), findings.bars_of(outcomes) | costs


def _take_turns(
    turns: Sequence[Turn], done: Done, *, place: AbstractContextManager[Network], notes: Path, say: Say
) -> None:
    with place as network, workers(network, BENCH / "sync-workers.log") as running:
        for turn in turns:
            run = settle(turn, done, network.rate)
            if run is None:
                say(f"{turn.method.name}: left out, as {turn.method.matched} has not run")
                continue
            if key_of(run) in done:
                continue
            outcome = _run(running, run, turn, say=say)
            if outcome is not None:
                done[key_of(run)] = outcome
                with notes.open("a") as file:
                    file.write(json.dumps(outcome.to_json()) + "\n")


def _run(running: Workers, run: SyncRun, turn: Turn, *, say: Say) -> SyncOutcome | None:
    task = TASKS[run.task]
    try:
        said = running.run(run, patience=60 + 3 * turn.seconds)
    except WorkerFailed as e:
        say(str(e))  # the others go on: what one method cannot do is no reason to know nothing of the rest
        return None
    counts_all = running.network.counts_all
    outcome = gather(run, said, every=task.every, counts_all=counts_all, capped=turn.is_capped)
    rate = "no limit" if run.rate is None else f"{run.rate} Mbit"
    say(
        f"{run.task}, {run.split}, {rate}, seed {run.seed}: {run.method}: {outcome.seconds[-1]:.1f} s, "
        f"{outcome.sent[-1] / 1e6:.1f} MB, {len(outcome.synchronised)} times, {task.measure} {outcome.scores[-1]:.3f}"
    )
    return outcome


def settle(turn: Turn, done: Done, rate: int | None) -> SyncRun | None:
    """Return the run of a turn, or None if it depends on another that has not run."""
    contest, method = turn.contest, turn.method
    count = None
    if method.matched is not None:
        source = done.get((contest.task, contest.split, rate, turn.seed, method.matched))
        if source is None:
            return None
        count = len(source.synchronised)
    return SyncRun(
        task=contest.task,
        split=contest.split,
        rate=rate,
        seed=turn.seed,
        method=method.name,
        kind=method.kind,
        settings=method.settled(turn.steps, count),
        lr=method.lr(contest.task),
        steps=turn.steps,
    )


def key_of(run: SyncRun) -> tuple[str, str, int | None, int, str]:
    """Return the key of a run: task, split, rate, seed and method."""
    return run.task, run.split, run.rate, run.seed, run.method


def read(notes: Path) -> list[SyncOutcome]:
    """Return the outcomes in a file; a last line that was broken off is left out."""
    if not notes.exists():
        return []
    lines = [line for line in notes.read_text().splitlines() if line.endswith("}")]
    return [SyncOutcome.from_json(json.loads(line)) for line in lines]
