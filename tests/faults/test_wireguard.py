"""The recipe of docs/security.md: a run over WireGuard, and nothing of it readable on the cable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.judge import covered
from tests.harness import TRAIN, collect
from tests.namespaces import Machines, machines
from tests.warm import Command

STEPS = 20
TUNNEL = [f"10.8.0.{n + 1}" for n in range(2)]
LISTEN = "51820"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machines]:
    """Two machines with a tunnel between them. Where there is no WireGuard, the test is skipped."""
    missing = [word for word in ("wg", "wireguard-go") if shutil.which(word) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not here (apt install wireguard-tools wireguard-go)")
    with machines(2) as made:
        keys = [subprocess.run(["wg", "genkey"], check=True, capture_output=True).stdout for _ in made.names]
        public = [subprocess.run(["wg", "pubkey"], input=key, check=True, capture_output=True).stdout for key in keys]
        for here, key in enumerate(keys):
            (tmp_path / f"{here}.key").write_bytes(key)
            device, there = (
                f"wg{os.getpid() % 10000}{here}",
                1 - here,
            )  # one name each: their control sockets share /run
            inside(made, here, "wireguard-go", device)
            inside(made, here, "ip", "addr", "add", f"{TUNNEL[here]}/24", "dev", device)
            peer = ("peer", public[there].decode().strip(), "allowed-ips", f"{TUNNEL[there]}/32")
            peer = (*peer, "endpoint", f"{made.addresses[there]}:{LISTEN}")
            own = ("listen-port", LISTEN, "private-key", str(tmp_path / f"{here}.key"))
            inside(made, here, "wg", "set", device, *own, *peer)
            inside(made, here, "ip", "link", "set", device, "mtu", "1420", "up")
        yield made


def inside(made: Machines, machine: int, *words: str) -> None:
    subprocess.run(["ip", "netns", "exec", made.names[machine], *words], check=True, capture_output=True)


class Eavesdropper:
    """Somebody at the router, who sees every packet between the two."""

    def __init__(self, made: Machines) -> None:
        command = ["ip", "netns", "exec", made.router, sys.executable, "-c", LISTENING]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "listening\n"

    def report(self) -> dict[str, int]:
        """Packets of TCP and UDP, and those with words of our messages in them."""
        found: dict[str, int] = json.loads(self._process.communicate()[0])
        return found


LISTENING = """
import collections, json, select, socket, sys
seen = collections.Counter(tcp=0, udp=0, readable=0)
cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
cable.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**23)
print("listening", flush=True)
while sys.stdin not in (ready := select.select([cable, sys.stdin], [], [])[0]) or cable in ready:
    packet = cable.recv(65536)
    if packet[12:14] == b"\\x08\\x00":
        seen[{6: "tcp", 17: "udp"}.get(packet[23], "other")] += 1
        seen["readable"] += b'"type"' in packet
print(json.dumps(seen))
"""


@pytest.mark.parametrize("way", ["tunnel", covered("a control: without the tunnel all is readable", "cable")])
def test_a_run_over_wireguard(two: Machines, tmp_path: Path, undisturbed: Any, way: str) -> None:
    """Unchanged: only the endpoint is the tunnel's address. A worker is killed on the way."""
    head = TUNNEL[0] if way == "tunnel" else two.addresses[0]
    environment = {"HOLDFAST_TOKEN": "a secret of the tests", "STEPS": str(STEPS), "HOLDFAST_TRACE": "1"}
    environment |= {"RESULTS": str(tmp_path / "results.jsonl"), "HOLDFAST_FAULTS": "kill worker=1.0 step=9 phase=vote"}
    eavesdropper = Eavesdropper(two)
    agents = []
    for machine, name in enumerate(two.names):
        (tmp_path / str(machine)).mkdir()
        logs = str(tmp_path / str(machine) / "logs")
        words = ("run", "-n", "2", "--nnodes", "2", "--rdzv-endpoint", f"{head}:29700", "--log-dir", logs, str(TRAIN))
        agents.append(Command(*words, folder=tmp_path, name=str(machine), namespace=name, **environment))
    assert [agent.wait(120) for agent in agents] == [0, 0], [agent.stderr for agent in agents]
    result = collect(tmp_path)
    assert result.sha256 == undisturbed(STEPS).sha256
    assert [e["worker"] for e in result.of("failure")] == ["1.0"]
    seen = eavesdropper.report()
    if way == "tunnel":
        assert seen["udp"] > 100
        assert seen["tcp"] == seen["readable"] == 0
    else:
        assert seen["readable"] > 0
