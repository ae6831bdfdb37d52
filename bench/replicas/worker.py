"""Worker process of ``bench sync``: reads runs from its standard input, a JSON object each, and writes results.

Measuring does not disturb a run. At each evaluation a worker notes the time and the bytes it has sent, and copies its
weights in memory. After the run all workers exchange their copies as files in memory, and evaluate the averages.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.replicas.methods import make_policy
from bench.replicas.network import read_sent
from bench.replicas.tasks import TASKS, LearningTask, evaluate, make_partition

WARM_UP_STEPS = 10  # in which the learning rate rises from 0
FILE_SECONDS = 120.0  # limit for the other workers' files to come


class Notes:
    """Notes of a worker while it trains: times, bytes, and copies of its weights."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._parameters = [p.detach() for p in model.parameters()]
        self._device = device
        self.began = time.monotonic()
        self._sent_before = read_sent(device)
        self.times: list[float] = []
        self.sent: list[int] = []
        self.copies: list[Tensor] = []
        self.synchronised: list[int] = []

    def evaluate(self) -> None:
        """Note the time, the bytes and the weights; they are evaluated after training."""
        self.times.append(time.monotonic())
        self.sent.append(self.sent_now())
        self.copies.append(torch.cat([p.flatten() for p in self._parameters]))

    def sent_now(self) -> int:
        """Return the bytes sent since training began."""
        return read_sent(self._device) - self._sent_before


class ReplicaTraining:
    """Plain training loop that all methods share."""

    def __init__(self, run: dict[str, Any], rank: int, workers: int) -> None:
        self.task = TASKS[run["task"]]
        self.model = self.task.make_model(run["seed"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run["lr"])
        self.partition = make_partition(self.task, run["split"], run["seed"])
        self.data, _ = self.task.data()
        self.lr, self.rank, self.workers, self.steps = run["lr"], rank, workers, run["steps"]

    def one_step(self, forward: Callable[[Tensor], Tensor], step: int) -> None:
        """Train one step; ``forward`` computes the output."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (step + 1) / WARM_UP_STEPS)
        mine = self.partition.samples(step, self.rank, workers=self.workers, batch=self.task.batch)
        inputs, targets = self.data.take(mine)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self.task.loss(forward(inputs), targets))
        self.optimizer.step()

    def is_evaluated(self, step: int) -> bool:
        """Tell whether an evaluation follows this step."""
        return (step + 1) % self.task.every == 0 or step + 1 == self.steps


def train(run: dict[str, Any], rank: int, workers: int, device: str) -> dict[str, Any]:
    """Train a run as one of its workers; return its measurements."""
    training = ReplicaTraining(run, rank, workers)
    with _group(run, rank, workers):
        train_by = _with_ddp if run["kind"] in ("BSP", "PowerSGD") else _with_policy
        notes = train_by(training, run, device)
        ended, sent = time.monotonic(), notes.sent_now()
    copies = np.stack([copy.numpy() for copy in notes.copies])
    scores = _evaluate_averages(training.task, training.model, copies, Path(run["folder"]), rank, workers)
    return {
        "began": notes.began,
        "times": notes.times,
        "sent": notes.sent,
        "ended": ended,
        "sent_end": sent,
        "synchronised": notes.synchronised,
        "scores": scores,
        "local": _score_of(training.task, training.model, copies[-1]),
    }


@contextmanager
def _group(run: dict[str, Any], rank: int, workers: int) -> Iterator[None]:
    """Make a process group for one run, so that nothing of one method reaches the next."""
    store = dist.FileStore(str(Path(run["folder"], "store")), workers)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    try:
        yield
        dist.barrier()  # nobody closes a connection that another still needs
    finally:
        dist.destroy_process_group()


def _with_ddp(training: ReplicaTraining, run: dict[str, Any], device: str) -> Notes:
    model = DistributedDataParallel(training.model, **run["settings"].get("ddp", {}))
    if run["kind"] == "PowerSGD":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(process_group=None, **run["settings"]["hook"])
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    dist.barrier()
    notes = Notes(training.model, device)
    for step in range(training.steps):
        training.one_step(model, step)
        notes.synchronised.append(step)
        if training.is_evaluated(step):
            notes.evaluate()
    return notes


def _with_policy(training: ReplicaTraining, run: dict[str, Any], device: str) -> Notes:
    policy: Any = make_policy(run["kind"], run["settings"])
    with policy.around(training.model, training.optimizer, seed=run["seed"]) as loop:
        dist.barrier()
        notes = Notes(training.model, device)
        for step in range(training.steps):
            training.one_step(training.model, step)
            if loop.last.synchronised:
                notes.synchronised.append(step)
            if training.is_evaluated(step):
                notes.evaluate()
    return notes


def _evaluate_averages(
    task: LearningTask, model: nn.Module, copies: np.ndarray[Any, Any], folder: Path, rank: int, workers: int
) -> dict[int, float]:
    """Return the scores of the mean of all workers' weights, at every n-th evaluation."""
    mine = folder / f"{rank}.npy"
    with Path(f"{mine}.part").open("wb") as file:
        np.save(file, copies, allow_pickle=False)
    Path(f"{mine}.part").rename(mine)
    every = [_read(folder / f"{each}.npy") for each in range(workers)]
    chosen = range(rank, len(copies), workers)
    return {n: _score_of(task, model, np.mean([copy[n] for copy in every], axis=0)) for n in chosen}


def _read(path: Path) -> np.ndarray[Any, Any]:
    deadline = time.monotonic() + FILE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.01)
    found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def _score_of(task: LearningTask, model: nn.Module, weights: np.ndarray[Any, Any]) -> float:
    nn.utils.vector_to_parameters(torch.from_numpy(np.array(weights)), model.parameters())
    return evaluate(task, model)


def _listen(runs: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Read runs until the pipe ends: then the parent is gone, and this process ends too."""
    for line in sys.stdin:
        runs.put(json.loads(line))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(runs,), daemon=True).start()
    while True:
        outcome = train(runs.get(), args.rank, args.workers, args.device)
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
