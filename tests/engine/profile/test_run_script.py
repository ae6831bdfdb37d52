"""Scripts that do not want to end, end too early, or do not exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from holdfast import Run, UsageError
from holdfast.engine.profile.measure import measure
from holdfast.engine.profile.run_script import until_training

SCRIPT = """
import atexit
from tests.engine.profile.runs import linear, make_run

run = make_run(linear(), checkpoint="saved")
"""
SCRIPTS = {
    "finally": """
try:
    for step in run.steps(3): pass
finally:
    run.save_model("model.safetensors")
""",
    "except": """
try:
    for step in run.steps(3): pass
except BaseException:
    run.save_model("model.safetensors")
    raise
""",
    "again": """
try:
    for step in run.steps(3): pass
except:
    print("once more")
    for step in run.steps(3): pass
run.save_model("model.safetensors")
""",
    "trouble": """
try:
    for step in run.steps(3): pass
finally:
    print(step.loss)
""",
    "code": """
try:
    for step in run.steps(3): pass
finally:
    raise SystemExit(3)
""",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_that_does_not_want_to_end_writes_nothing(kind: str, folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT + SCRIPTS[kind])
    layers = until_training(["train.py"], lambda run: measure(run.engine, rounds=3))
    assert len(layers.costs) == 1
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_control_the_same_script_writes_when_it_trains(folder: Path) -> None:
    exec(SCRIPT + SCRIPTS["finally"], {"__name__": "__main__"})
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "saved"}


@pytest.mark.parametrize("kind", ["finally", "except", "again"])
@pytest.mark.parametrize(("error", "ends"), [(UsageError("no"), UsageError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_what_goes_wrong_in_the_measuring_is_not_hidden_by_the_script(
    kind: str, error: BaseException, ends: type[BaseException], folder: Path
) -> None:
    def fail(run: Run) -> None:
        raise error

    (folder / "train.py").write_text(SCRIPT + SCRIPTS[kind])
    with pytest.raises(ends):
        until_training(["train.py"], fail)
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_a_module_that_does_not_exist_is_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "some_pack").mkdir()
    (folder / "some_pack" / "__init__.py").write_text("")
    (folder / "some_pack" / "broken.py").write_text("import not_there_either")
    for name in ("not_there", "some_pack.not_there", "not_there.train", "some_pack", "a..b", "some_pack/broken.py"):
        with pytest.raises(UsageError, match=re.escape(name)):
            until_training([name], lambda run: None, module=True)
    with pytest.raises(SystemExit):  # but what the script itself misses is its own error
        until_training(["some_pack.broken"], lambda run: None, module=True)
    assert "No module named 'not_there_either'" in capsys.readouterr().err
    sys.modules.pop("some_pack", None)


@pytest.mark.parametrize("text", ["print('done')", "import sys; sys.exit(0)"])
def test_a_script_that_never_trains(folder: Path, text: str) -> None:
    (folder / "train.py").write_text(text)
    with pytest.raises(UsageError, match=r"train\.py.*run\.steps"):
        until_training(["train.py"], lambda run: None)


@pytest.mark.parametrize("code", [7, "no data"])
def test_a_script_that_ends_itself_has_its_own_exit_code(folder: Path, code: int | str) -> None:
    (folder / "train.py").write_text(f"import sys; sys.exit({code!r})")
    with pytest.raises(SystemExit) as ended:
        until_training(["train.py"], lambda run: None)
    assert ended.value.code == code
