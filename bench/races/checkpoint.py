"""Race of saving and loading, against the raw disk and the formats people use, interleaved in one run."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.race_report import Bar, Say
from bench.running import BENCH
from bench.savers import ASYNC, FORMATS, SavedTraining
from holdfast.measuring import drop_from_cache, spread, write_direct

COLUMNS = {
    "save_s": "durable save, s: median (range)",
    "of_raw": "times the raw disk",
    "load_s": "cold load, s",
    "stall_s": "async: call, s",
    "lost_s": "async: training time lost, s",
}
Times = dict[str, list[float]]  # seconds of each round, by contestant


def race(*, megabytes: int, rounds: int, seed: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let every contestant save, load cold and save beside training once a round; return results and bars.

    ``megabytes`` is the size of the state; ``seed`` decides the order of turns.
    """
    torch.set_num_threads(os.cpu_count() or 1)  # training and saving compete for the same cores, as on a busy machine
    folder = BENCH / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    order = random.Random(seed)
    state = SavedTraining(megabytes)
    saves: Times = {name: [] for name in ["raw disk", *FORMATS]}
    loads: Times = {name: [] for name in FORMATS}
    lost: Times = {name: [] for name in ASYNC}
    stalls: Times = {name: [] for name in ASYNC}
    try:
        for number in range(rounds + 1):  # the first one warms buffers up, and is not counted
            kept = number > 0
            for name in order.sample(list(saves), len(saves)):
                seconds = _save(name, state, folder)
                saves[name] += [seconds] * kept
            for name in order.sample(list(loads), len(loads)):
                loads[name] += [_load(name, state, folder)] * kept
            for name in order.sample(list(ASYNC), len(ASYNC)):
                stall, cost = _beside_training(name, state, folder)
                stalls[name] += [stall] * kept
                lost[name] += [cost] * kept
            if kept:
                say(_row(number, rounds, saves, loads, lost))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _results(state.nbytes, saves, loads, stalls, lost), _bars(saves, loads, lost)


def _save(name: str, state: SavedTraining, folder: Path) -> float:
    """Return the seconds until the data is on the disk; removing older data first is not counted."""
    target = folder / name.replace(" ", "-")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    os.sync()
    begin = time.monotonic()
    write_direct(target, state.nbytes) if name == "raw disk" else FORMATS[name].save(state, target)
    return time.monotonic() - begin


def _load(name: str, state: SavedTraining, folder: Path) -> float:
    target = folder / name.replace(" ", "-")
    drop_from_cache(target)
    state.scramble()
    begin = time.monotonic()
    FORMATS[name].load(state, target)
    seconds = time.monotonic() - begin
    state.check(name)
    return seconds


def _beside_training(name: str, state: SavedTraining, folder: Path) -> tuple[float, float]:
    """Return the seconds of the call, and the training time that the save cost in all."""
    target = folder / f"{name.replace(' ', '-')}-beside"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    os.sync()
    usual = statistics.median(state.train_step() for _ in range(5))
    begin = time.monotonic()
    wait, done = ASYNC[name](state, target)
    stall = time.monotonic() - begin
    steps = 0
    while not done() or steps < 3:
        state.train_step()
        steps += 1
    seconds = time.monotonic() - begin
    wait()
    shutil.rmtree(target, ignore_errors=True)
    return stall, seconds - steps * usual


def _results(nbytes: int, saves: Times, loads: Times, stalls: Times, lost: Times) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in saves:
        results[name] = {
            "save_s": spread(saves[name]),
            "of_raw": spread(_ratios(saves[name], saves["raw disk"])),
            "load_s": spread(loads[name]) if name in loads else None,
            "load_gb_s": spread([nbytes / 1e9 / s for s in loads[name]]) if name in loads else None,
        }
    for name in lost:
        results[name] = {"stall_s": spread(stalls[name]), "lost_s": spread(lost[name])}
    return results


def _ratios(mine: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def _bars(saves: Times, loads: Times, lost: Times) -> dict[str, Bar]:
    def against_best(times: Times) -> float:
        others = [times[name] for name in times if name not in ("holdfast", "raw disk")]
        best = [min(values) for values in zip(*others, strict=True)]
        return statistics.median(_ratios(times["holdfast"], best))

    theirs = [min(values) for values in zip(*(lost[n] for n in lost if n.startswith("DCP")), strict=True)]
    return {
        "durable save, of the raw disk": Bar(
            value=statistics.median(_ratios(saves["holdfast"], saves["raw disk"])), bar=1.5, at_most=True
        ),
        "durable save, of the fastest other": Bar(value=against_best(saves), bar=1.0, at_most=True),
        "cold load, of the fastest other": Bar(value=against_best(loads), bar=1.0, at_most=True),
        "lost training time, of DCP async": Bar(
            value=statistics.median(lost["holdfast async"]) / statistics.median(theirs), bar=0.5, at_most=True
        ),
    }


def _row(number: int, rounds: int, saves: Times, loads: Times, lost: Times) -> str:
    parts = [f"{name} {values[-1]:.2f}" for name, values in saves.items()]
    parts += [f"load {name} {values[-1]:.2f}" for name, values in loads.items()]
    parts += [f"lost {name} {values[-1]:.2f}" for name, values in lost.items()]
    return f"round {number}/{rounds}, seconds: {', '.join(parts)}"
