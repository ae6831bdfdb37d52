"""The scripts of docs/run.md and docs/pipelines.md do what the text beside them says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.warm import Command, Script

ROOT = Path(__file__).parents[2]


def script_in(document: str, containing: str) -> str:
    """The one Python block of a document that has this text in it."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    [found] = [block for block in blocks if containing in block]
    return found


def run(folder: Path, *command: str) -> str:
    """``holdfast run …``, or a script alone."""
    done = Command(*command, folder=folder) if command[0] == "run" else Script(*command, folder=folder)
    assert done.wait(240) == 0, done.stderr
    return done.stdout


def pipelines(folder: Path, generation: int = 1) -> list[int]:
    """The stages of each pipeline of a generation."""
    lines = (folder / "holdfast-logs" / "events.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    places = [event for event in events if event["event"] == "layout" and event["generation"] == generation]
    return sorted([place["pipeline"] for place in places].count(number) for number in {p["pipeline"] for p in places})


@pytest.mark.thorough("tests/faults/test_pipelines.py has such a script; that of docs/run.md runs below")
def test_the_script_of_the_pipelines_page_comes_to_the_same_in_pipelines_and_in_one_process(tmp_path: Path) -> None:
    script = script_in("docs/pipelines.md", "memory=")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "alone.py").write_text(script.replace('memory="700kB"', "memory=None"))
    together = run(tmp_path, "run", "-n", "5", "train.py").splitlines()
    alone = run(tmp_path, "alone.py").splitlines()
    assert pipelines(tmp_path) == [2, 3]
    assert re.fullmatch("[0-9a-f]{64}", alone[-1])
    assert together[-1] == f"[0.0] {alone[-1]}"


@pytest.mark.thorough("tests/faults/test_pipelines.py has numbers of stages")
@pytest.mark.parametrize("stages", ["stages=3", "stages=[3, 3, 4]"])
def test_what_the_page_of_run_says_of_stages_is_possible(tmp_path: Path, stages: str) -> None:
    script = script_in("docs/run.md", "memory=")
    assert stages in script
    few = (
        script.replace('memory="55MB",', f"{stages},")
        .replace("steps(20)", "steps(1)")
        .replace("tolerate=1", "tolerate=0")
    )
    (tmp_path / "train.py").write_text(few)
    run(tmp_path, "run", "-n", "3", "train.py")
    assert pipelines(tmp_path) == [3]


def test_the_script_of_the_page_of_run_trains_as_it_says(tmp_path: Path) -> None:
    script = script_in("docs/run.md", "memory=")
    (tmp_path / "train.py").write_text(script.replace("steps(20)", "steps(2)"))
    printed = run(tmp_path, "run", "-n", "5", "train.py").splitlines()
    assert [line.split()[1] for line in printed] == ["0", "1"]
    assert pipelines(tmp_path) == [2, 3]
