"""The journal of real runs: each step once in every sink, across a killed writer, a joiner and a resume."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from holdfast.journal import rows
from holdfast.watch.reader import Reader
from tests.faults import metrics_train
from tests.faults.judge import covered, kill
from tests.harness import Result, launch
from tests.journal import readers

SCRIPT = Path(metrics_train.__file__)
STEPS = 10


def run(folder: Path, name: str, **settings) -> Result:
    (folder / name).mkdir()
    more = settings.pop("more", {})
    environment = {"CHECKPOINT": str(folder / "saved"), "EVERY": "3", "STEPS": str(STEPS), **more}
    return launch(folder / name, script=SCRIPT, environment=environment, **settings)


def assert_each_step_once(folder: Path, result: Result) -> None:
    """Each row once, in order, and with all that was logged in its step."""
    lines = [json.loads(line) for line in (folder / rows.NAME).read_text().splitlines()]
    keys = [rows.key_of(line) for line in lines]
    assert [step for step, is_after in keys if not is_after] == list(range(STEPS))
    assert [step for step, is_after in keys if is_after] == [4, STEPS - 1]
    assert keys == sorted(keys)
    for line in lines:
        if "after" in line:
            assert line["end"] == line["step"] + 1
            continue
        assert line["twice"] == 2 * line["loss"]
        assert ("error" in line) == (line["step"] % 3 == 2)
        assert line.keys() >= {"lr", "grad_norm", "seconds", "tokens", "workers", "epoch", "time"}
    losses = {event["step"]: event["loss"] for event in result.of("commit")}
    found = dict(readers.jsonl(folder))
    assert all(found[step] == loss for step, loss in losses.items())


def assert_it_can_be_watched(logs: Path, result: Result) -> None:
    """The events say where the journal is, and what each step has cost each worker; a reader understands all of it."""
    assert [event["path"] for event in result.of("journal")] == [str(logs / rows.NAME)]
    for event in result.of("commit"):
        assert 0 < event["waited"] <= event["seconds"]
        assert event["sent"] > 0
    fold = Reader(logs).read_all()
    view = fold.view()
    assert (view.phase, view.step, view.unread) == ("finished", STEPS, 0)
    assert fold.curves["lr"].to_json()["steps"] == list(range(STEPS))
    assert view.counts["recovery"] == len(result.of("recovery"))


PHASES = ["voted", "vote", "update", "backward"]


@pytest.mark.parametrize(
    "phase", [PHASES[0], *(covered("it is killed when it could have written", phase) for phase in PHASES[1:])]
)
def test_a_lost_writer_leaves_no_gap(tmp_path: Path, phase: str) -> None:
    """Without checkpoints: the file is in the folder of the workers' logs."""
    (tmp_path / "a").mkdir()
    faults = kill(["0.0"], step=7, phase=phase)
    environment = {"STEPS": str(STEPS), "WANTED": "3"}
    result = launch(tmp_path / "a", script=SCRIPT, workers=3, faults=faults, environment=environment)
    assert result.code == 0, result.said
    assert_each_step_once(tmp_path / "a" / "logs", result)
    assert_it_can_be_watched(tmp_path / "a" / "logs", result)


@pytest.mark.parametrize(
    "sinks", [("tensorboard", "wandb"), covered("tests/journal/test_sinks.py has MLflow", ("mlflow",))], ids="-".join
)
def test_every_sink_has_each_step_once_across_a_kill_a_join_and_a_resume(tmp_path: Path, sinks: tuple[str]) -> None:
    missing = [name for name in sinks if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install -e .[dev]")
    uri, folder = f"file:{tmp_path}/mlruns", tmp_path / "saved"
    more = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_ERROR_REPORTING": "false"}
    more |= {"SINKS": " ".join(sinks)}
    # The writer is lost in step 3. Later all are: the row of step 5 is written, and the last checkpoint is of step 5.
    every = "; ".join(f"kill worker=0.{number} step=7 phase=vote" for number in range(1, 8))
    faults = f"{kill(['0.0'], step=3, phase='voted')}; {every}"
    lost = run(tmp_path, "a", workers=2, faults=faults, max_restarts=1, more={**more, "WANTED": "2", "DURABLE": "5"})
    assert lost.code != 0
    assert max(step for step, _ in readers.jsonl(folder)) >= 5
    resumed = run(tmp_path, "b", workers=1, more=more)
    assert resumed.code == 0, resumed.said
    assert min(event["step"] for event in resumed.of("commit")) == 5
    assert_each_step_once(folder, resumed)
    expected = [(step, pytest.approx(loss)) for step, loss in readers.jsonl(folder)]
    if "mlflow" in sinks:
        assert sorted(readers.mlflow(folder, uri)) == expected
    if "tensorboard" in sinks:
        assert readers.tensorboard(folder / "tensorboard") == expected
    if "wandb" in sinks:
        assert readers.wandb(folder) == expected
        files = [*folder.glob("wandb/offline-run-*/*.wandb")]
        assert len(files) == 3
        assert len({file.stem for file in files}) == 1, "all are of one run"


def test_a_finished_run_that_is_started_again_logs_nothing_twice(tmp_path: Path) -> None:
    run(tmp_path, "a", workers=2)
    before = (tmp_path / "saved" / rows.NAME).read_text()
    again = run(tmp_path, "b", workers=1)
    assert again.code == 0
    assert_each_step_once(tmp_path / "saved", again)
    assert (tmp_path / "saved" / rows.NAME).read_text() == before
