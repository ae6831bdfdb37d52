"""Runs an example as it is, but patiently, with short evaluations, and writes the hash where tests find it.

``patient.py SCRIPT ARGUMENTS…``. ``WANTED``: how many workers must train from step ``PATIENT`` on. While there are
fewer, each step waits until somebody wants to join: whether one does in time must not depend on how fast a machine is.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

import holdfast
from holdfast.run.surroundings import Surroundings

SAMPLES = 48  # to evaluate on: micro-batches for every worker


def patient(steps: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    wanted, since = int(os.environ.get("WANTED", "0")), int(os.environ.get("PATIENT", "0"))

    @functools.wraps(steps)
    def waiting(run: holdfast.Run | holdfast.Loop, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for step in steps(run, *args, **kwargs):
            yield step
            while step.number >= since and run.workers < wanted and not any(run._cohort.membership.wishes()):
                time.sleep(0.01)

    return waiting


def on_few(measure: Callable[..., Any]) -> Callable[..., Any]:
    """``evaluate`` or ``predict`` on so many samples: some examples would spend most of a short run in it."""

    @functools.wraps(measure)
    def measuring(run: Surroundings, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return measure(run, Subset(dataset, range(min(SAMPLES, len(dataset)))), *args, **kwargs)

    return measuring


def noted(sha256: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(sha256)
    def noting(run: Surroundings, **kwargs: Any) -> str:
        found = sha256(run, **kwargs)
        with open(os.environ["RESULTS"], "a") as results:
            results.write(json.dumps({"sha256": found, "step": run.step, "workers": run.workers}) + "\n")
        return found

    return noting


if __name__ == "__main__":
    holdfast.Run.steps = patient(holdfast.Run.steps)  # type: ignore[method-assign]
    holdfast.Loop.steps = patient(holdfast.Loop.steps)  # type: ignore[method-assign]
    Surroundings.evaluate = on_few(Surroundings.evaluate)  # type: ignore[method-assign]
    Surroundings.predict = on_few(Surroundings.predict)  # type: ignore[method-assign]
    Surroundings.sha256 = noted(Surroundings.sha256)  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does
    runpy.run_path(sys.argv[0], run_name="__main__")
