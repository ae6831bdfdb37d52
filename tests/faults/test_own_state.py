"""The script's own state, averages of weights and drift: through kills, joins, resumes and faulty memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import checkpoint
from holdfast.checkpoint import series
from tests.engine.pipelines import linear
from tests.faults import own_state_train
from tests.faults.judge import covered
from tests.harness import Result, launch

SCRIPT = Path(own_state_train.__file__)
STEPS = 8


def train(folder: Path, *, workers: int = 3, faults: str = "", steps: int = STEPS, **settings: str) -> Result:
    folder.mkdir(exist_ok=True)
    environment = {"STEPS": str(steps), "MODEL": str(folder / "best.safetensors"), **settings}
    return launch(folder, script=SCRIPT, workers=workers, faults=faults, environment=environment)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What an undisturbed run on one worker gives."""

    @cache
    def found(**settings: str) -> dict[str, Any]:
        result = train(tmp_path_factory.mktemp("alone"), workers=1, **settings)
        assert result.code == 0
        return result.results[0]

    return found


def assert_same(result: Result, expected: dict[str, Any]) -> None:
    """Every worker that has come to the end has the same state, weights, averages and files as one alone."""
    assert result.code == 0, result.said
    assert result.results
    for line in result.results:
        assert {**line, "worker": None} == {**expected, "worker": None}


def joined(result: Result) -> set[str]:
    """The workers that came after the begin and committed a step."""
    return {e["worker"] for e in result.of("commit")} - {"0.0", "0.1", "0.2"}


# --- kills and joins ------------------------------------------------------------------------------------

PHASES = ["data", "backward", "vote", "voted", "update"]  # step 4's vote comes in the loop's body, in an evaluation


@pytest.mark.parametrize(
    ("phase", "worker"),
    [
        ("vote", "0.1"),
        ("update", "0.0"),
        *(covered("a vote in the body, and an update", phase, worker) for phase in PHASES for worker in ("0.0", "0.2")),
    ],
)
def test_save_best_survives_a_kill_and_a_join(tmp_path: Path, alone: Any, phase: str, worker: str) -> None:
    """Somebody who had begun with ``best = inf`` would save alone."""
    result = train(tmp_path, faults=f"kill worker={worker} step=4 phase={phase}", WANTED="3")
    assert_same(result, alone())
    assert joined(result) == {"0.3"}


@pytest.mark.parametrize("stages", ["2", covered("two stages are several, too", "2,1,1")])
def test_averages_move_with_their_layers(tmp_path: Path, alone: Any, stages: str) -> None:
    faults = "kill worker=0.1 step=3 phase=backward; kill worker=0.2 step=5 phase=voted"
    result = train(tmp_path, workers=4, faults=faults, WANTED="4", STAGES=stages, TOLERATE="1")
    assert_same(result, alone())


def test_averages_are_computed_again_from_a_log(tmp_path: Path, alone: Any) -> None:
    more = {"CHECKPOINT": str(tmp_path / "kept"), "EVERY": "100", "LOG": "1", "STAGES": "2"}
    result = train(tmp_path, workers=2, faults="kill worker=0.1 step=5 phase=forward", **more)
    assert_same(result, alone())
    assert result.of("replay")


def test_a_joiner_passes_loops_that_are_over_as_the_others_did(tmp_path: Path, alone: Any) -> None:
    """Between its loops the script saves the best model. A joiner decides there by the state that was then."""
    settings = {"EPOCHS": "4", "BETWEEN": "1"}
    result = train(tmp_path, faults="kill worker=0.1 step=4 phase=backward", WANTED="3", **settings)
    assert_same(result, alone(**settings))
    assert joined(result) == {"0.3"}


def test_a_joiner_counts_steps_where_its_script_is(tmp_path: Path, alone: Any) -> None:
    """It comes in the second of two loops, and passes the first: there ``run.step`` is what the others had there."""
    settings = {"PATIENCE": "1", "MORE": "4"}
    expected = alone(**settings)
    faults = f"kill worker=0.1 step={expected['step'] - 3} phase=backward"
    kept = {"CHECKPOINT": str(tmp_path / "kept"), "EVERY": "3"}
    result = train(tmp_path, faults=faults, WANTED="3", **kept, **settings)
    assert_same(result, expected)
    assert joined(result) == {"0.3"}
    (tmp_path / "results.jsonl").unlink()
    assert_same(train(tmp_path, workers=2, **kept, **settings), expected)  # a rerun has nothing left to train


# --- checkpoints ----------------------------------------------------------------------------------------


def test_a_run_resumes_with_its_state_on_another_number_of_workers(tmp_path: Path, alone: Any) -> None:
    kept = {"CHECKPOINT": str(tmp_path / "kept"), "EVERY": "2"}
    first = train(tmp_path / "first", steps=5, **kept)
    assert first.results[0]["calls"] == 6, "the last call comes after the loop, and will come again"
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "best.safetensors").write_bytes((tmp_path / "first" / "best.safetensors").read_bytes())
    second = train(tmp_path / "second", workers=2, faults="kill worker=0.1 step=6 phase=vote", STAGES="2", **kept)
    assert [e["step"] for e in second.of("resumed")] == [5, 5], "the kill has lost a layer: it resumes a second time"
    assert_same(second, alone())


def test_a_checkpoint_has_the_state_in_a_section_of_its_own(tmp_path: Path) -> None:
    result = train(tmp_path, workers=2, STAGES="2", CHECKPOINT=str(tmp_path / "kept"))
    newest = series.newest(tmp_path / "kept")
    assert newest is not None
    into: dict[str, Any] = {"state": {"best": 0.0, "history": [], "mean": torch.ones(())}, "ema-0.8": {}}
    into["state"]["counted"] = counted = own_state_train.Counted()
    into["ema-0.8"] = nn.Sequential(*[linear() if n != 1 else nn.GELU() for n in range(4)])
    into = checkpoint.load(newest, into, strict=False)
    assert into["state"]["best"] == result.results[0]["best"]
    assert counted.calls == result.results[0]["calls"] - 1


@pytest.mark.parametrize("faults", ["kill worker=0.1 step=4 phase=backward", ""])
def test_a_run_that_stopped_early_is_over(tmp_path: Path, alone: Any, faults: str) -> None:
    expected = alone(PATIENCE="1")
    assert 4 < expected["step"] < STEPS
    kept = {"CHECKPOINT": str(tmp_path / "kept"), "EVERY": "3", "PATIENCE": "1"}
    first = train(tmp_path, faults=faults, WANTED="3", **kept)
    assert_same(first, expected)
    (tmp_path / "results.jsonl").unlink()
    (tmp_path / "best.safetensors.ema").unlink()
    again = train(tmp_path, workers=2, **kept)
    assert_same(again, expected)
    assert not [e for e in again.of("commit") if e["step"] >= expected["step"]], "it does not train on"


# --- drift ----------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_noticed_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(tmp_path, faults="flip-bit worker=0.1 step=4")
    shown = capsys.readouterr().err.strip()
    assert result.code == 1
    assert "0.weight" in shown
    assert "0.1 has another value than 0.0, 0.2" in shown
    assert len(shown.splitlines()) == 1, shown
    assert not result.results


def test_a_hash_of_workers_that_differ_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without comparisons the bit is there until the end."""
    result = train(tmp_path, faults="flip-bit worker=0.2 step=4", CHECK="1000")
    assert result.code == 1
    assert "disagree on 0.weight: 0.2 has another value" in capsys.readouterr().err
    assert {e["step"] for e in result.of("commit")} == set(range(STEPS))


def test_a_state_that_differs_from_worker_to_worker_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, workers=2, DIFFER="3")
    assert result.code == 1
    assert "after step 6: workers disagree on the script's state 'bad'" in capsys.readouterr().err


def test_a_joiner_with_variables_of_its_own_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, holdfast\nfrom tests.engine.pipelines import linear, numbers\n"
        "from tests.faults.own_state_train import wait_for_joiner\n"
        "run = holdfast.Run(layers=linear(), loss=torch.nn.functional.mse_loss, data=numbers(64), global_batch=16,\n"
        "    micro_batch=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=10.0))\n"
        "best = float('inf')\n"
        "for step in run.steps(6):\n"
        "    if step.number >= 3 and step.workers < 2: wait_for_joiner(run)\n"
        "    if step.loss < best:\n"
        f"        best = step.loss; run.save_model({str(tmp_path / 'model')!r})\n"
    )
    result = launch(tmp_path, script=script, workers=2, faults="kill worker=0.1 step=3 phase=backward")
    assert result.code == 2
    shown = capsys.readouterr().err
    assert "0.2 joined later" in shown
    assert "Run(state=" in shown
