"""Race of losses on Ray: workers of ``HoldfastTrainer`` and of ``holdfast run``, killed in turns in two trainings.

Both trainings go on side by side, on three machines each: three agents with a worker, and three nodes of a Ray cluster
on loopback. What is killed is replaced, and the next kill waits until all machines of both train again.

A *worker* is the process that trains; an *agent* is its parent's parent, under Ray the *actor*; a *raylet* is the
actor's parent. A *node* is all of these at once, as when a machine loses its power.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.race_report import Bar, Say
from bench.running import BENCH, NewLines, environment, send_signal, wait_for
from holdfast.errors import HoldfastError, UsageError
from holdfast.measuring import free_port, spread
from holdfast.processes import descendants_of, parent_of

COLUMNS = {
    "ms": "ms without a commit: median (range)",
    "of_run": "times holdfast run's",
    "trained_on_ms": "ms that the lost worker trained on",
}
MACHINES = 3
STEPS = 10  # committed by all machines since the last loss, before the next one
PAIRS = {"worker": "worker", "actor": "agent", "raylet": "agent", "node": "node"}  # under Ray; under ``holdfast run``
SCRIPT = """
import json, os, time, torch, holdfast
from torch.utils.data import TensorDataset
def train(config):
    mark = os.path.join(config["folder"], os.environ["HOLDFAST_WORKER"])
    with open(mark + ".new", "w") as file:
        json.dump([os.getpid(), int(os.environ["HOLDFAST_AGENT"])], file)
    os.rename(mark + ".new", mark + ".pids")
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    run = holdfast.Run(layers=torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss, global_batch=12, micro_batch=4,
                       optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), data=TensorDataset(x, x.sum(1, True)))
    for step in run.steps(1_000_000):
        time.sleep(0.02)
if __name__ == "__main__":
    train({"folder": "."})
"""
DRIVER = """
import sys, threading, time
import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from holdfast.integrations.ray import HoldfastTrainer
from train import train
cluster, nodes, number = Cluster(), [], 0
def add():
    global number
    number += 1  # the first is the head, at 127.0.0.2: Ray takes 127.0.0.1 for the address of the network
    return cluster.add_node(num_cpus=int(number > 1), node_ip_address=f"127.0.0.{1 + number}", include_dashboard=False)
for node in range(4):
    nodes.append(add())
del nodes[0]
ray.init(address=cluster.address)
trainer = HoldfastTrainer(
    train, train_loop_config={"folder": sys.argv[1]}, scaling_config=ScalingConfig(num_workers=(2, 3)),
    run_config=RunConfig(name="run", storage_path=sys.argv[1]),
)
fitting = threading.Thread(target=trainer.fit, daemon=True)
fitting.start()
while fitting.is_alive():  # Ray starts nodes only in the main thread
    for node in [node for node in nodes if node.dead_processes()]:
        nodes.remove(node)
        cluster.remove_node(node, allow_graceful=False)
        nodes.append(add())
    time.sleep(0.5)
"""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """What a loss has cost, in seconds."""

    stalled: float  # from the kill, or from the last commit with the lost worker, to the survivors' next one
    trained_on: float  # from the kill to the last commit with the lost worker


def race(*, rounds: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Kill one of each kind in both trainings in each round; return results and bars."""
    try:
        import ray  # noqa: F401
    except ImportError as e:
        raise UsageError("this race needs Ray", hint="pip install 'holdfast[ray]'") from e
    folder = (BENCH / "ray").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    pauses: dict[str, list[tuple[Pause, Pause]]] = {whom: [] for whom in PAIRS}
    with _agents(folder / "run") as run, _ray(folder / "ray") as placed:
        for number in range(rounds):
            for place, (whom, peer) in enumerate(PAIRS.items()):
                found: dict[str, Pause] = {}
                order = [(run, peer), (placed, whom)]
                for training, lost in order if (number + place) % 2 else reversed(order):
                    wait_for(lambda: run.all_train() and placed.all_train(), folder)
                    pause = found[training.name] = training.lose(lost, number)
                    text = f"{1000 * pause.stalled:.0f} ms without a commit"
                    say(f"ray, round {number + 1}/{rounds}: {training.name}, {lost}: {text}")
                pauses[whom].append((found["ray"], found["run"]))
    return results_of(pauses)


def results_of(pauses: dict[str, list[tuple[Pause, Pause]]]) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Return results and bars. ``pauses``: by what was killed, in each round Ray's and ``holdfast run``'s."""
    results: dict[str, Any] = {}
    bars = {}
    for whom, pairs in pauses.items():
        ours, theirs = [our for our, _ in pairs], [their for _, their in pairs]
        of_run = [our.stalled / their.stalled for our, their in pairs]
        results[f"ray, {whom}"] = _row(ours) | {"of_run": spread(of_run)}
        results[f"run, {PAIRS[whom]}, beside ray's {whom}"] = _row(theirs)
        ratio = _median(ours) / _median(theirs)
        bars[f"{whom}: of holdfast run"] = Bar(value=ratio, bar=1.5, at_most=True)
    return results, bars


def _row(pauses: Sequence[Pause]) -> dict[str, Any]:
    stalled = [1000 * pause.stalled for pause in pauses]
    return {"ms": spread(stalled), "trained_on_ms": spread([1000 * pause.trained_on for pause in pauses])}


def _median(pauses: Sequence[Pause]) -> float:
    return statistics.median(pause.stalled for pause in pauses)


@dataclass(kw_only=True)
class Training:
    """One of the two trainings. ``marks``: the folder where workers leave their process ids."""

    name: str
    process: subprocess.Popen[bytes]  # that has started it all, and ends only if something is wrong
    marks: Path
    logs: Path
    _lines: NewLines = field(init=False)
    _generation: dict[str, Any] = field(default_factory=lambda: {"number": 0, "workers": []})
    _commits: list[dict[str, Any]] = field(default_factory=list)  # of the last two generations
    _coordinator: int = 0

    def __post_init__(self) -> None:
        self._lines = NewLines(self.logs / "events.jsonl")

    def _update(self) -> None:
        """Read new events: all of them again at each look would take a core from the trainings."""
        for event in self._lines.read():
            if event["event"] == "coordinator":
                self._coordinator = event["pid"]
            elif event["event"] == "commit":
                self._commits.append(event)
            elif event["event"] == "generation":
                before, self._generation = self._generation["number"], event
                self._commits = [e for e in self._commits if e["generation"] >= before]

    def all_train(self) -> bool:
        """Whether all machines have committed some steps together since the last loss."""
        if self.process.poll() is not None:
            raise HoldfastError(f"the training of {self.name} has ended", hint=f"see {self.marks / 'output'}")
        self._update()
        number, workers = self._generation["number"], self._generation["workers"]
        done = [e["worker"] for e in self._commits if e["generation"] == number]
        return len(workers) == MACHINES and all(done.count(worker) >= STEPS for worker in workers)

    def lose(self, whom: str, number: int) -> Pause:
        """Kill something of a machine, another one in each round; return what that has cost."""
        # The first agent of ``holdfast run`` has the coordinator, which the others would lose with it.
        keeper = parent_of(self._coordinator)
        pids = {worker: self._pids_of(worker) for worker in self._generation["workers"]}
        candidates = [worker for worker, (_, agent) in pids.items() if agent != keeper]
        victims = self._victims(*pids[candidates[number % len(candidates)]], whom)
        before, then = self._generation["number"], time.time()
        for pid in victims:
            send_signal(pid, signal.SIGKILL)

        def after() -> list[float]:
            self._update()
            return [e["t"] for e in self._commits if e["generation"] > before]

        wait_for(after, self.logs)
        last = max([then, *(e["t"] for e in self._commits if e["generation"] <= before)])
        return Pause(stalled=min(after()) - last, trained_on=last - then)

    def _pids_of(self, worker: str) -> tuple[int, int]:
        """Return the processes of a worker and of its agent."""
        pid, agent = json.loads((self.marks / f"{worker}.pids").read_text())
        return pid, agent

    def _victims(self, worker: int, agent: int, whom: str) -> list[int]:
        """Return the processes to kill, the worker before what is above it."""
        top = agent if self.name == "run" else parent_of(agent)
        if whom == "node":
            return [worker, *(pid for pid in descendants_of(top) if pid != worker), top]
        return [{"worker": worker, "agent": agent, "actor": agent, "raylet": top}[whom]]


@contextmanager
def _agents(folder: Path) -> Iterator[Training]:
    """Three agents of ``holdfast run``, each with a worker; another one in place of each that is killed."""
    _write(folder)
    endpoint = f"127.0.0.1:{free_port()}"
    head = ["--nnodes", f"1:{MACHINES + 99}", "--rdzv-endpoint", endpoint, "--log-dir", "logs"]
    script = f"""
import os, subprocess, sys, time
agents = []
while os.getppid() == {os.getpid()}:
    agents = [agent for agent in agents if agent.poll() is None]
    while len(agents) < {MACHINES}:
        agents.append(subprocess.Popen([sys.executable, "-m", "holdfast.cli", "run", *{head!r}, "train.py"]))
        time.sleep(1.0)
    time.sleep(0.5)  # the survivors may need the cores
"""
    with _started([sys.executable, "-c", script], folder) as process:
        yield Training(name="run", process=process, marks=folder, logs=folder / "logs")


@contextmanager
def _ray(folder: Path) -> Iterator[Training]:
    """A Ray cluster of a head and three nodes, and a trainer on it. A node that is lost is replaced."""
    _write(folder)
    (folder / "driver.py").write_text(DRIVER)
    # Ray would run its workers at nice 15; those of ``holdfast run`` have the same rights as the rest of the machine.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with _started([sys.executable, "driver.py", str(folder)], folder, **settings) as process:
        yield Training(name="ray", process=process, marks=folder, logs=folder / "run" / "holdfast-logs")


def _write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)


@contextmanager
def _started(command: list[str], folder: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process, and in the end the end of all that it has started: they have its folder in their environment."""
    mark = f"HOLDFAST_RACE={folder}"
    settings = environment(HOLDFAST_TOKEN="a secret of the race", HOLDFAST_RACE=str(folder), **more)
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=settings, stdout=out, stderr=out)
    try:
        yield process
    finally:
        for _ in range(3):  # some are started meanwhile
            for path in Path("/proc").glob("[0-9]*"):
                if mark.encode() in _bytes(path / "environ").split(b"\0"):
                    send_signal(int(path.name), signal.SIGKILL)
        process.wait()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process has ended
