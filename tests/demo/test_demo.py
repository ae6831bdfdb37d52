"""The command itself, and a verdict that can say no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from holdfast.demo.demo import DemoSettings, Outcome, Verdict
from holdfast.demo.story import Story


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_killed_worker_leaves_no_trace_in_the_weights(tmp_path: Path) -> None:
    demo = run_demo("--steps", "12", "--kills", "1", "--workers", "3", "--json", "--out", str(tmp_path))
    assert demo.returncode == 0, demo.stderr
    verdict = json.loads(demo.stdout.splitlines()[-1])
    keys = "steps workers kills recoveries_ms recovery_ms_median weights_sha256 undisturbed_sha256 identical"
    assert list(verdict) == keys.split()
    assert verdict["identical"] is True
    assert verdict["weights_sha256"] == verdict["undisturbed_sha256"]
    assert len(verdict["weights_sha256"]) == 64
    assert (verdict["steps"], verdict["workers"], verdict["kills"]) == (12, 3, 1)
    assert verdict["recoveries_ms"] == [verdict["recovery_ms_median"]]
    assert 1 < verdict["recovery_ms_median"] < 10_000
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "dies in step" in demo.stderr
    assert "survivors commit step" in demo.stderr


def test_one_worker_cannot_be_killed() -> None:
    demo = run_demo("--workers", "1")
    assert demo.returncode == 2
    assert "--kills 0" in demo.stderr


def outcome(*, weights: str = "a", state: str = "b", straggler: str = "b", loss: float = 1.0) -> Outcome:
    """A run of two workers; the second one's state is ``straggler``."""
    results = [{"weights": weights, "state": state}, {"weights": weights, "state": straggler}]
    return Outcome(story=Story(steps=1, losses={0: loss}), results=results)


def same(disturbed: Outcome) -> bool:
    settings = DemoSettings(steps=1, kills=0)
    return Verdict(settings=settings, undisturbed=outcome(), disturbed=disturbed, picture=Path("x")).identical


def test_the_verdict_can_say_no() -> None:
    assert same(outcome())
    assert not same(outcome(weights="c"))
    assert not same(outcome(state="c", straggler="c"))
    assert not same(outcome(straggler="c"))
    assert not same(outcome(loss=1.0000001))
