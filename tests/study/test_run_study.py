"""The command from its begin to its end, with a small plan; and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast import checkpoint
from holdfast.cli.main import app
from holdfast.study import run_study as tool
from holdfast.study.install import Installed
from holdfast.study.models import model_of
from holdfast.study.plots import draw
from holdfast.study.run_study import StudyPlan, StudySettings, study
from tests.study.conftest import Fork

SMALL = StudyPlan(costly=("lenet",), others=(), scaled="lenet", killed="small-gpt", rounds=1, other_rounds=1, kills=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "QUICK", SMALL)


def no_chainer(name: str, say: object) -> Installed:
    if name == "chainer":
        return Installed(framework=name, python=None, why="No matching distribution found for chainer")
    return tool_ensure(name, say)  # type: ignore[arg-type]


tool_ensure = tool.ensure


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "forked", [True, pytest.param(False, marks=pytest.mark.thorough("the same study in forks, which import nothing"))]
)
def test_the_whole_study(
    small: None, fork: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    """One framework that is there, one that cannot be installed: all axes, all files, advice that rests on rows."""
    monkeypatch.setattr(tool, "ensure", no_chainer)
    if forked:
        monkeypatch.setattr(tool, "Process", lambda framework, python, log, **_: fork(framework)(log))
    out = tmp_path / "out"
    arguments = ["study", "--quick", "--frameworks", "holdfast,chainer", "--out", str(out), "--mtbf", "2h", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout.strip().splitlines()[-1])
    for axis in ("cost", "formats", "scale", "determinism", "crash_safety", "advice"):
        assert results[axis], f"{axis} has no rows"
    assert not [row for axis in ("cost", "formats", "scale") for row in results[axis] if "error" in row]
    frameworks = {row["framework"]: row for row in results["frameworks"]}
    assert frameworks["holdfast"]["ok"]
    assert "No matching distribution" in frameworks["chainer"]["why"]
    assert not frameworks["chainer"]["ok"]

    ids = [
        row["id"]
        for axis in ("limits", "cost", "formats", "scale", "determinism", "crash_safety")
        for row in results[axis]
    ]
    assert len(ids) == len(set(ids))
    assert all(set(each["rests_on"]) <= set(ids) and each["rests_on"] for each in results["advice"])
    assert {row["verdict"] for row in results["determinism"]} == {"identical"}, "a Run restores all of it"
    assert {row["verdict"] for row in results["crash_safety"]} == {"safe"}, results["crash_safety"]

    assert json.loads((out / "report.json").read_text()) == results
    assert "chainer" in (out / "report.md").read_text()
    assert "<html" in (out / "report.html").read_text()
    # Whether there is an interval to draw depends on what was measured: what can be drawn from it is there.
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {path.name for path, _ in draw(results, tmp_path).values()}
    assert pictures >= {"cost.png", "determinism.png"}
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["logs"], "no checkpoint is left behind"


def test_the_users_own_model(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "step-00000001", {"model": model, "optimizer": optimizer})
    found = model_of(str(tmp_path))
    assert dict(found.shapes)["0.weight"] == (5, 3)
    assert not [name for name, _ in found.shapes if "exp_avg" in name], "the study makes its own optimizer"
    assert "1.num_batches_tracked" not in dict(found.shapes), "a counter is no weight"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--frameworks", "pytorch,numpy"],
        ["--frameworks", ","],
        ["--mtbf", "6 hours"],
        ["--mtbf", "0s"],
        ["--model", "nowhere"],
    ],
)
def test_bad_input_is_refused(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["study", "--out", str(tmp_path / "out"), *arguments])
    assert isinstance(result.exception, tool.UsageError)
    assert result.exception.exit_code == 2


def test_a_folder_that_cannot_be_is_refused_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(tool.UsageError, match=str(tmp_path)):
        study(StudySettings(out=tmp_path / "file" / "out"), print)


def test_too_little_room_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out" / "scratch").mkdir(parents=True)
    (tmp_path / "out" / "scratch" / "thesis.txt").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1_000_000))  # type: ignore[attr-defined]
    with pytest.raises(tool.UsageError, match="1 MB"):
        study(StudySettings(out=tmp_path / "out", quick=True), print)
    assert (tmp_path / "out" / "scratch" / "thesis.txt").exists(), "what was there before is not ours"


def test_no_framework_at_all_ends_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "ensure", no_chainer)
    with pytest.raises(tool.HoldfastError, match="No matching distribution"):
        study(StudySettings(out=tmp_path / "out", frameworks=("chainer",)), print)
