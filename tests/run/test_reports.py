"""Reports of what workers have written for a checkpoint: who is waited for, and who is not."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.checkpoint import index
from holdfast.errors import CheckpointError
from holdfast.run import reports
from holdfast.run.reports import FAILED, collect

MEMBERS = ["0.0", "0.1"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "PATIENCE", 0.05)
    monkeypatch.setattr(reports, "PARTED_SECONDS", 0.3)
    monkeypatch.setattr(reports, "read_report", lambda text: text)


def save_in(folder: Path) -> Any:
    return SimpleNamespace(path=folder, id="abc")


def report(save: Any, rank: int, text: bytes = b"well") -> None:
    (save.path / index.report_name(save.id, rank)).write_bytes(text)


def ask(save: Any, *, parted: bool, alive: tuple[str, ...] = ("0.0", "0.1")) -> list[Any]:
    left = threading.Event()
    if parted:
        left.set()
    return collect(save, MEMBERS, alive=lambda: alive, everywhere=threading.Event(), parted=left)


def test_a_worker_that_is_sent_away_does_not_wait_for_one_that_was_killed(tmp_path: Path) -> None:
    """It does not hear of the death: the last generation that it knows has both."""
    save = save_in(tmp_path)
    report(save, 0)
    (tmp_path / "data-abc-1.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"worker 0\.1"):
        ask(save, parted=True)


def test_it_waits_as_long_as_somebody_writes(tmp_path: Path) -> None:
    save = save_in(tmp_path)
    report(save, 0)

    def write_slowly() -> None:
        with (tmp_path / "data-abc-1.safetensors").open("wb") as file:
            for _ in range(12):
                file.write(b"more")
                file.flush()
                threading.Event().wait(0.05)
        report(save, 1)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    assert ask(save, parted=True) == [b"well", b"well"]
    writer.join(60)


@pytest.mark.parametrize("text", [None, FAILED])
def test_lost_members_and_shares_that_failed_are_noticed_anyway(tmp_path: Path, text: bytes | None) -> None:
    save = save_in(tmp_path)
    report(save, 0)
    if text is not None:
        report(save, 1, text)
    with pytest.raises(CheckpointError, match=r"worker 0\.1"):
        ask(save, parted=False, alive=("0.0",) if text is None else ("0.0", "0.1"))
