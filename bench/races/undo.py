"""Race of ways to take a step back: eager updates with undo, a vote before the update, copies of the state.

All ways train the same model on the same workers and take turns. Two kinds of memory are measured: bytes of tensors
between two steps, and the most that a process had resident. An undo is timed alone, beside the update that it reverts.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.pipelines import race_models
from bench.pipelines.entries import PipelineShape
from bench.pipelines.speed_contest import ratio, ratios
from bench.race_report import Bar, Say
from bench.running import BENCH, Running, can_limit, cpu_of_turns, limited, time_turns
from holdfast.measuring import spread
from holdfast.undo.undo import undo_step

COMMIT, EAGER = "two-phase commit", "eager + undo"
WAYS: Mapping[str, Sequence[str]] = {
    COMMIT: (),
    EAGER: ("--update", "eager"),
    "commit-copy, k=1": ("--copy-every", "1"),
    "commit-copy, k=10": ("--copy-every", "10"),
}
WIDE = PipelineShape(model="wide", layers=6, width=768, micro_batches=2)  # large weights, little to compute
SHAPES = {"gpt": PipelineShape(model="gpt", layers=6, micro_batches=4), "wide": WIDE}
SLOW = {"wide, slow link": WIDE}  # an eager update is hidden behind gradients that take long to arrive
RATE = "4gbit"  # of the slow link, as tc writes it
WORKERS = 2  # one for each core
BURST = 10  # steps in a turn: whole blocks of all ways
WARM = 2  # turns that do not count: in the first one copies lack the optimizer's slots
COLUMNS = {
    "step_ms": "ms a step: median (range)",
    "of_commit": "speed, of commit's",
    "held_mb": "MB in tensors",
    "beyond_mb": "MB more",
    "peak_mb": "MB at most",
    "undo_ms": "ms of an undo",
    "of_update": "of its update",
}


def race(*, rounds: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let all ways train the same model in turns, and time undos; return results and bars."""
    results: dict[str, Any] = {}
    bars: dict[str, Bar] = {}
    shapes = {**SHAPES, **SLOW} if can_limit() else SHAPES
    for title, shape in shapes.items():
        folder = BENCH / "undo" / title
        shutil.rmtree(folder, ignore_errors=True)
        times, work, memory = take_turns(title, shape, rounds=rounds, folder=folder, say=say)
        undo = undo_times(shape, rounds=rounds)
        for name in WAYS:
            results[f"{title}: {name}"] = {
                "step_ms": spread([1000 * each for each in times[name]]),
                "of_commit": None if name == COMMIT else spread(ratios(times, COMMIT, name)),
                "cpu_ms": spread([1000 * each for each in work[name]]),
                "cpu_of_commit": None if name == COMMIT else spread(ratios(work, name, COMMIT)),
                "held_mb": memory[name]["held"],
                "beyond_mb": round(memory[name]["held"] - memory[COMMIT]["held"], 3),
                "peak_mb": memory[name]["peak"],
            }
        results[f"{title}: {EAGER}"] |= {"undo_ms": spread(undo["ms"]), "of_update": spread(undo["of_update"])}
        beyond = results[f"{title}: {EAGER}"]["beyond_mb"]
        bars[f"{title}: MB that eager + undo holds beyond two-phase commit"] = Bar(value=beyond, bar=0.0, at_most=True)
        bars[f"{title}: speed of eager + undo, of two-phase commit"] = Bar(value=ratio(times, COMMIT, EAGER), bar=0.95)
    return results, bars


def take_turns(
    title: str, shape: PipelineShape, *, rounds: int, folder: Path, say: Say
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, dict[str, float]]]:
    """Return seconds a step, CPU seconds a step (both by round), and MB of a worker, by way."""
    with ExitStack() as stack:
        rate = RATE if title in SLOW else ""
        running = {name: stack.enter_context(_started(shape, way, folder / name, rate)) for name, way in WAYS.items()}
        times = time_turns(running, title=title, rounds=rounds, burst=BURST, say=say, warm=WARM)
        memory = {name: _memory(each) for name, each in running.items()}
    work = {
        name: [seconds / WORKERS for seconds in cpu_of_turns(each.lines, BURST)[WARM:]]
        for name, each in running.items()
    }
    return times, work, memory


@contextmanager
def _started(shape: PipelineShape, way: Sequence[str], folder: Path, rate: str) -> Iterator[Running]:
    folder.mkdir(parents=True)
    running = Running(folder=folder.absolute(), workers=WORKERS)
    running.make_turns()
    agent = ["-m", "holdfast.cli", "run", "-n", str(WORKERS), "--max-restarts", "0", "--log-dir", "logs"]
    turns = ["--steps", "1000000", "--progress", str(running.progress), "--burst", str(BURST)]
    turns += ["--measure", str(WARM * BURST)]
    try:
        script = ["-m", "bench.pipelines.update_entry", *shape.arguments(), *way, *turns]
        running.start(limited([sys.executable, *agent, *script], rate))
        yield running
    finally:
        running.stop()


def _memory(running: Running) -> dict[str, float]:
    """Return MB of the worker that has the most: held in tensors, and resident at most."""
    held = [json.loads(path.read_text())["held"] for path in running.folder.glob("*.held-*")]
    return {
        "held": round(max(held) / 1e6, 3),
        "peak": max(_peak(pid) for pid in {line["pid"] for line in running.lines}),
    }


def _peak(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return round(int(found[1]) * 1024 / 1e6, 1) if found else 0.0


def undo_times(shape: PipelineShape, *, rounds: int) -> dict[str, list[float]]:
    """Time undos of a whole step; return their ms, and as multiples of the step's update."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    arguments = Namespace(**vars(shape), seed=0)
    parameters = [p for layer in race_models.build_layers(arguments) for p in layer.parameters()]
    optimizer = race_models.build_optimizer(parameters)
    found: dict[str, list[float]] = {"ms": [], "of_update": []}
    for number in range(rounds + 2):
        for p in parameters:
            p.grad = torch.randn_like(p)
        begin = time.perf_counter()
        optimizer.step()
        between = time.perf_counter()
        if number < 2:  # the second one is the first that has something to keep, and warms up
            continue
        undo_step(optimizer, {p: p.grad for p in parameters if p.grad is not None})
        end = time.perf_counter()
        found["ms"].append(1000 * (end - between))
        found["of_update"].append((end - between) / (between - begin))
    torch.set_num_threads(threads)
    return found
