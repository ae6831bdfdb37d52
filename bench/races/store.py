"""Race of saving to and loading from an object store, a real S3 server on loopback, interleaved in one run.

All contestants have the same server and the same state. "the server" writes and reads as many bytes by bare requests in
parallel: nobody can be faster through obstore. Each peer runs in a process of its own, in a venv under ``.bench/store``
that sees torch of ``.venv``.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.race_report import Bar, Say
from bench.running import BENCH, ROOT, environment
from bench.scale.s3 import S3Server
from holdfast.errors import UsageError
from holdfast.measuring import spread

PEERS = ("DCP, s3fs", "s3torchconnector", "boto3")
COLUMNS = {"save_s": "save, s: median (range)", "load_s": "cold load, s", "extra_mb": "memory beyond the state, MB"}
PACKAGES = ("s3fs==2026.9.0", "aiobotocore==3.10.0", "boto3==1.43.117")  # these three go together
BARE = ("s3torchconnector==1.5.0", "s3torchconnectorclient==1.5.0")  # without what they ask for: torch is there
EXTRA_MB = 100.0


def race(*, megabytes: int, rounds: int, seed: int, say: Say) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Let every contestant save and load once a round; return results and bars. ``megabytes``: of the state."""
    python, folder, order = _peers_python(say), BENCH / "store-race", random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = ["the server", "holdfast", *PEERS]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    server = S3Server(folder.absolute())
    contestants = {name: _Contestant(python, name, megabytes, server) for name in names}
    try:
        for number in range(rounds + 1):  # the first one warms up, and is not counted
            for name in order.sample(names, len(names)):
                seen = contestants[name].turn(number)
                if number:
                    found[name].append(seen)
            if number:
                words = [f"{name} {turns[-1]['save']:.2f}/{turns[-1]['load']:.2f}" for name, turns in found.items()]
                say(f"round {number}/{rounds}, save/load in s: {', '.join(words)}")
    finally:
        for each in contestants.values():
            each.end()
        server.end()
        shutil.rmtree(folder, ignore_errors=True)
    return _results(found), _bars(found)


def _peers_python(say: Say) -> Path:
    """The interpreter of the peers' venv, which is made at the first use and sees the packages of this one."""
    venv = BENCH.absolute() / "store"
    if not (venv / "ready").exists():
        say("installing s3fs, boto3 and s3torchconnector into .bench/store")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", *BARE], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        (ours,) = (Path(each) for each in sys.path if each.endswith("site-packages"))
        (site / "ours.pth").write_text(f"{ours}\n")
        (venv / "ready").touch()
    return venv / "bin/python"


class _Contestant:
    """A process that saves and loads on request."""

    def __init__(self, python: Path, name: str, megabytes: int, server: S3Server) -> None:
        self.name = name
        words = [str(python), "-m", "bench.peers.store_contestant", name, str(megabytes)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(**server.variables),
        )

    def turn(self, number: int) -> dict[str, float]:
        """Save and load; return the seconds of both, and the memory beyond the state."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise UsageError(f"{self.name} has ended with {self._process.wait()}", hint="its own words are above")
        seen: dict[str, float] = json.loads(line)
        return seen

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def _results(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    keys = {"save_s": "save", "load_s": "load", "extra_mb": "extra_mb"}
    return {
        name: {column: spread([turn[key] for turn in turns]) for column, key in keys.items()}
        for name, turns in found.items()
    }


def _bars(found: dict[str, list[dict[str, float]]]) -> dict[str, Bar]:
    bars = {}
    for what in ("save", "load"):
        for peer in PEERS:
            ratios = [a[what] / b[what] for a, b in zip(found["holdfast"], found[peer], strict=True)]
            bars[f"{what}, of {peer}"] = Bar(value=statistics.median(ratios), bar=1.0, at_most=True)
    extra = max(turn["extra_mb"] for turn in found["holdfast"])
    return {**bars, "memory beyond the state, MB": Bar(value=extra, bar=EXTRA_MB, at_most=True)}
