"""Contestants of the races in which every worker holds the whole model: DDP, torchft, a restart, and holdfast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.running import BENCH, Running
from holdfast.errors import HoldfastError
from holdfast.measuring import free_port

# torch first: a package that depends on it must not choose another build.
PEER_PACKAGES = [["torch==2.13.0"], ["numpy==2.4.6", "torchft-nightly==2026.10.26"]]
PEER_SETTINGS = {
    "NO_PROXY": "127.0.0.1,localhost",
    "RUST_LOG": "error",
    # Without it torchrun's workers talk to the store of their dead predecessors (pytorch #135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Size of the model and of a step.

    >>> Workload(workers=2).arguments(steps=5)[:4]
    ['--steps', '5', '--micro-batches', '2']
    """

    workers: int = 2  # processes
    team: int = 1  # of them that hold the model together
    micro_batches: int = 2  # per worker
    micro_batch: int = 4  # samples
    width: int = 256
    depth: int = 4
    seq: int = 64  # bytes of a text

    def arguments(self, *, steps: int) -> list[str]:
        """Return the arguments of a contestant's script that trains so many steps."""
        shown = {
            "steps": steps,
            "micro-batches": self.micro_batches,
            "micro-batch": self.micro_batch,
            "width": self.width,
            "depth": self.depth,
            "seq": self.seq,
        }
        return [word for name, value in shown.items() for word in (f"--{name}", str(value))]


def peer_python() -> Path:
    """Return the interpreter of the peers' environment, made on first use."""
    python = (BENCH / "venv" / "bin" / "python").absolute()
    done = BENCH / "venv" / "ready"
    if not done.exists():
        print("making the peers' venv under .bench/ (once; about a minute)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(BENCH / "venv")], check=True)
        for packages in PEER_PACKAGES:
            try:
                subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
            except subprocess.CalledProcessError as e:
                raise HoldfastError(f"cannot install {packages} for the peers", hint="see pip's output above") from e
        done.touch()
    return python


@contextmanager
def racing(name: str, workload: Workload, *, steps: int, folder: Path, burst: int = 0) -> Iterator[Running]:
    """Start a contestant, and end it afterwards.

    ``name``: ddp, restart, torchft, torchft-tuned, torchft-all, holdfast-fast or holdfast-exact; with teams: hsdp,
    torchft, torchft-tuned, torchft-all or holdfast-exact. With ``burst`` it waits for a turn before every so many
    steps. Its files are in ``folder``.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    running = Running(folder=folder, workers=workload.workers)
    arguments = [*workload.arguments(steps=steps), "--progress", str(running.progress), "--burst", str(burst)]
    if burst:
        running.make_turns()
    try:
        if name.startswith("holdfast"):
            _start_holdfast(running, name.removeprefix("holdfast-"), workload.team, arguments)
        elif name.startswith("torchft"):
            _start_torchft(running, name, workload.team, arguments)
        else:
            _start_torchrun(running, name, workload.team, arguments)
        yield running
    finally:
        running.stop()


def _start_holdfast(running: Running, numerics: str, team: int, arguments: list[str]) -> None:
    # No replacements, as in torchft's entries: a starting worker would take the survivors' cores.
    agent = ["run", "-n", str(running.workers), "--log-dir", str(running.folder / "logs"), "--max-restarts", "0"]
    script = ["-m", "bench.data_parallel.holdfast_entry", "--numerics", numerics, "--workers", str(running.workers)]
    if team > 1:
        agent += ["--team", str(team)]
        script = ["-m", "bench.data_parallel.teams_entry", "--teams", str(running.workers // team)]
    running.start([sys.executable, "-m", "holdfast.cli", *agent, *script, *arguments])


def _torchrun(processes: int) -> list[str]:
    """Return the command that starts so many processes of a module: its name and arguments follow."""
    torchrun = str(peer_python().parent / "torchrun")
    return [torchrun, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)]


def _start_torchrun(running: Running, name: str, team: int, arguments: list[str]) -> None:
    options: list[str] = []
    if name == "restart":
        options = ["--max-restarts", "3"]
        arguments = [*arguments, "--checkpoint", str(running.folder / "checkpoint.pt")]
    if team > 1:
        arguments = [*arguments, "--team", str(team)]
    running.start([*_torchrun(running.workers), *options, "-m", f"bench.peers.{name}", *arguments], **PEER_SETTINGS)


def _start_torchft(running: Running, name: str, team: int, arguments: list[str]) -> None:
    python = peer_python()
    address = f"127.0.0.1:{free_port()}"
    tuned = ["--heartbeat_timeout_ms", "500"] if name == "torchft-tuned" else []
    groups = running.workers // team
    minimum = str(groups) if name == "torchft-all" else "1"
    lighthouse = str(python.parent / "torchft_lighthouse")
    running.start([lighthouse, "--bind", address, "--min_replicas", minimum, *tuned], **PEER_SETTINGS)
    # torchrun ends the mates of a rank that has died, as holdfast's agent does.
    launch, module = ([str(python)], "torchft_ddp") if team == 1 else (_torchrun(team), "torchft_fsdp")
    for group in range(groups):
        command = [*launch, "-m", f"bench.peers.{module}", "--worker", str(group), *arguments]
        if name == "torchft-tuned":
            # Else two survivors that wait for each other in a half-done reduction wait 60 s.
            command += ["--pg-timeout", "5"]
        running.start(command, **PEER_SETTINGS, TORCHFT_LIGHTHOUSE=f"http://{address}")
