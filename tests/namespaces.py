"""Machines of a cluster, played by network namespaces of this one: own address, own subnet, a link that can be cut.

Each namespace ``hf-<pid>-<n>`` is joined by a pair of virtual ethernet devices to one more, the router. What a
machine runs can be killed at once (its power fails) and its link can be cut (nothing is closed, all is silent).
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import TRAIN
from tests.warm import Command

PORT = 29700


def _ip(*words: str, check: bool = True) -> str:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout


class Machines:
    """So many namespaces, and the agents that run in them."""

    def __init__(self, number: int) -> None:
        self.names = [f"hf-{os.getpid()}-{n}" for n in range(number)]
        self.router = f"hf-{os.getpid()}-router"
        self.addresses = [f"10.77.{n}.2" for n in range(number)]
        self.endpoint = f"{self.addresses[0]}:{PORT}"
        self.agents: dict[int, Command] = {}

    def build(self) -> None:
        atexit.register(self.close)
        for name in [self.router, *self.names]:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("netns", "exec", self.router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for n, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            peer = ("peer", "name", "net", "netns", name)
            _ip("link", "add", f"to{n}", "netns", self.router, "type", "veth", *peer)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "net")
            _ip("-n", self.router, "addr", "add", f"10.77.{n}.1/24", "dev", f"to{n}")
            _ip("-n", self.router, "link", "set", f"to{n}", "up")
            _ip("-n", name, "link", "set", "net", "up")
            _ip("-n", name, "route", "add", "default", "via", f"10.77.{n}.1")

    # --- the network -----------------------------------------------------------------------------

    def cut(self, machine: int) -> None:
        """The router drops all from and to it. Nothing is closed, no cable is seen to be unplugged: silence."""
        for rule in self._silence(machine):
            _ip("-n", self.router, "rule", "add", *rule)

    def mend(self, machine: int) -> None:
        for rule in self._silence(machine):
            _ip("-n", self.router, "rule", "del", *rule)

    def separate(self, one: int, other: int) -> None:
        """The router drops all between two machines; both still reach the others."""
        for a, b in ((one, other), (other, one)):
            _ip("-n", self.router, "rule", "add", "iif", f"to{a}", "to", self.addresses[b], "blackhole")

    def refuse(self, one: int, other: int) -> None:
        """The router refuses new connections between two machines, as a firewall does. Skips without nft."""
        if shutil.which("nft") is None:
            pytest.skip("nft is not here (apt install nftables)")
        rules = ["table ip hf {", "chain forward { type filter hook forward priority 0;"]
        for a, b in ((one, other), (other, one)):
            ends = f"ip saddr {self.addresses[a]} ip daddr {self.addresses[b]}"
            rules.append(f"{ends} tcp flags syn / fin,syn,rst,ack reject with tcp reset;")
        command = ["ip", "netns", "exec", self.router, "nft", "-f", "-"]
        subprocess.run(command, input="\n".join([*rules, "}", "}"]), text=True, check=True, capture_output=True)

    def _silence(self, machine: int) -> list[tuple[str, ...]]:
        return [("iif", f"to{machine}", "blackhole"), ("to", self.addresses[machine], "blackhole")]

    # --- what runs on them -----------------------------------------------------------------------

    def start(self, machine: int, folder: Path, *options: str, script: Path = TRAIN, **environment: str) -> None:
        """An agent; its logs go to ``folder/<machine>/logs``, results of all machines to ``folder/results.jsonl``."""
        logs = folder / str(machine) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        words = ("run", "--rdzv-endpoint", self.endpoint, "--log-dir", str(logs), *options, str(script))
        settings = {"HOLDFAST_TOKEN": "a secret of the tests", "RESULTS": str(folder / "results.jsonl"), **environment}
        self.agents[machine] = Command(*words, folder=logs, namespace=self.names[machine], **settings)

    def processes(self, machine: int) -> list[int]:
        """All that runs in the namespace: agent, coordinator, zygote, workers. Nothing else ever does."""
        return [int(pid) for pid in _ip("netns", "pids", self.names[machine], check=False).split()]

    def kill(self, machine: int) -> None:
        """Its power fails."""
        for pid in self.processes(machine):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def wait(self, machine: int, seconds: float = 60.0) -> int:
        """The exit code of its agent."""
        return self.agents[machine].wait(seconds)

    def ended(self) -> list[int]:
        """The machines whose agents have ended."""
        return [machine for machine, agent in self.agents.items() if agent.poll() is not None]

    def is_empty(self, machine: int, seconds: float) -> bool:
        """Whether all that runs there ends by itself within so many seconds."""
        end = time.monotonic() + seconds
        while self.processes(machine) and time.monotonic() < end:
            time.sleep(0.05)
        return not self.processes(machine)

    def close(self) -> None:
        atexit.unregister(self.close)
        for machine, name in enumerate(self.names):
            while self.processes(machine):  # a zygote may have been forking
                self.kill(machine)
                time.sleep(0.02)
            _ip("netns", "del", name, check=False)
        _ip("netns", "del", self.router, check=False)
        for agent in self.agents.values():
            agent.wait()


@contextmanager
def machines(number: int) -> Iterator[Machines]:
    """Makes namespaces, and removes them whatever happens. Where there can be none, the test is skipped."""
    missing = [word for word in ("ip", "sysctl") if shutil.which(word) is None]
    if missing or os.geteuid() != 0:
        needs = f"{' and '.join(missing)} (iproute2, procps)" if missing else "root"
        pytest.skip(f"network namespaces need {needs}")
    _sweep()
    made = Machines(number)
    try:
        made.build()
    except subprocess.CalledProcessError as e:
        made.close()
        pytest.skip(f"this machine cannot make network namespaces: {' '.join(e.cmd)}: {e.stderr}")
    try:
        yield made
    finally:
        made.close()


def _sweep() -> None:
    """Namespaces of tests that were killed themselves: their process is gone."""
    for name in re.findall(r"^hf-\d+-\w+", _ip("netns", "list", check=False), re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            _ip("netns", "del", name, check=False)
