"""``holdfast top``, on recorded events."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from holdfast.watch.reader import Reader
from holdfast.watch.table import picture
from tests.warm import Command
from tests.watch.test_fold import events_of, until


def folder_with(events: list[dict[str, object]], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def drawn(folder: Path) -> str:
    reader = Reader(folder)
    fold = reader.read_all()
    console = Console(file=io.StringIO(), width=200)
    console.print(picture(fold.view(), fold.moments, lambda name, pids: 123_000_000))
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return shown


def test_workers_with_their_processes_steps_times_and_what_is_lost(tmp_path: Path) -> None:
    shown = drawn(folder_with(until(events_of("stage_lost"), "checkpoint", 2), tmp_path / "logs"))
    lines = [line.split() for line in shown.splitlines()]
    [row] = [line for line in lines if line[:2] == ["0.1", "0"]]
    assert "training" in row
    assert "7-9" in row  # it has taken the lost layers
    assert "123" in row
    [lost] = [line for line in lines if line[:2] == ["0.3", "0"]]
    assert "lost" in lost
    assert "the others go on" in shown
    assert "only copy" in shown


def test_control_characters_of_a_file_do_not_steer_the_terminal(tmp_path: Path) -> None:
    events = until(events_of("stage_lost"), "entered")
    next(event for event in events if event["event"] == "run")["command"] = ["\x1b[2Jtrain.py"]
    next(event for event in events if event["event"] == "started")["worker"] = "\x1b]0;x\x07[bold]"
    shown = drawn(folder_with(events, tmp_path / "logs"))
    assert "\x1b[2J" not in shown
    assert "\\x1b[2J" in shown
    assert "[bold]" in shown


def test_once_as_json(tmp_path: Path) -> None:
    logs = folder_with(until(events_of("stage_lost"), "recovery"), tmp_path / "logs")
    before = {path: path.stat().st_mtime_ns for path in logs.iterdir()}
    command = Command("top", str(logs), "--once", "--json", folder=tmp_path)
    assert command.wait(60) == 0, command.stderr
    found = json.loads(command.stdout)
    assert [worker["name"] for worker in found["workers"]] == ["0.0", "0.1", "0.2"]
    assert found["workers"][0]["memory"] is None  # those processes are long gone, whoever has their numbers now
    assert found["counts"]["recovery"] == 1
    assert {path: path.stat().st_mtime_ns for path in logs.iterdir()} == before


def test_once_for_people_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    logs = folder_with(events_of("stage_lost"), tmp_path / "logs")
    command = Command("top", str(logs), "--once", folder=tmp_path)
    assert command.wait(60) == 0, command.stderr
    assert "finished" in command.stdout
    command = Command("top", "nowhere", folder=tmp_path, name="missing")
    assert command.wait(60) == 2
    assert "there is no folder nowhere" in command.stderr
