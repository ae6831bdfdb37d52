"""A real SLURM of four nodes on this machine, for tests: munge, slurmctld and a slurmd for each node."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.measuring import free_port
from tests.harness import wait_until

PARTS = ("slurmctld", "slurmd", "srun", "munged")
needs_slurm = pytest.mark.skipif(
    any(shutil.which(part) is None for part in PARTS) or os.geteuid() != 0,
    reason="needs root, and SLURM: apt-get install slurmctld slurmd slurm-client munge",
)
NODES = 4
CONFIGURATION = """
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmctldTimeout=10
SlurmdTimeout=120
InactiveLimit=0
KillWait=10
ReturnToService=2
JobRequeue=1
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=8
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process as /proc shows it."""

    pid: int
    parent: int
    environment: bytes
    command: bytes


class SlurmCluster:
    """Nodes n1 to n4, with two cores each. ``folder``: a short path, as sockets need it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir()
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o400)
        ports = [free_port() for _ in range(NODES + 1)]
        name = socket.gethostname()
        nodes = [
            f"NodeName=n{number} NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[number]} CPUs=2 RealMemory=2000"
            for number in range(1, NODES + 1)
        ]
        text = CONFIGURATION.format(name=name, folder=folder, ports=ports).replace("PartitionName=low", "{nodes}", 1)
        text = text.replace("{nodes}", "\n".join(nodes) + "\nPartitionName=low", 1)
        (folder / "slurm.conf").write_text(text)
        self._start("munged", "--foreground", "--force", f"--socket={folder}/munge.sock", f"--key-file={folder}/key")
        wait_until("munge answers", (folder / "munge.sock").exists)
        self._start("slurmctld", "-D", "-c")
        for number in range(1, NODES + 1):
            self._start("slurmd", "-D", "-N", f"n{number}")

    def _start(self, *words: str) -> None:
        """Start a daemon. munged keeps its own files in the folder, too."""
        extra = ()
        if words[0] == "munged":
            extra = tuple(f"--{kind}-file={self.folder}/munged.{kind}" for kind in ("pid", "log", "seed"))
        with (self.folder / f"{words[0]}.out").open("ab") as out:
            command = [shutil.which(words[0]) or words[0], *words[1:], *extra]
            self._daemons[words[-1]] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def ask(self, *words: str) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def wait(self) -> None:
        """Wait until all nodes are idle."""

        def idle() -> bool:
            return self.ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == str(NODES)

        wait_until("all nodes are idle", idle)

    def submit(self, script: Path, options: Sequence[str], *words: str, **environment: str) -> str:
        """Start a batch job with options of sbatch, and return its number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script), *words],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.strip()

    def lose(self, node: str) -> None:
        """Kill a node: its slurmd, and all processes of steps on it."""
        self._daemons.pop(node).kill()
        tasks = [p for p in _processes() if f"SLURMD_NODENAME={node}".encode() in p.environment and self._is_ours(p)]
        parents = {p.parent for p in tasks}
        for process in _processes():
            if process in tasks or (process.pid in parents and b"slurmstepd" in process.command):
                _kill(process.pid)
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")  # long before SlurmdTimeout

    def _is_ours(self, process: Process) -> bool:
        return f"SLURM_CONF={self.folder}/slurm.conf".encode() in process.environment

    def revive(self, node: str) -> None:
        """Start the node again."""
        self._start("slurmd", "-D", "-N", node)
        self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def end(self) -> None:
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in filter(self._is_ours, _processes()):
            _kill(process.pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _processes() -> list[Process]:
    """All processes but this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = [(folder / name).read_bytes() for name in ("environ", "cmdline", "stat")]
        except OSError:
            continue  # it has ended meanwhile
        parent = int(words[2].rpartition(b")")[2].split()[1])
        found.append(Process(pid=int(folder.name), parent=parent, environment=words[0], command=words[1]))
    return [process for process in found if process.pid != os.getpid()]


def wait_for_state(cluster: SlurmCluster, job: str, *states: str, seconds: float = 60.0) -> str:
    """Wait until a job is in one of these states, and return it."""
    end = time.monotonic() + seconds
    state = ""
    while time.monotonic() < end:
        state = cluster.ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T")
        if state in states:
            return state
        time.sleep(0.1)
    raise AssertionError(f"job {job} is {state}, not one of {states}")
