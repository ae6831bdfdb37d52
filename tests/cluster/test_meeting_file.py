"""The file in which a job's agents meet: who begins the run, who joins it, who waits."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.cluster.meeting_file import Meeting, begin_or_join, follow, read
from holdfast.errors import UsageError


def meeting(step: str) -> Meeting:
    return Meeting(steps=(step,), endpoint=f"{step}:1", token=f"the secret of {step}")


def begin(path: Path, step: str, *running: str) -> Meeting:
    return begin_or_join(path, step, lambda: meeting(step), is_running=lambda name: name in running)


def test_a_step_joins_a_run_while_any_of_its_steps_runs(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.meeting"
    assert begin(path, "1.0.0").endpoint == "1.0.0:1"
    assert begin(path, "2.0.0", "1.0.0").endpoint == "1.0.0:1"
    assert begin(path, "3.0.0", "2.0.0").steps == ("1.0.0", "2.0.0", "3.0.0")
    assert begin(path, "4.0.0") == meeting("4.0.0")  # the others have ended
    assert path.stat().st_mode & 0o777 == 0o600


def test_of_steps_that_start_at_once_one_begins(tmp_path: Path) -> None:
    path, steps, found = tmp_path / "run.meeting", [f"{number}.0.0" for number in range(8)], []
    threads = [threading.Thread(target=lambda step=step: found.append(begin(path, step, *steps))) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.endpoint for each in found}) == 1
    assert sorted((read(path) or meeting("")).steps) == steps


def test_the_others_of_a_step_wait_for_its_first(tmp_path: Path) -> None:
    path = tmp_path / "run.meeting"
    begin(path, "1.0.0")  # of an earlier run
    first = threading.Timer(0.2, lambda: begin(path, "2.0.0"))
    first.start()
    assert follow(path, "2.0.0", patience=30.0) == meeting("2.0.0")
    first.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root gives files away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """In a folder that many may write to: who wrote it would know the secret, and lead us to a run of theirs."""
    path = tmp_path / "run.meeting"
    begin(path, "1.0.0")
    os.chown(path, 65534, 65534)
    for act in (lambda: begin(path, "1.0.0"), lambda: follow(path, "1.0.0", patience=9.0), lambda: read(path)):
        with pytest.raises(UsageError, match="somebody else's"):
            act()


def test_files_that_lie_ready_under_guessed_names_are_not_written_to(tmp_path: Path) -> None:
    path, bait = tmp_path / "run.meeting", tmp_path / "bait"
    bait.touch()
    (tmp_path / f"run.meeting.{os.getpid()}").symlink_to(bait)
    begin(path, "1.0.0")
    assert bait.read_text() == ""
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 4  # with the lock: nothing else is left behind


@pytest.mark.parametrize("text", [None, "", "{}", '{"steps": 3, "endpoint": "a:1", "token": ""}', "\x00\xff"])
def test_a_file_that_never_comes_is_a_sentence(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "run.meeting"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match="has not written"):
        follow(path, "1.0.0", patience=0.05)
    assert begin(path, "1.0.0") == meeting("1.0.0")
