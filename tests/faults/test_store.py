"""Runs whose checkpoints are in an object store: a real S3 server, real processes, and faults in between."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import series
from holdfast.checkpoint.places import Remote
from holdfast.cluster.agent import Agent
from holdfast.errors import CheckpointError
from tests.faults import loop_train, teams_train
from tests.faults.judge import covered, kill_at_once
from tests.faulty_proxy import Asked, FaultyProxy
from tests.harness import Meddler, Result, count_events, launch, until
from tests.s3_server import BUCKET, Server, environment, needs_seaweed, reaching, seaweed

STEPS = 14


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = seaweed(tmp_path_factory.mktemp("seaweed"))
    with reaching(environment(server.endpoint)):
        yield server
    server.end()


def run(
    folder: Path, root: Remote, endpoint: str, *, faults: str = "", meddle: Meddler | None = None, **more: str
) -> Result:
    folder.mkdir()
    settings = {"CHECKPOINT": str(root), "EVERY": "3", "STEPS": str(STEPS), **environment(endpoint), **more}
    return launch(folder, environment=settings, faults=faults, workers=2, meddle=meddle)


@needs_seaweed
def test_a_run_loses_everything_and_resumes_from_the_store(server: Server, tmp_path: Path, undisturbed) -> None:
    root, faults = Remote("s3", BUCKET, "resumed"), kill_at_once(["0.0", "0.1"], step=8, phase="vote")
    result = run(tmp_path / "a", root, server.endpoint, faults=faults, DURABLE="6")
    assert result.code == 0
    assert result.sha256 == undisturbed(STEPS).sha256
    assert [event["step"] for event in result.of("resumed")] == [6]
    assert series.steps_in(root) == [9, 12, 14], "only the newest are kept"
    written = "".join(path.read_text() for path in (tmp_path / "a" / "logs").iterdir() if path.is_file())
    assert "not-a-secret" not in written


@needs_seaweed
@pytest.mark.parametrize("fault", [403, covered("tests/checkpoint/test_store.py fills the store", 507)])
def test_training_goes_on_without_checkpoints_and_the_end_says_so(
    server: Server, tmp_path: Path, undisturbed, fault: int
) -> None:
    root, proxy = Remote("s3", BUCKET, f"lost-{fault}"), FaultyProxy(server.endpoint)

    def from_step_6_on(asked: Asked) -> int | None:
        later = any(f"step-{step:08d}" in asked.path for step in range(6, STEPS + 1))
        return fault if later and asked.method in ("PUT", "POST") else None

    proxy.rule = from_step_6_on
    result = run(tmp_path / "a", root, proxy.endpoint)
    assert proxy.done
    assert result.code == CheckpointError.exit_code
    assert sorted({event["step"] for event in result.of("commit")}) == list(range(STEPS)), "training goes on"
    reasons = {event["reason"] for event in result.of("checkpoint-failed")}
    assert any("store is full" in text if fault == 507 else "no right" in text for text in reasons), reasons
    assert series.steps_in(root) == [3]
    proxy.rule = lambda asked: None
    again = run(tmp_path / "b", root, proxy.endpoint)
    proxy.end()
    assert again.sha256 == undisturbed(STEPS).sha256


@needs_seaweed
def test_training_does_not_wait_for_a_slow_store(server: Server, tmp_path: Path, undisturbed) -> None:
    """No byte of the first checkpoint arrives before all steps are made; it is complete later."""
    root, proxy, trained = Remote("s3", BUCKET, "slow"), FaultyProxy(server.endpoint), threading.Event()
    proxy.rule = lambda asked: trained if "step-00000008/data" in asked.path and asked.method != "GET" else None

    async def meddle(agent: Agent) -> None:
        await until(lambda: count_events(agent, "commit", step=STEPS - 1))
        trained.set()

    result = run(tmp_path / "a", root, proxy.endpoint, meddle=meddle, EVERY="8")
    proxy.end()
    assert result.code == 0
    assert proxy.done
    assert result.sha256 == undisturbed(STEPS).sha256
    assert series.steps_in(root) == [8, STEPS]


@needs_seaweed
@pytest.mark.parametrize(("program", "team"), [(loop_train, 1), (teams_train, 2)], ids=["loop", "teams"])
def test_loops_and_teams_resume_from_the_store(server: Server, tmp_path: Path, program: Any, team: int) -> None:
    root, hashes = Remote("s3", BUCKET, f"of-{program.__name__}"), []
    around = {**environment(server.endpoint), "EVERY": "2"}
    for name, steps, more in (
        ("alone", 6, {}),
        ("a", 4, {"CHECKPOINT": str(root)}),
        ("b", 6, {"CHECKPOINT": str(root)}),
    ):
        (tmp_path / name).mkdir()
        settings = {**around, **more, "STEPS": str(steps)}
        result = launch(
            tmp_path / name, script=Path(program.__file__), workers=1 if name == "alone" else 2, team=team,
            environment=settings, faults="kill worker=0.0 step=5 phase=vote" if name == "b" else "",
        )  # fmt: skip
        assert result.code == 0, result.said
        hashes.append(result.sha256)
    assert {event["step"] for event in result.of("resumed")} == {4}
    assert hashes[0] == hashes[2] != hashes[1]


@needs_seaweed
def test_two_tiers_and_the_local_one_is_lost(server: Server, tmp_path: Path, undisturbed) -> None:
    local, root = tmp_path / "local", Remote("s3", BUCKET, "tiers")
    settings = {"CHECKPOINT": str(local), "REMOTE": str(root)}
    first = run(tmp_path / "a", root, server.endpoint, **settings, STEPS="8")
    assert (first.code, series.steps_in(local), series.steps_in(root)[-1]) == (0, [3, 6, 8], 8)
    (data, *_) = (local / "step-00000008").glob("data-*")
    data.write_bytes(bytes(data.stat().st_size))  # damaged, while its copy is whole
    second = run(tmp_path / "b", root, server.endpoint, **settings, STEPS="10")
    assert sorted({event["step"] for event in second.of("commit")}) == [8, 9]
    shutil.rmtree(local)
    third = run(tmp_path / "c", root, server.endpoint, **settings)
    assert sorted({event["step"] for event in third.of("commit")}) == list(range(10, STEPS))
    assert third.sha256 == undisturbed(STEPS).sha256
    assert series.steps_in(local)[-1] == series.steps_in(root)[-1] == STEPS


@needs_seaweed
@pytest.mark.thorough("two tiers, and checkpoints of teams, are each in a test")
def test_two_tiers_of_teams_of_which_one_is_lost(server: Server, tmp_path: Path) -> None:
    """The ranks that do not lead write their shards under the leader's lease, and one process copies."""
    local, root = tmp_path / "local", Remote("s3", BUCKET, "tiers-of-teams")
    settings = {"CHECKPOINT": str(local), "REMOTE": str(root), "EVERY": "2", **environment(server.endpoint)}
    hashes = []
    for name, faults in (("a", "kill worker=0.0.1 step=3 phase=vote"), ("b", "")):
        (tmp_path / name).mkdir()
        words = {"script": Path(teams_train.__file__), "workers": 2, "team": 2, "faults": faults}
        result = launch(tmp_path / name, environment=settings, **words)
        assert result.code == 0, result.said
        assert not result.of("mirror-failed")
        assert series.steps_in(root)[-1] == 6
        hashes.append(result.sha256)
        shutil.rmtree(local)  # the second run has the store alone
    assert {e["step"] for e in result.of("resumed")} == {6}
    assert hashes[0] == hashes[1]


@needs_seaweed
@pytest.mark.thorough("a store that fails, and two tiers, are each in a test")
def test_two_tiers_and_the_store_fails(server: Server, tmp_path: Path, undisturbed) -> None:
    local, root, proxy = tmp_path / "local", Remote("s3", BUCKET, "tiers-failing"), FaultyProxy(server.endpoint)
    proxy.rule = lambda asked: 403 if "step-" in asked.path and asked.method in ("PUT", "POST") else None
    result = run(tmp_path / "a", root, proxy.endpoint, CHECKPOINT=str(local), REMOTE=str(root))
    proxy.end()
    assert result.code == 0, "the checkpoints are in the folder"
    assert result.sha256 == undisturbed(STEPS).sha256
    assert "no right" in result.of("mirror-failed")[-1]["reason"]
    assert series.steps_in(local) == [9, 12, 14]
    assert series.steps_in(root) == []
