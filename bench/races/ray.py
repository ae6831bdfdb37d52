"""Race of losses on Ray: workers of ``HoldfastTrainer`` and of ``holdfast run``, killed in turns in two trainings.

Both trainings go on side by side, on three machines each: three agents with a worker, and three nodes of a Ray cluster
on loopback. A *worker* is the process that trains; an *agent* is its parent's, under Ray the actor. Either is killed,
and another one comes; a kill of the next contestant waits until all three train again.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.race_report import Bar, Say
from bench.running import BENCH, environment, send_signal, wait_for
from holdfast.cluster.events import read_events
from holdfast.errors import UsageError
from holdfast.measuring import free_port, spread

COLUMNS = {"ms": "ms without a commit: median (range)", "of_run": "times holdfast run's"}
MACHINES = 3
WHOM = ("worker", "agent")
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
import sys
import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from holdfast.integrations.ray import HoldfastTrainer
from train import train
cluster = Cluster()
for node in range(4):  # the first is the head; 127.0.0.1 Ray takes for the address of the network
    cluster.add_node(num_cpus=int(node > 0), node_ip_address=f"127.0.0.{2 + node}", include_dashboard=False)
ray.init(address=cluster.address)
HoldfastTrainer(train, train_loop_config={"folder": sys.argv[1]}, scaling_config=ScalingConfig(num_workers=(2, 3)),
                run_config=RunConfig(name="run", storage_path=sys.argv[1])).fit()
"""


def race(*, rounds: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Kill a worker and an agent of both trainings in each round; return results and bars."""
    try:
        import ray  # noqa: F401
    except ImportError as e:
        raise UsageError("this race needs Ray", hint="pip install 'holdfast[ray]'") from e
    folder = (BENCH / "ray").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    times: dict[str, list[float]] = {f"{kind}, {whom}": [] for whom in WHOM for kind in ("run", "ray")}
    with _agents(folder / "run") as run, _ray(folder / "ray") as ray_logs:
        logs = {"run": run, "ray": ray_logs}
        for number in range(rounds):
            for whom in WHOM:
                for kind in ("run", "ray") if number % 2 else ("ray", "run"):
                    milliseconds = 1000 * _lose(logs[kind], whom, number)
                    times[f"{kind}, {whom}"].append(milliseconds)
                    say(f"ray, round {number + 1}/{rounds}: {kind}, {whom}: {milliseconds:.0f} ms without a commit")
    results: dict[str, Any] = {name: {"ms": spread(values)} for name, values in times.items()}
    bars = {}
    for whom in WHOM:
        pairs = zip(times[f"ray, {whom}"], times[f"run, {whom}"], strict=True)
        results[f"ray, {whom}"]["of_run"] = spread([ours / theirs for ours, theirs in pairs])
        ratio = statistics.median(times[f"ray, {whom}"]) / statistics.median(times[f"run, {whom}"])
        bars[f"{whom}: of holdfast run"] = Bar(value=ratio, bar=1.5, at_most=True)
    return results, bars


@contextmanager
def _agents(folder: Path) -> Iterator[Path]:
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
    with _started([sys.executable, "-c", script], folder):
        yield folder / "logs"


@contextmanager
def _ray(folder: Path) -> Iterator[Path]:
    """A Ray cluster of a head and three nodes, and a trainer on it."""
    _write(folder)
    (folder / "driver.py").write_text(DRIVER)
    # Ray would run its workers at nice 15; those of ``holdfast run`` have the same rights as the rest of the machine.
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with _started([sys.executable, "driver.py", str(folder)], folder, **settings):
        yield folder / "run" / "holdfast-logs"


def _write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)


@contextmanager
def _started(command: list[str], folder: Path, **more: str) -> Iterator[None]:
    """A process, and in the end the end of all that it has started: they have its folder in their environment."""
    mark = f"HOLDFAST_RACE={folder}"
    settings = environment(HOLDFAST_TOKEN="a secret of the race", HOLDFAST_RACE=str(folder), **more)
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=settings, stdout=out, stderr=out)
    try:
        yield
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


def _lose(logs: Path, whom: str, number: int) -> float:
    """Kill a worker or its agent when all train; return the seconds without a commit that follow.

    They count from the kill, or from the last commit with the lost worker: until the kernel has ended all threads of an
    actor's process its worker trains on.
    """
    members = _all_train(logs)
    folder = logs.parent if logs.name == "logs" else logs.parent.parent
    coordinator = [e["pid"] for e in read_events(logs / "events.jsonl") if e["event"] == "coordinator"][-1]
    keeper = int(_bytes(Path(f"/proc/{coordinator}/stat")).rpartition(b")")[2].split()[1])
    pids = {worker: json.loads((folder / f"{worker}.pids").read_text()) for worker in members}
    # The first agent of ``holdfast run`` has the coordinator, which the others would lose with it.
    candidates = [worker for worker in members if pids[worker][1] != keeper]
    lost = candidates[number % len(candidates)]
    before, then = _generations(logs)[-1]["number"], time.time()
    os.kill(pids[lost][0 if whom == "worker" else 1], signal.SIGKILL)

    def commits() -> tuple[list[float], list[float]]:
        found = [e for e in read_events(logs / "events.jsonl") if e["event"] == "commit"]
        return [e["t"] for e in found if e["generation"] <= before], [e["t"] for e in found if e["generation"] > before]

    wait_for(lambda: commits()[1], logs)
    old, new = commits()
    return min(new) - max(then, *old)


def _all_train(logs: Path) -> list[str]:
    """Wait until all machines have committed some steps together; return their workers."""

    def together() -> list[str]:
        found = _generations(logs)
        if not found or len(found[-1]["workers"]) < MACHINES:
            return []
        steps = [e for e in read_events(logs / "events.jsonl") if e["event"] == "commit"]
        done = [e["worker"] for e in steps if e["generation"] == found[-1]["number"]]
        return found[-1]["workers"] if all(done.count(worker) > 10 for worker in found[-1]["workers"]) else []

    wait_for(together, logs)
    return together()


def _generations(logs: Path) -> list[dict[str, Any]]:
    path = logs / "events.jsonl"
    return [e for e in read_events(path) if e["event"] == "generation"] if path.exists() else []
