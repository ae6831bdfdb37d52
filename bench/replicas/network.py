"""Slow network on one machine: a namespace for each worker, joined by a bridge, with a limit on what each sends.

``tx_bytes`` of a worker's device counts what it sent, with headers. The machines that this was written for have no
``netem``, so a link has a rate but no latency of its own. Without root or iproute2, workers share the loopback
device: there is no limit, and all results but times are the same.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "hfs"  # of the namespaces' names: holdfast sync
DEVICE = "net"  # name of the device inside each namespace
_numbers = itertools.count()  # a process may have several networks


@dataclass(frozen=True, kw_only=True)
class Network:
    """Prefix of each worker's command, which puts it into its namespace, and the device it talks through."""

    rate: int | None  # Mbit a second; None: no limit
    device: str
    prefixes: list[list[str]] = field(default_factory=list)  # one for each worker

    @property
    def counts_all(self) -> bool:
        """Whether the device's counter is of all workers together."""
        return self.device == "lo"


def why_not() -> str | None:
    """Return why there can be no namespaces here, in words, or None if there can."""
    missing = [word for word in ("ip", "tc") if shutil.which(word) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) missing"
    if os.geteuid() != 0:
        return "not root"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as e:
        return f"no network namespaces: {str(e.stderr).strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def loopback(workers: int) -> Iterator[Network]:
    """Give the loopback device: no limit, no namespaces."""
    yield Network(rate=None, device="lo", prefixes=[[]] * workers)


@contextmanager
def namespaces(workers: int, rate: int | None) -> Iterator[Network]:
    """Make namespaces with a limit of ``rate`` Mbit/s, and remove them at the end, whatever happens."""
    _sweep()
    made: list[str] = []
    base = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"

    def remove() -> None:
        while made:
            _ip("netns", "del", made.pop(), check=False)

    atexit.register(remove)
    try:
        switch = _make(made, f"{base}-switch")
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        names = [_make(made, f"{base}-{n}") for n in range(workers)]
        for n, name in enumerate(names):
            _join(name, n, switch)
            if rate is not None:
                _limit(name, rate)
        yield Network(rate=rate, device=DEVICE, prefixes=[["ip", "netns", "exec", name] for name in names])
    finally:
        remove()
        atexit.unregister(remove)


def _make(made: list[str], name: str) -> str:
    _ip("netns", "add", name)
    made.append(name)
    _ip("-n", name, "link", "set", "lo", "up")
    return name


def _join(name: str, n: int, switch: str) -> None:
    _ip("link", "add", f"port{n}", "netns", switch, "type", "veth", "peer", "name", DEVICE, "netns", name)
    _ip("-n", switch, "link", "set", f"port{n}", "master", "bridge0", "up")
    _ip("-n", name, "addr", "add", f"10.78.0.{n + 1}/24", "dev", DEVICE)
    _ip("-n", name, "link", "set", DEVICE, "up")


def _limit(name: str, rate: int) -> None:
    burst = bucket(rate)
    words = ("tbf", "rate", f"{rate}mbit", "burst", str(burst), "latency", "100ms")
    command = ["tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *words]
    subprocess.run(command, check=True, capture_output=True, text=True)


def bucket(rate: int) -> int:
    """Return bytes that may be sent at once.

    They are 64 KB, or 5 ms of a fast link, whose bucket would otherwise be empty between two ticks.

    >>> bucket(20), bucket(1000)
    (65536, 625000)
    """
    return max(65536, rate * 1_000_000 // 8 // 200)


def read_sent(device: str) -> int:
    """Return the bytes sent through a device, in the namespace of the caller."""
    return int(Path("/sys/class/net", device, "statistics", "tx_bytes").read_text())


def _ip(*words: str, check: bool = True) -> str:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout


def _sweep() -> None:
    """Remove namespaces of benches whose process is gone."""
    for name in re.findall(rf"^{PREFIX}-\d+-[\w-]+", _ip("netns", "list", check=False), re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            _ip("netns", "del", name, check=False)
