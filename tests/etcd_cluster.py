"""A real etcd of several members on loopback, for tests: each member can be killed, stopped and started again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from holdfast.measuring import free_port

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed: apt-get install etcd-server"
)


class EtcdCluster:
    """Starts ``size`` members in a folder; ``options`` are given to all of them."""

    def __init__(self, folder: Path, *, size: int = 3, scheme: str = "http", options: tuple[str, ...] = ()) -> None:
        self.scheme = scheme
        self.ports = [free_port() for _ in range(size)]
        self._peers = [free_port() for _ in range(size)]
        self._folder, self._options = folder, options
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(size):
            self.start(number)

    @property
    def endpoints(self) -> str:
        return ",".join(f"{self.scheme}://127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        """Start a member, for the first time or again with the data that it has."""
        together = ",".join(f"n{each}=http://127.0.0.1:{port}" for each, port in enumerate(self._peers))
        client, peer = f"{self.scheme}://127.0.0.1:{self.ports[number]}", f"http://127.0.0.1:{self._peers[number]}"
        words = ["--name", f"n{number}", "--data-dir", str(self._folder / f"n{number}")]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster", together, "--initial-cluster-state", "new"]
        with (self._folder / f"n{number}.log").open("ab") as log:
            command = ["etcd", *words, *self._options]
            self._members[number] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, number: int) -> None:
        self._members[number].kill()
        self._members.pop(number).wait()

    def pause(self, number: int) -> None:
        """It neither answers nor refuses, as a member whose machine has vanished."""
        self._members[number].send_signal(signal.SIGSTOP)

    def go_on(self, number: int) -> None:
        self._members[number].send_signal(signal.SIGCONT)

    def wait(self, seconds: float = 60.0) -> None:
        """Wait until it has a leader."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[0]}/health", timeout=1) as answer:
                    if b"true" in answer.read():
                        return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError("etcd has no leader")

    def end(self) -> None:
        for member in self._members.values():
            member.kill()
            member.wait()
        self._members.clear()
