"""The integrated Trainer with the real library: as the plain one up to rounding, and bit-identical with kills."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_programs import PRELOAD
from tests.faults.judge import covered
from tests.harness import Result, assert_every_worker_commits_each_step_once, launch
from tests.s3_server import needs_seaweed, stored

pytest.importorskip("transformers", reason="this is about transformers' Trainer, which is not installed")

SCRIPT = Path(__file__).with_name("trainer_train.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
PATIENT = Path(__file__).parents[1] / "examples" / "patient.py"
CLOSE = 2e-5  # relative: two ways to sum float32 numbers, after a dozen steps
CLOSE_IN_BF16 = 5e-3  # a number of bfloat16 has eight bits, and is rounded elsewhere: losses have other factors
CLOCKS = ("runtime", "per_second")


def train(folder: Path, *, output: Path | None = None, workers: int = 1, faults: str = "", **settings: Any) -> Result:
    folder.mkdir(exist_ok=True)
    given = {name: each if isinstance(each, str) else json.dumps(each) for name, each in settings.items()}
    environment = {"OUTPUT": str(output or folder / "out"), **given}
    return launch(folder, script=SCRIPT, workers=workers, faults=faults, environment=environment, preload=PRELOAD)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one undisturbed worker finds."""

    @cache
    def found(settings: str) -> tuple[Result, Path]:
        folder = tmp_path_factory.mktemp("alone")
        result = train(folder, **json.loads(settings))
        assert result.code == 0, result.said
        return result, folder / "out"

    return lambda **settings: found(json.dumps(settings, sort_keys=True))


def files_of(output: Path) -> dict[str, str]:
    """The digest of each file that transformers reads.

    Arguments and states have a folder's name in them. The optimizer's file has its settings in any order; its content
    is part of the hash.
    """
    paths = [path for folder in output.glob("checkpoint-*") for path in folder.iterdir()] + [*output.glob("final/*")]
    left_out = ("training_args.bin", "trainer_state.json", "optimizer.pt")
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.name not in left_out
    }


def assert_same(result: Result, output: Path, whole: tuple[Result, Path]) -> None:
    assert result.code == 0, result.said
    assert result.sha256 == whole[0].sha256
    for found in result.results:
        assert found["history"] == whole[0].results[0]["history"]
        assert {**found, "worker": "", "history": ""} == {**whole[0].results[0], "worker": "", "history": ""}
    assert files_of(output) == files_of(whole[1])


# --- as the plain one -------------------------------------------------------------------------------

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
LIKE_PLAIN: dict[str, dict[str, Any]] = {
    "as it comes": {"ARGUMENTS": BEST, "METRICS": "1"},
    "lora, bf16": {"MODEL": "lora", "STILL": "1", "ARGUMENTS": {"bf16": True, "lr_scheduler_type": "cosine"}},
    "means of means, drop_last, epochs": {
        "MODEL": "means",
        "ARGUMENTS": {
            "dataloader_drop_last": True, "eval_strategy": "epoch", "save_strategy": "epoch", "label_names": ["labels"],
            "logging_strategy": "epoch", "optim": "sgd", "max_grad_norm": 0.0, "eval_on_start": True,
        },
    },
    "sums of means": {"MODEL": "added"},
    "label smoothing, plateau": {
        "ARGUMENTS": {
            **BEST, "label_smoothing_factor": 0.1, "lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 0,
            "lr_scheduler_kwargs": {"patience": 0}, "activation_checkpointing": True, "max_steps": 9,
        }
    },
    "early stopping, sequential": {
        "ARGUMENTS": {**BEST, "train_sampling_strategy": "sequential", "learning_rate": 0.3, "num_train_epochs": 5},
        "PATIENCE": "1",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name if name in ("as it comes", "sums of means") else covered("the first case", name) for name in LIKE_PLAIN],
)
def test_losses_and_logs_are_those_of_the_plain_trainer(tmp_path: Path, alone: Any, name: str) -> None:
    settings = LIKE_PLAIN[name]
    plain = train(tmp_path, TRAINER="plain", **settings)
    assert plain.code == 0, plain.said
    ours, output = alone(**settings)
    (theirs,), (found,) = plain.results, ours.results
    close = CLOSE_IN_BF16 if "bf16" in name else CLOSE
    assert found["step"] == theirs["step"]
    assert found["best_at"] == theirs["best_at"]
    assert_close(found["loss"], theirs["loss"], "training loss", close)
    assert_close(found["evaluated"], theirs["evaluated"], "evaluation of what is there at the end", close)
    assert len(found["history"]) == len(theirs["history"])
    for mine, other in zip(found["history"], theirs["history"], strict=True):
        wanted = {key: value for key, value in other.items() if not key.endswith(CLOCKS) and key != "total_flos"}
        assert set(mine) - {"total_flos"} == set(wanted)
        for key, value in wanted.items():
            assert_close(mine[key], value, f"{key} of step {other['step']}", close)
    names = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert {path.name for path in output.glob("checkpoint-*")} == names


def assert_close(found: float, wanted: float, what: str, close: float) -> None:
    assert math.isclose(found, wanted, rel_tol=close, abs_tol=1e-7), f"{what}: {found} and {wanted}"


# --- bit-identical to itself ------------------------------------------------------------------------

ALL = {"ARGUMENTS": BEST, "METRICS": "1"}


def test_kills_and_joins_change_nothing(tmp_path: Path, alone: Any) -> None:
    """The first worker is lost in mid-step, and the next one while it writes a checkpoint for transformers."""
    kills = "kill worker=0.0 step=1 phase=backward; kill worker=0.1 step=6 phase=write"
    result = train(tmp_path, workers=3, faults=kills, WANTED="3", **ALL)
    assert_same(result, tmp_path / "out", alone(**ALL))
    assert {event["worker"] for event in result.of("failure")} == {"0.0", "0.1"}, "others were killed, or nobody"
    assert {event["worker"] for event in result.of("commit")} >= {"0.3"}, "nobody has joined"
    assert_every_worker_commits_each_step_once(result)
    rows = [json.loads(line) for line in (tmp_path / "out" / "holdfast" / "metrics.jsonl").read_text().splitlines()]
    logged = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row]
    history = result.results[0]["history"]
    assert logged == [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry], "each value once"


def test_a_resume_on_more_workers_changes_nothing(tmp_path: Path, alone: Any) -> None:
    """With adapters and their dropout, bfloat16, early stopping and everything else that lasts in callbacks."""
    output, arguments = tmp_path / "out", {**BEST, "bf16": True, "save_strategy": "epoch", "eval_strategy": "epoch"}
    settings = {"ARGUMENTS": arguments, "MODEL": "lora", "PATIENCE": "3"}
    before = train(tmp_path / "before", output=output, END="7", **settings)
    assert before.code != 0
    after = train(tmp_path / "after", output=output, workers=2, **settings)
    assert_same(after, output, alone(**settings))
    assert [event["step"] for event in after.of("resumed")] == [6], "it began anew"


@needs_seaweed
def test_a_resume_from_a_store_on_another_machine(tmp_path: Path, alone: Any) -> None:
    """With another ``output_dir``: nothing of the first one is there."""
    settings = LIKE_PLAIN["sums of means"]
    with stored(tmp_path) as around:
        before = train(tmp_path / "before", END="7", **around, **settings)
        assert before.code != 0
        after = train(tmp_path / "after", workers=2, **around, **settings)
    assert after.code == 0, after.said
    assert [event["step"] for event in after.of("resumed")] == [6]
    whole, _ = alone(**settings)
    assert after.sha256 == whole.sha256
    assert after.results[0]["history"] == whole.results[0]["history"]
    assert not (tmp_path / "before/out/holdfast").exists() or not [*(tmp_path / "before/out/holdfast").iterdir()]


@pytest.mark.parametrize(
    "fault",
    [
        "repeat-sample worker=0.1 step=2",
        pytest.param("skip-gradient worker=0.0 step=2", marks=pytest.mark.thorough("the other one")),
    ],
)
def test_a_wrong_gradient_gives_another_hash(tmp_path: Path, alone: Any, fault: str) -> None:
    """The control."""
    result = train(tmp_path, workers=2, faults=fault, **ALL)
    assert result.code == 0, result.said
    assert result.sha256 != alone(**ALL)[0].sha256


@pytest.mark.thorough("test_kills_and_joins_change_nothing")
@pytest.mark.parametrize("name", [*LIKE_PLAIN][1:])
def test_kills_change_nothing_with_other_arguments(tmp_path: Path, alone: Any, name: str) -> None:
    kills = "kill worker=0.1 step=1 phase=vote; kill worker=0.0 step=2 phase=update"
    result = train(tmp_path, workers=2, faults=kills, WANTED="2", **LIKE_PLAIN[name])
    assert_same(result, tmp_path / "out", alone(**LIKE_PLAIN[name]))
    assert {event["worker"] for event in result.of("failure")} == {"0.0", "0.1"}


@pytest.mark.thorough("tests of the journal, which has each value once")
def test_the_next_first_worker_reports(tmp_path: Path) -> None:
    """To TensorBoard, here: in a folder of its own. What the lost one had not written is missing, no more."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"ARGUMENTS": {"report_to": ["tensorboard"], "max_steps": 6}}
    result = train(tmp_path, workers=2, faults="kill worker=0.0 step=3 phase=reduce", **settings)
    assert result.code == 0, result.said
    steps: list[int] = []
    for folder in (tmp_path / "out" / "runs").iterdir():
        for file in folder.iterdir():
            found = EventAccumulator(str(file))
            found.Reload()
            if "train/loss" in found.Tags()["scalars"]:  # not in what was lost with its writer
                steps += [scalar.step for scalar in found.Scalars("train/loss")]
    assert {4, 5, 6} <= set(steps)
    assert len(steps) == len(set(steps))


@pytest.mark.thorough("test_kills_and_joins_change_nothing")
def test_the_example_survives_a_kill(tmp_path: Path) -> None:
    """And its hash does not depend on the name of its folder."""
    found = []
    for name, workers, faults in (("whole", 1, ""), ("killed", 2, "kill worker=0.0 step=5 phase=reduce")):
        folder = tmp_path / name
        folder.mkdir()
        given = [str(EXAMPLE), "--steps", "8", "--every", "4", "--checkpoint", str(folder / "out")]
        result = launch(folder, script=PATIENT, arguments=given, workers=workers, faults=faults, preload=PRELOAD)
        assert result.code == 0, result.said
        assert len(result.of("failure")) == workers - 1
        found.append(result.sha256)
    assert found[0] == found[1]
