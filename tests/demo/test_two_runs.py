"""The command itself, and a verdict that can say no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from holdfast.demo.story import Story
from holdfast.demo.two_runs import DemoRun, DemoSettings, DemoVerdict


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


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


def test_pipelines_lose_a_worker_and_come_to_what_one_worker_comes_to(tmp_path: Path) -> None:
    demo = run_demo("--pipeline", "--steps", "10", "--kills", "1", "--json", "--out", str(tmp_path))
    assert demo.returncode == 0, demo.stderr
    verdict = json.loads(demo.stdout.splitlines()[-1])
    assert (verdict["workers"], verdict["kills"], verdict["identical"]) == (5, 1, True)
    first, after, *_ = [layout["pipelines"] for layout in verdict["layouts"]]
    assert sorted(map(len, first)) == [2, 3]  # with memory for half of it, no other two pipelines use all five
    assert sorted(map(len, after)) == [2, 2]
    for pipeline in [*first, *after]:
        assert [layer for stage in pipeline for layer in range(*stage["layers"])] == list(range(6))
    assert verdict["layouts"][1]["received_bytes"] > 0
    assert verdict["layouts"][1]["left_over"] == []
    assert "2 pipelines: " in demo.stderr
    assert "4 survivors commit step" in demo.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_replicas_that_train_apart_lose_a_worker_and_end_equal(tmp_path: Path) -> None:
    demo = run_demo("--sync", "--steps", "16", "--kills", "1", "--workers", "2", "--json", "--out", str(tmp_path))
    assert demo.returncode == 0, demo.stderr
    verdict = json.loads(demo.stdout.splitlines()[-1])
    assert (verdict["kills"], verdict["sync"]["replicas_equal"], verdict["identical"]) == (1, True, False)
    assert 0 < verdict["sync"]["synchronised"] < 16 + 2  # the first ten steps are together, and there is the end
    assert verdict["sync"]["disturbed"]["loss"] > 0
    assert "all replicas end with the same weights" in demo.stderr
    assert "synchronised at every step, a worker sent " in demo.stderr


def test_pipelines_have_no_replicas_that_could_train_apart() -> None:
    demo = run_demo("--sync", "--pipeline")
    assert demo.returncode == 2
    assert "--pipeline or --sync" in demo.stderr


def test_one_worker_cannot_be_killed() -> None:
    demo = run_demo("--workers", "1")
    assert demo.returncode == 2
    assert "--kills 0" in demo.stderr


def test_one_pipeline_cannot_lose_a_worker() -> None:
    demo = run_demo("--pipeline", "--workers", "3")
    assert demo.returncode == 2
    assert "--workers 4 or more, or --kills 0" in demo.stderr


def outcome(*, weights: str = "a", state: str = "b", straggler: str = "b", loss: float = 1.0) -> DemoRun:
    """A run of two workers; the second one's state is ``straggler``."""
    results = [{"weights": weights, "state": state}, {"weights": weights, "state": straggler}]
    return DemoRun(story=Story(steps=1, losses={0: loss}), results=results)


def test_where_replicas_train_apart_they_must_end_equal() -> None:
    settings = DemoSettings(steps=1, kills=0, sync=True)

    def good(disturbed: DemoRun) -> bool:
        return DemoVerdict(settings=settings, undisturbed=outcome(), disturbed=disturbed, picture=Path("x")).good

    assert good(outcome(weights="c", state="d", straggler="d", loss=2.0))
    assert not good(outcome(weights="c", state="d", straggler="e"))


def same(disturbed: DemoRun) -> bool:
    settings = DemoSettings(steps=1, kills=0)
    return DemoVerdict(settings=settings, undisturbed=outcome(), disturbed=disturbed, picture=Path("x")).identical


def test_the_verdict_can_say_no() -> None:
    assert same(outcome())
    assert not same(outcome(weights="c"))
    assert not same(outcome(state="c", straggler="c"))
    assert not same(outcome(straggler="c"))
    assert not same(outcome(loss=1.0000001))
