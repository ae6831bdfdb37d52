"""Several agents: one machine with several agents, and hosts in network namespaces that lose their link."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.events import read_events
from holdfast.measuring import free_port
from tests.harness import TRAIN, Result

STEPS = 120  # slow ones until the test is in a hurry: time for the second host to start


def start_agent(
    folder: Path, name: str, *options: str, inside: str = "", token: str = "secret", **environment: str
) -> subprocess.Popen[str]:
    (folder / name).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "holdfast.cli", "run", "--log-dir", str(folder / name / "logs"), *options]
    prefix = ["ip", "netns", "exec", inside] if inside else []
    settings = {
        "HOLDFAST_TOKEN": token,
        "HOLDFAST_TRACE": "1",
        "OMP_NUM_THREADS": "1",
        "RESULTS": str(folder / "results.jsonl"),
        "STEPS": str(STEPS),
        "WANTED": "99",
        "PATIENT": "2",
        "PAUSE": "0.25",
        "HURRY": str(folder / "hurry"),
        **environment,
    }
    return subprocess.Popen(
        [*prefix, *command, str(TRAIN)],
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def hurry(folder: Path) -> None:
    """All that was to be seen was seen: the other steps need not be slow."""
    (folder / "hurry").touch()


def collect(folder: Path, code: int) -> Result:
    events = [e for path in sorted(folder.glob("*/logs/events.jsonl")) for e in read_events(path)]
    events.sort(key=lambda e: e["t"])
    results = folder / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    return Result(code=code, events=events, said=[], results=[json.loads(line) for line in lines])


def wait_for_step(folder: Path, step: int, workers: int) -> None:
    for _ in range(6000):
        result = collect(folder, 0)
        if len({e["worker"] for e in result.of("commit") if e["step"] >= step}) >= workers:
            return
        time.sleep(0.01)
    raise TimeoutError(f"step {step} never came on {workers} workers")


def test_two_agents_and_one_is_preempted(tmp_path: Path, undisturbed) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    first = start_agent(tmp_path, "first", *options)
    wait_for_step(tmp_path, 1, 2)
    second = start_agent(tmp_path, "second", *options)
    wait_for_step(tmp_path, 1, 4)  # host 1 came in later, by itself
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 128 + signal.SIGTERM
    hurry(tmp_path)
    assert first.wait(60) == 0
    result = collect(tmp_path, 0)
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses
    assert not result.of("failure"), "leaving is no failure"


def test_a_whole_host_is_killed(tmp_path: Path, undisturbed) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    first = start_agent(tmp_path, "first", *options)
    wait_for_step(tmp_path, 1, 2)
    second = start_agent(tmp_path, "second", *options)
    wait_for_step(tmp_path, 1, 4)
    second.kill()  # its workers notice that their agent is gone, and end
    second.wait()
    hurry(tmp_path)
    assert first.wait(60) == 0
    result = collect(tmp_path, 0)
    assert result.sha256 == undisturbed(STEPS).sha256
    assert {e["worker"] for e in result.of("failure")} == {"1.0", "1.1"}


def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("-n", "1", "--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    first = start_agent(tmp_path, "first", *options)
    wait_for_step(tmp_path, 1, 1)
    second = start_agent(tmp_path, "second", *options, token="guess")
    _, said = second.communicate(timeout=60)
    assert second.returncode == 2
    assert "wrong token" in said
    assert "HOLDFAST_TOKEN" in said
    hurry(tmp_path)
    assert first.wait(60) == 0


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        agent = start_agent(tmp_path, "agent", "-n", "1", "--rdzv-endpoint", f"127.0.0.1:{other.getsockname()[1]}")
        _, said = agent.communicate(timeout=60)
    assert agent.returncode == 2
    assert "is in use by another program" in said


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces joined by a veth pair: (namespace, address) each."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 to make network namespaces")
    made = [(f"hf{os.getpid()}a", "10.77.0.1"), (f"hf{os.getpid()}b", "10.77.0.2")]
    try:
        for name, _ in made:
            _ip("netns", "add", name)
        _ip("link", "add", "hf0", "netns", made[0][0], "type", "veth", "peer", "name", "hf0", "netns", made[1][0])
        for name, address in made:
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "hf0")
            _ip("-n", name, "link", "set", "hf0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as e:
        for name, _ in made:
            _ip("netns", "del", name, check=False)
        pytest.skip(f"this machine cannot make network namespaces: {e.stderr}")
    yield made
    for name, _ in made:
        _ip("netns", "del", name, check=False)


def test_a_host_whose_traffic_vanishes(tmp_path: Path, undisturbed, hosts: list[tuple[str, str]]) -> None:
    """The link goes down: no reset, no end of stream, only silence."""
    (near, address), (far, _) = hosts
    common: tuple[Any, ...] = ("-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", f"{address}:29700")
    first = start_agent(tmp_path, "first", *common, "--heartbeat-timeout", "1", inside=near)
    wait_for_step(tmp_path, 1, 2)
    second = start_agent(tmp_path, "second", *common, "--heartbeat-timeout", "1", inside=far)
    wait_for_step(tmp_path, 1, 4)
    _ip("-n", far, "link", "set", "hf0", "down")
    hurry(tmp_path)
    assert first.wait(60) == 0
    second.send_signal(signal.SIGTERM)  # cut off from everybody, its workers cannot leave in order
    time.sleep(0.5)
    second.send_signal(signal.SIGTERM)
    assert second.wait(10) == 128 + signal.SIGTERM
    result = collect(tmp_path, 0)
    kept = [r for r in result.results if r["worker"].startswith("0.")]
    assert {r["sha256"] for r in kept} == {undisturbed(STEPS).sha256}
    assert len(kept) == 2
    causes = [e["cause"] for e in result.of("failure") if e["worker"].startswith("1.")]
    assert causes
    assert all("no heartbeat" in cause for cause in causes)
