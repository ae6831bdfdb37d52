"""Errors in the user's script: said once, in words, and not restarted for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import launch

HEAD = """
import torch, holdfast
from torch import nn
from torch.utils.data import TensorDataset
data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
settings = dict(layers=nn.Linear(4, 1), loss=nn.functional.mse_loss, data=data, global_batch=16, micro_batch=4,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(HEAD + text)
    return path


def test_a_crash_on_every_worker_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "for step in holdfast.Run(**settings).steps(9): {}['no such key']\n")
    result = launch(tmp_path, script=path)
    shown = capsys.readouterr().err
    assert result.code == 1
    assert shown.count("KeyError: 'no such key'") == 1
    assert 'script.py", line' in shown
    assert not any("Traceback" in line for line in result.said)


def test_a_crash_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = launch(tmp_path, script=script(tmp_path, "import no_such_module\n"))
    assert result.code == 1
    assert capsys.readouterr().err.count("No module named 'no_such_module'") == 1


def test_a_single_crash_is_survived(tmp_path: Path, undisturbed) -> None:
    result = launch(tmp_path, faults="raise worker=0.1 step=4 phase=forward", environment={"STEPS": "10"})
    assert result.code == 0
    assert result.sha256 == undisturbed(10).sha256


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("holdfast.Run(**settings | {'global_batch': 15})", 2, "global_batch=15"),
        (
            "list(holdfast.Run(**settings | {'loss': lambda y, t: y.mean() * float('nan')}).steps(5))",
            1,
            "step 0",
        ),
        (
            "run = holdfast.Run(**settings)\nfor step in run.steps(3):\n"
            "    if step.is_first_worker: run.evaluate(data)",
            2,
            "on every worker",
        ),
    ],
)
def test_bad_use_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, said: str
) -> None:
    result = launch(tmp_path, script=script(tmp_path, text + "\n"), workers=2)
    shown = capsys.readouterr().err.strip()
    assert result.code == code
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_workers_that_differ_do_not_train_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import os\nlist(holdfast.Run(**settings | {'seed': int(os.environ['RANK'])}).steps(3))\n"
    result = launch(tmp_path, script=script(tmp_path, text), workers=2)
    assert result.code == 2
    assert "0.1" in capsys.readouterr().err, "who is different"


def test_a_script_without_run_just_runs(tmp_path: Path) -> None:
    text = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    result = launch(tmp_path, script=script(tmp_path, text), workers=2)
    assert result.code == 0
    assert sorted(result.said) == ["[0.0] rank 0 of 2", "[0.1] rank 1 of 2"]


LATE = """
run = holdfast.Run(**settings)
values = [run.evaluate(data)]
for epoch in range(1, 9):
    for step in run.steps(4 * epoch):
        import time; time.sleep(0.0 if step.workers == 3 else 0.5)
    values.append(run.evaluate(data))
print('values', [round(value, 9) for value in values], flush=True)
"""


def test_a_late_joiner_sees_past_evaluations(tmp_path: Path) -> None:
    """Its script runs through loops that are over; it must decide as the others did."""
    result = launch(tmp_path, script=script(tmp_path, LATE), faults="kill worker=0.1 step=3 phase=vote")
    assert result.code == 0
    shown = {line.split(" ", 1)[0]: line.split("values")[1] for line in result.said if "values" in line}
    assert "[0.3]" in shown, f"the replacement came too late to see anything: {result.said}"
    assert len(set(shown.values())) == 1, shown


def test_an_error_after_training_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "list(holdfast.Run(**settings).steps(3))\nraise OSError('the disk is full')\n"
    result = launch(tmp_path, script=script(tmp_path, text), workers=2)
    assert result.code == 1
    assert capsys.readouterr().err.count("OSError: the disk is full") == 1


def test_a_save_that_fails_is_not_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "run = holdfast.Run(**settings)\nlist(run.steps(3))\nrun.save_model('/proc/nowhere/model.safetensors')\n"
    result = launch(tmp_path, script=script(tmp_path, text))
    assert result.code == 1
    assert "/proc/nowhere" in capsys.readouterr().err


def test_a_save_survives_its_writer(tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    text = (
        f"run = holdfast.Run(**settings)\nlist(run.steps(3))\nrun.save_model({str(model)!r})\n"
        "print(run.sha256(), flush=True)\n"
    )
    # Step 2 is the last: its faults are still planned when the model is saved, at the next vote.
    result = launch(tmp_path, script=script(tmp_path, text), faults="kill worker=0.0 step=3 phase=vote")
    assert result.code == 0
    assert model.exists()
    assert not list(tmp_path.glob(".model*"))


def test_sys_exit_is_not_restarted_for_ever(tmp_path: Path) -> None:
    result = launch(tmp_path, script=script(tmp_path, "import sys; sys.exit(7)\n"), workers=2)
    assert result.code == 7
    assert len(result.of("exit")) <= 4
