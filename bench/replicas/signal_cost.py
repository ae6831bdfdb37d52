"""Cost of SelSync's signals in a step of the bench's GPT, in turns with a plain update.

Time is CPU time of this thread, minus that of a plain update: tensors that a signal has read are in the cache for it.
"""

from __future__ import annotations

import statistics
import time

import torch

from bench.race_report import Bar
from bench.replicas.tasks import TASKS
from holdfast.sync.policy import Context, Tracker
from holdfast.sync.selsync import SelSync

SIGNALS = ("gradient-change", "replica-variance")
BAR = 0.01  # share of a step that a signal may take
Times = dict[str, list[float]]


def cost(rounds: int = 100) -> dict[str, Bar]:
    """Return a bar for each signal: the median share of a step that it takes, for small and larger steps."""
    bars = {}
    for times in (1, 4):
        batch = times * TASKS["gpt"].batch
        for signal, found in measure(rounds // times, batch).items():
            name = f"{signal}: share of a step with {batch} windows a worker, processor time"
            bars[name] = Bar(value=statistics.median(found), bar=BAR, at_most=True)
    return bars


def measure(rounds: int, batch: int) -> Times:
    """Return the share of a step in each round: one step with each signal, and one without."""
    task = TASKS["gpt"]
    torch.set_num_threads(1)
    model = task.make_model(0)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    trackers: dict[str, Tracker | None] = {"": None}
    for signal in SIGNALS:
        trackers[signal] = SelSync(target=0.1, signal=signal).tracker(Context())  # type: ignore[arg-type]
    data, _ = task.data()
    inputs, targets = data.take(list(range(batch)))
    shares: Times = {signal: [] for signal in SIGNALS}
    for number in range(rounds):
        seconds = {}
        for name, tracker in trackers.items():
            begin = time.thread_time()
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(model(inputs), targets))
            computed = time.thread_time()
            if tracker is not None:
                tracker.observe(number, parameters)
            optimizer.step()
            seconds[name] = (computed - begin, time.thread_time() - computed)
        plain = seconds[""][1]
        for signal in SIGNALS:
            whole = statistics.mean(each[0] for each in seconds.values()) + plain
            shares[signal].append((seconds[signal][1] - plain) / whole)
    return shares
