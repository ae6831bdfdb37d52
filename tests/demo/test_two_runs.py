"""The command itself, and a verdict that can say no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.demo.story import Story
from holdfast.demo.two_runs import DemoRun, DemoSettings, DemoVerdict
from holdfast.errors import UsageError
from holdfast.watch.fold import Fold
from tests.warm import Command


def run_demo(folder: Path, *options: str) -> Command:
    """The demo to its end; its files go to the folder. ``tests/test_wheel.py`` starts it as a shell does."""
    demo = Command("demo", *options, "--out", str(folder), folder=folder)
    demo.wait(240)
    return demo


def test_a_killed_worker_leaves_no_trace_in_the_weights(tmp_path: Path) -> None:
    demo = run_demo(tmp_path, "--steps", "8", "--kills", "1", "--workers", "2", "--json")
    assert demo.returncode == 0, demo.stderr
    verdict = json.loads(demo.stdout.splitlines()[-1])
    keys = "steps workers kills recoveries_ms recovery_ms_median weights_sha256 undisturbed_sha256 identical"
    assert list(verdict) == keys.split()
    assert verdict["identical"] is True
    assert verdict["weights_sha256"] == verdict["undisturbed_sha256"]
    assert len(verdict["weights_sha256"]) == 64
    assert (verdict["steps"], verdict["workers"], verdict["kills"]) == (8, 2, 1)
    assert verdict["recoveries_ms"] == [verdict["recovery_ms_median"]]
    assert verdict["recovery_ms_median"] > 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough("tests/faults/test_pipelines.py kills workers of pipelines and compares hashes")
def test_pipelines_lose_a_worker_and_come_to_what_one_worker_comes_to(tmp_path: Path) -> None:
    demo = run_demo(tmp_path, "--pipeline", "--steps", "10", "--kills", "1", "--json")
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
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough("tests/faults kills workers of replicas that train apart")
def test_replicas_that_train_apart_lose_a_worker_and_end_equal(tmp_path: Path) -> None:
    demo = run_demo(tmp_path, "--sync", "--steps", "16", "--kills", "1", "--workers", "2", "--json")
    assert demo.returncode == 0, demo.stderr
    verdict = json.loads(demo.stdout.splitlines()[-1])
    assert (verdict["kills"], verdict["sync"]["replicas_equal"], verdict["identical"]) == (1, True, False)
    assert 0 < verdict["sync"]["synchronised"] < 16 + 2  # the first ten steps are together, and there is the end
    assert verdict["sync"]["disturbed"]["loss"] > 0


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--sync", "--pipeline"], "--pipeline or --sync"),  # a pipeline has no replicas that could train apart
        (["--workers", "1"], "--kills 0"),  # one worker cannot be killed
        (["--pipeline", "--workers", "3"], "--workers 4"),  # one pipeline cannot lose a worker
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_hint(options: list[str], hint: str) -> None:
    error = CliRunner().invoke(app, ["demo", *options]).exception
    assert isinstance(error, UsageError)
    assert hint in str(error)


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


def test_the_verdict_is_an_event_that_the_page_shows_and_deaths_by_hand_are_told() -> None:
    story = Story(steps=4, by_hand=True)
    story.hear({"t": 1.0, "event": "generation", "number": 1, "workers": ["0.0", "0.1"]})
    said = story.hear({"t": 2.0, "event": "failure", "worker": "0.1", "cause": "killed by SIGKILL", "member": True})
    assert said == "worker 0.1 is lost: killed by SIGKILL"
    story.hear({"t": 2.1, "event": "generation", "number": 2, "workers": ["0.0"]})
    story.hear({"t": 2.5, "event": "commit", "worker": "0.0", "step": 0, "loss": 1.0, "generation": 2})
    assert story.recoveries_ms == [500.0]
    fold = Fold()
    fold.hear({"t": 3.0, "event": "verdict", "text": "1 worker killed: identical", "good": True, "sha256": "ab"})
    view = fold.view()
    assert (view.phase, view.why) == ("finished", "1 worker killed: identical")
    assert "ab" in fold.moments[-1].text
