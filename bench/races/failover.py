"""Race of losses with an elected coordinator: the machine that holds its role, and another one, killed or vanished.

Three machines are three agents with a worker each, on this machine, and three members of etcd. A machine is *killed*
with all its processes, whose connections close; or it *vanishes*: its processes are stopped, and nothing is closed.
"""

from __future__ import annotations

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
from holdfast.cluster.quorum.keeper import LEASE_SECONDS
from holdfast.errors import UsageError
from holdfast.measuring import free_port, spread

COLUMNS = {"ms": "ms to the survivors' next commit: median (range)"}
MACHINES = 3
CONTESTANTS = [(how, whom) for how in ("killed", "vanished") for whom in ("another", "coordinator")]
SCRIPT = """
import time, torch, holdfast
from torch.utils.data import TensorDataset
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
run = holdfast.Run(layers=torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss, global_batch=12, micro_batch=4,
                   optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), data=TensorDataset(x, x.sum(1, True)))
for step in run.steps(100_000):
    time.sleep(0.02)
"""


def race(*, rounds: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Lose a machine of each kind in each round; return results and bars."""
    if shutil.which("etcd") is None:
        raise UsageError("this race needs etcd", hint="apt-get install etcd-server")
    folder = BENCH / "failover"
    shutil.rmtree(folder, ignore_errors=True)
    times: dict[str, list[float]] = {_name(*each): [] for each in CONTESTANTS}
    with _etcd(folder / "etcd") as endpoints:
        for number in range(rounds):
            shift = number % len(CONTESTANTS)
            for how, whom in CONTESTANTS[shift:] + CONTESTANTS[:shift]:
                name = _name(how, whom)
                seconds = _lose(folder / f"{name.replace(' ', '-')}-{number}", endpoints, how, whom)
                times[name].append(1000 * seconds)
                say(f"failover, round {number + 1}/{rounds}: {name}: {1000 * seconds:.0f} ms to the next commit")
    beyond = {
        how: statistics.median(times[_name(how, "coordinator")]) - statistics.median(times[_name(how, "another")])
        for how in ("killed", "vanished")
    }
    bars = {
        f"ms that the coordinator's machine costs beyond another's, {how}": Bar(
            value=value, bar=1000.0 * LEASE_SECONDS, at_most=True
        )
        for how, value in beyond.items()
    }
    return {name: {"ms": spread(values)} for name, values in times.items()}, bars


def _name(how: str, whom: str) -> str:
    return f"{whom} {how}"


@contextmanager
def _etcd(folder: Path) -> Iterator[str]:
    """Three members on loopback."""
    ports = [(free_port(), free_port()) for _ in range(3)]
    together = ",".join(f"n{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(ports))
    members = []
    folder.mkdir(parents=True)
    for number, (client, peer) in enumerate(ports):
        mine, theirs = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        words = ["--name", f"n{number}", "--data-dir", str(folder / f"n{number}"), "--initial-cluster", together]
        words += ["--listen-client-urls", mine, "--advertise-client-urls", mine]
        words += ["--listen-peer-urls", theirs, "--initial-advertise-peer-urls", theirs]
        with (folder / f"n{number}.log").open("wb") as log:
            members.append(subprocess.Popen(["etcd", *words], stdout=log, stderr=log))
    try:
        yield ",".join(f"127.0.0.1:{client}" for client, _ in ports)
    finally:
        for member in members:
            member.kill()
            member.wait()


def _lose(folder: Path, endpoints: str, how: str, whom: str) -> float:
    """Run three machines, lose one; return the seconds from then to the next commit of a new generation."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    agents = [_start(folder, number, endpoints) for number in range(MACHINES)]
    try:
        wait_for(lambda: len({e["worker"] for e in _events(folder, "commit") if e["step"] > 20}) == MACHINES, folder)
        (elected,) = [n for n in range(MACHINES) if any(e["event"] == "elected" for e in _log(folder, n))]
        lost = elected if whom == "coordinator" else (elected + 1) % MACHINES
        before = max(e["generation"] for e in _events(folder, "commit"))
        then = time.time()
        for pid in _pids(folder, lost, agents[lost].pid):
            send_signal(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)

        def again() -> list[float]:
            return [e["t"] for e in _events(folder, "commit") if e["generation"] > before]

        wait_for(again, folder)
        return min(again()) - then
    finally:
        for number, agent in enumerate(agents):
            for pid in _pids(folder, number, agent.pid):
                send_signal(pid, signal.SIGKILL)
            agent.wait()


def _start(folder: Path, number: int, endpoints: str) -> subprocess.Popen[bytes]:
    words = ["run", "--nnodes", f"{MACHINES - 1}:{MACHINES}", "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints]
    words += ["--rdzv-id", folder.name, "--log-dir", f"logs{number}", "train.py"]
    command = [sys.executable, "-m", "holdfast.cli", *words]
    settings = environment(HOLDFAST_TOKEN="a secret of the race")
    with (folder / f"agent{number}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=settings, stdout=log, stderr=log, start_new_session=True)


def _log(folder: Path, number: int) -> list[dict[str, Any]]:
    path = folder / f"logs{number}" / "events.jsonl"
    return list(read_events(path)) if path.exists() else []


def _events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [e for number in range(MACHINES) for e in _log(folder, number) if e["event"] == name]


def _pids(folder: Path, number: int, agent: int) -> list[int]:
    """Return the processes of a machine."""
    return [agent, *(e["pid"] for e in _log(folder, number) if e["event"] in ("coordinator", "zygote", "started"))]
