"""Evaluations, predictions and the facts of steps in real processes: kills, joins and pipelines change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import metrics_train
from tests.faults.judge import covered, kill
from tests.harness import Result, launch

SCRIPT = Path(metrics_train.__file__)


def train(folder: Path, *, workers: int, faults: str = "", **environment: str) -> Result:
    folder.mkdir(exist_ok=True)
    return launch(folder, script=SCRIPT, workers=workers, faults=faults, environment=environment)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one worker finds, undisturbed."""
    result = train(tmp_path_factory.mktemp("alone") / "run", workers=1)
    assert result.code == 0, result.said
    return result


def assert_same(result: Result, alone: Result, *, members: int) -> None:
    assert result.code == 0, result.said
    assert result.sha256 == alone.sha256
    (expected,) = alone.results
    assert len(result.results) == members
    for line in result.results:
        assert line["found"] == expected["found"], f"worker {line['worker']}"
        assert line["facts"].items() <= expected["facts"].items(), "a joiner has those of the steps that it made"


def test_one_worker_has_what_a_plain_loop_has(alone: Result) -> None:
    (line,) = alone.results
    assert line["found"]["means 5"].keys() == metrics_train.MEASURES.keys()
    assert line["found"]["predicted 5"] != line["found"]["predicted 10"]
    assert [line["facts"][str(step)][0] for step in range(10)] == [1e-2 / (1 + 0.1 * step) for step in range(10)]
    assert {line["facts"][str(step)][2] for step in range(4)} == {16}, "samples"
    assert line["facts"]["4"][2] == 6, "the last batch of an epoch"


@pytest.mark.parametrize(
    ("faults", "more"),
    [
        (kill(["0.0"], step=5, phase="vote"), {"WANTED": "3"}),  # in the evaluation after the first loop; one joins
        covered("a stage is lost in the same place", kill(["0.1"], step=10, phase="forward"), {}),
    ],
)
def test_three_workers_one_killed_in_the_middle(tmp_path: Path, alone: Result, faults: str, more: Any) -> None:
    assert_same(train(tmp_path / "run", workers=3, faults=faults, **more), alone, members=3)


def test_pipelines_one_stage_lost_while_predicting(tmp_path: Path, alone: Result) -> None:
    """The last stage, whose outputs nobody else has yet: it dies before it votes on them."""
    more = {"STAGES": "2", "TOLERATE": "1", "TO": str(tmp_path / "large")}
    faults = "kill worker=0.3 step=10 phase=predict"
    result = train(tmp_path / "run", workers=4, faults=faults, **more)
    assert_same(result, alone, members=3)
    assert [event["worker"] for event in result.of("failure")] == ["0.3"]
    (last, *_) = [e for e in result.of("layout") if e["worker"] == "0.3"]
    assert last["stop"] == 6, "it had outputs"


ALONE = """
import torch, holdfast
from torch import nn
from tests.faults.train import Waves
run = holdfast.Run(layers=nn.Linear(16, 1), loss=nn.functional.mse_loss, data=Waves(), global_batch=16, micro_batch=2,
                   optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
ema = run.ema(decay=0.9)
for step in run.steps(9):
    if step.number == 3:
        ASKED
"""


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("if step.is_first_worker: run.predict(Waves())", "on every worker"),
        (
            "run.evaluate(Waves(), {str(n): run.engine.loss for n in range(1 + step.is_first_worker)})",
            "different things",
        ),
        ("run.evaluate(Waves(), {'a' if step.is_first_worker else 'b': run.engine.loss})", "different things"),
        ("run.save_model('m.safetensors', weights=ema if step.is_first_worker else None)", "different things"),
        covered(
            "a model is saved",
            "run.evaluate(Waves(), weights=ema if step.is_first_worker else None)",
            "different things",
        ),
        covered(
            "a model is saved",
            "run.predict(Waves(), weights=ema if step.is_first_worker else None)",
            "different things",
        ),
        covered(
            "predictions are asked for alone", "if not step.is_first_worker: run.evaluate(Waves())", "on every worker"
        ),
    ],
)
def test_workers_that_ask_for_different_things(tmp_path: Path, capsys: Any, asked: str, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALONE.replace("ASKED", asked))
    result = launch(tmp_path, script=script, workers=2)
    assert result.code == 2, result.said
    assert words in capsys.readouterr().err
