"""``train.py`` on workers that hang, or are only slow, as in ``HANG="block 0.1 data 3; slow 0.2 evaluation"``.

``block``: a read that never ends, as from dead storage. ``greedy``: an endless loop in C that keeps the interpreter's
lock. ``slow``: it takes ``SLOW`` seconds, once. The place is ``start`` (before there is a ``Run``), ``ready`` (before
training begins), ``data`` (the data set), ``script`` (between two steps) or ``evaluation``. A number is the step.
"""

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import torch

import holdfast
from holdfast.cluster import faults
from tests.faults import train

planned = [part.split() for part in os.environ.get("HANG", "").split(";") if part.strip()]
mine = [(what, *rest) for what, name, *rest in planned if name == os.environ.get("HOLDFAST_WORKER")]
evaluating = False


def block_forever() -> None:
    reading, _writing = os.pipe()
    os.read(reading, 1)


def keep_the_lock() -> None:
    re.match("(a*)*b", "a" * 1000)


def arrive(place: str, step: int | None = None) -> None:
    """Does what is planned for this place."""
    for plan in list(mine):
        if plan[1] == place and step == (int(plan[2]) if len(plan) > 2 else step):
            mine.remove(plan)
            if plan[0] == "slow":
                time.sleep(float(os.environ["SLOW"]))
            {"block": block_forever, "greedy": keep_the_lock, "slow": int}[plan[0]]()


class Waves(train.Waves):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        arrive("evaluation" if evaluating else "data", faults._step)
        return super().__getitem__(i)


class Run(holdfast.Run):
    def steps(self, total: int) -> Iterator[Any]:
        arrive("ready")
        for step in super().steps(total):
            arrive("script", step.number)
            yield step

    def evaluate(self, *words: Any) -> float:
        global evaluating
        evaluating = True
        try:
            return super().evaluate(*words)
        finally:
            evaluating = False


if __name__ == "__main__":
    arrive("start")
    train.Waves = Waves  # type: ignore[misc]
    holdfast.Run = Run  # type: ignore[misc]
    train.main()
