"""Kills while layers are updated one by one: what was begun is undone, and replicas are alike to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.judge import covered, sweep, train
from tests.harness import Result, assert_each_sample_once_per_epoch, assert_every_worker_commits_each_step_once, launch

STEPS, WORKERS = 8, 3
PHASES = ["forward", "backward", "eager", "reduce", "vote", "voted", "update"]
# Of the largest weight of a tensor: an undone step of AdamW is off by a few units in the last place (2e-7 were measured
# at the end), and the steps after it compute on from there. Without the undo it is off by the learning rate, 1e-2.
CLOSE = 1e-5
SETTINGS = {"STEPS": str(STEPS), "CLIP": "none", "WIDTH": "512", "UPDATE": "eager"}  # three buckets


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    complete = [(phase, worker) for phase in PHASES for worker in ("0.0", "0.1", "0.2")]
    sweep(metafunc, "kill_of", complete, [("eager", "0.1"), ("vote", "0.2"), ("update", "0.0")])
    phases = [(phase, worker) for phase in PHASES for worker in ("0.0", "0.3")]
    sweep(metafunc, "kill_in_pipelines", phases, [("eager", "0.3")])


def eager(folder: Path, *, workers: int = WORKERS, faults: str = "", **settings: str) -> tuple[Result, Path]:
    folder.mkdir(exist_ok=True)
    model = folder / "model.safetensors"
    environment = {**SETTINGS, "MODEL": str(model), **settings}
    return launch(folder, workers=workers, faults=faults, environment=environment), model


@pytest.fixture(scope="module")
def at_the_commit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The undisturbed run on one worker, with updates at the commit."""
    return eager(tmp_path_factory.mktemp("undisturbed"), workers=1, UPDATE="commit")


def inexact(result: Result) -> bool:
    """Whether all copies of some unit had to be undone."""
    return any(event["inexact"] for event in result.of("entered"))


def undone(result: Result) -> bool:
    return any(event["undone"] for event in result.of("entered"))


def distance(model: Path, other: Path) -> float:
    mine, theirs = load_file(model), load_file(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in mine)


def assert_right(found: tuple[Result, Path], expected: tuple[Result, Path]) -> None:
    """Exact where somebody had an untouched copy of everything, else close; replicas alike in any case."""
    (result, model), (whole, reference) = found, expected
    assert result.code == 0, result.said
    assert result.sha256, "replicas are alike"
    if inexact(result):
        assert distance(model, reference) < CLOSE
    else:
        assert result.sha256 == whole.sha256
        assert result.losses == whole.losses
    assert_every_worker_commits_each_step_once(result)
    assert_each_sample_once_per_epoch(result, size=70, steps_per_epoch=5)


@pytest.mark.parametrize("workers", [4, *(covered("four have these bits, too", number) for number in (1, 2))])
def test_an_undisturbed_run_has_the_bits_of_updates_at_the_commit(
    tmp_path: Path, at_the_commit: tuple[Result, Path], workers: int
) -> None:
    found = eager(tmp_path, workers=workers)
    assert_right(found, at_the_commit)
    assert not undone(found[0])


def test_kill(tmp_path: Path, at_the_commit: tuple[Result, Path], kill_of: tuple[str, str]) -> None:
    phase, worker = kill_of
    found = eager(tmp_path, faults=f"kill worker={worker} step=4 phase={phase}")
    assert_right(found, at_the_commit)
    survivors = {f"0.{number}" for number in range(WORKERS)} - {worker}
    assert survivors <= {line["worker"] for line in found[0].results}, "survivors never restart"


def test_where_all_had_begun_one_copy_is_everybodys(tmp_path: Path, at_the_commit: tuple[Result, Path]) -> None:
    """One goes when all have voted, and two never hear of it: they drop what they have updated."""
    meddle = "deaf 0.0 5; deaf 0.2 5; die 0.1 5"
    found = eager(tmp_path, MEDDLE=meddle)
    assert inexact(found[0])
    assert_right(found, at_the_commit)


def test_where_one_had_not_begun_nothing_is_rounded(tmp_path: Path, at_the_commit: tuple[Result, Path]) -> None:
    """0.1 dies when 0.0 has updated its first bucket, and 0.2 none yet."""
    found = eager(tmp_path, MEDDLE="begin 0.0 4; follow 0.1 4; late 0.2 4")
    assert undone(found[0])
    assert not inexact(found[0])
    assert_right(found, at_the_commit)


def test_without_the_undo_it_shows(tmp_path: Path, at_the_commit: tuple[Result, Path]) -> None:
    """The control: all survivors leave it out, so that they are alike, but far off."""
    faults = "; ".join(f"skip-undo worker=0.{number}" for number in range(WORKERS))
    result, model = eager(tmp_path, faults=faults, MEDDLE="deaf 0.0 5; deaf 0.2 5; die 0.1 5")
    assert result.sha256
    assert inexact(result)
    assert distance(model, at_the_commit[1]) > 10 * CLOSE


def test_an_error_in_an_update_ends_the_run_with_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them have it: nobody hangs."""
    faults = "; ".join(f"raise worker=0.{number} step=3 phase=eager" for number in range(WORKERS))
    result, _ = eager(tmp_path, faults=faults)
    assert result.code == 1
    # Said of the first one if others were still there, else in the run's last words.
    words = [*result.said, capsys.readouterr().err]
    assert any("injected at step 3, phase eager" in said for said in words)


@pytest.mark.thorough("test_errors.py and test_pipelines.py survive the error of one")
def test_an_error_in_an_update_of_one_is_survived(tmp_path: Path, at_the_commit: tuple[Result, Path]) -> None:
    found = eager(tmp_path, faults="raise worker=0.1 step=3 phase=eager")
    assert_right(found, at_the_commit)


# --- pipelines -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return pipelines(tmp_path_factory.mktemp("whole"), workers=1, stages="1", tolerate=0, UPDATE="commit")


def pipelines(folder: Path, **settings: object) -> Result:
    defaults = {"CLIP": "none", "UPDATE": "eager", "HIDDEN": "2048", "MODEL": str(folder / "model.safetensors")}
    return train(folder, **{**defaults, **settings})


def test_pipelines_and_tied_weights_have_the_same_bits(tmp_path: Path, whole: Result) -> None:
    result = pipelines(tmp_path, workers=4, stages="2")
    assert (result.code, result.sha256, result.losses) == (0, whole.sha256, whole.losses)


def test_kill_in_pipelines(tmp_path: Path, whole: Result, kill_in_pipelines: tuple[str, str]) -> None:
    phase, worker = kill_in_pipelines
    result = pipelines(tmp_path, workers=4, stages="2", faults=f"kill worker={worker} step=4 phase={phase}")
    assert result.code == 0, result.said
    if inexact(result):
        models = [Path(line["model"]) for line in (result.results[0], whole.results[0])]
        assert distance(*models) < CLOSE
    else:
        assert result.sha256 == whole.sha256
    assert torch.isfinite(torch.tensor(result.losses)).all()


@pytest.mark.parametrize("phase", ["eager", covered("the same loss in another phase", "vote")])
def test_layers_that_are_lost_come_back_from_the_log(tmp_path: Path, whole: Result, phase: str) -> None:
    """One copy of each layer: the survivor undoes its own, and the others are computed again."""
    faults = f"kill worker=0.1 step=5 phase={phase}"
    settings = {"LOG": "1", "CHECKPOINT": str(tmp_path / "saved"), "EVERY": "100"}
    result = pipelines(tmp_path, workers=2, stages="2", tolerate=0, faults=faults, **settings)
    assert result.code == 0, result.said
    assert result.of("replay")
    assert not result.of("resumed")
    assert distance(*(Path(line["model"]) for line in (result.results[0], whole.results[0]))) < CLOSE
