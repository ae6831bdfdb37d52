"""Race of reading a ZeRO checkpoint into another layout, against DeepSpeed, which converts it first."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.race_report import Bar
from bench.running import BENCH, ROOT
from bench.savers import SavedTraining
from holdfast import checkpoint
from holdfast.errors import HoldfastError
from holdfast.measuring import drop_from_cache, free_port, spread

PYTHON = BENCH / "formats" / "bin" / "python"
SCRIPT = ROOT / "bench" / "peers" / "zero_checkpoint.py"

COLUMNS = {"seconds": "s: median (range)", "convert_s": "of which converting", "times_ours": "times holdfast's"}


def race(*, megabytes: int, rounds: int, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Fill one worker's model and optimizer from the cold files of two workers; return results and bars."""
    folder = BENCH / "zero"
    shutil.rmtree(folder, ignore_errors=True)
    say("DeepSpeed makes a ZeRO-1 checkpoint of two workers")
    _deepspeed("make", folder, megabytes)
    ours: list[float] = []
    converts: list[float] = []
    loads: list[float] = []
    state = SavedTraining(megabytes)
    try:
        for number in range(rounds):
            drop_from_cache(folder / "saved")
            begin = time.monotonic()
            checkpoint.load(folder, {"model": state.model, "optimizer": state.optimizer})
            ours.append(time.monotonic() - begin)
            drop_from_cache(folder / "saved")
            said = json.loads(_deepspeed("load", folder, megabytes).splitlines()[-1])
            converts.append(said["convert"])
            loads.append(said["load"])
            shutil.rmtree(folder / "universal")
            say(f"round {number + 1}/{rounds}: {ours[-1]:.2f} s, DeepSpeed {converts[-1]:.2f} + {loads[-1]:.2f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    theirs = [a + b for a, b in zip(converts, loads, strict=True)]
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    results = {
        "ds_to_universal + load": {
            "seconds": spread(theirs),
            "convert_s": spread(converts),
            "times_ours": spread(ratios),
        },
        "holdfast load": {"seconds": spread(ours)},
    }
    return results, {"times faster than DeepSpeed": Bar(value=statistics.median(ratios), bar=10.0)}


def _deepspeed(task: str, folder: Path, megabytes: int) -> str:
    if not PYTHON.exists():
        raise HoldfastError("DeepSpeed is not installed under .bench/formats", hint="make formats installs it")
    command = [str(PYTHON), str(SCRIPT), task, str(folder), str(megabytes), str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HoldfastError(f"DeepSpeed could not {task}: {done.stderr[-2000:]}")
    return done.stdout
