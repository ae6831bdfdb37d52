"""The journal: each row once, whoever writes; what is trained again replaces what was there."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.engine.progress import Progress
from holdfast.errors import CheckpointError, UsageError
from holdfast.journal import journal as journal_module
from holdfast.journal import rows
from holdfast.journal.journal import Journal
from tests.journal import readers


class Worker:
    """A worker of a run: it makes steps as the others do, and writes while it is the first."""

    def __init__(self, folder: Path | None, *, first: bool = False, sinks: tuple[Any, ...] = ()) -> None:
        self.first = first
        self.progress = Progress()
        self.journal = Journal(self.progress, is_first=lambda: self.first, folder=folder)
        for sink in sinks:
            self.journal.to(sink)

    def begin(self, step: int) -> None:
        self.progress.step = step
        self.progress.rows = [row for row in self.progress.rows if row["step"] < step]
        self.journal.begin(step)

    def step(self, number: int, **values: Any) -> None:
        """A commit, and the body of the loop after it."""
        self.journal.write()
        self.journal.open(step=number, facts={"loss": 1.0 / (1 + number)})
        if values:
            self.journal.add(values)
        self.journal.close()

    def tell(self, other: Worker) -> None:
        """To a joiner: what a run's progress says, as JSON."""
        other.progress.take(json.loads(json.dumps(self.progress.to_json())))


class Notes:
    """A sink of a user."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.rows: list[Mapping[str, Any]] = []
        self.ended = 0

    def begin(self, folder: Path, step: int) -> None:
        self.begun.append(step)
        self.rows = [row for row in self.rows if row["step"] < step]

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def end(self) -> None:
        self.ended += 1


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in readers.jsonl(folder)]


def test_a_row_is_written_with_the_commit_after_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path, first=True)
    worker.begin(0)
    worker.step(0, accuracy=torch.tensor(0.5), note="warm")
    assert steps_in(tmp_path) == []
    worker.step(1)
    (row,) = rows.read(tmp_path / rows.NAME)
    assert row.pop("time") > 0
    assert row == {"step": 0, "loss": 1.0, "accuracy": 0.5, "note": "warm"}
    worker.journal.end()
    assert steps_in(tmp_path) == [0, 1]


@pytest.mark.parametrize("written", [False, True])
def test_the_next_first_worker_goes_on_without_a_gap(tmp_path: Path, written: bool) -> None:
    lost, other = Worker(tmp_path, first=True), Worker(tmp_path)
    for worker in (lost, other):
        worker.begin(0)
        for number in range(5):
            worker.step(number)
    if written:  # the commit of step 5 was seen by the one that is lost, which then wrote row 4
        lost.journal.write()
    joiner = Worker(tmp_path, first=True)  # a joiner may well be the first from now on
    other.tell(joiner)
    for number in range(5, 8):
        other.step(number)
        joiner.step(number)
    joiner.journal.end()
    other.journal.end()
    assert steps_in(tmp_path) == list(range(8))


def test_a_writer_that_wakes_up_late_writes_where_nobody_sees_it(tmp_path: Path) -> None:
    asleep, other = Worker(tmp_path, first=True), Worker(tmp_path)
    for worker in (asleep, other):
        worker.begin(0)
        for number in range(3):
            worker.step(number)
    other.first = True
    other.step(3)
    asleep.journal.write()
    other.step(4)
    assert steps_in(tmp_path) == [0, 1, 2, 3]


def test_the_journals_own_values_are_not_replaced(tmp_path: Path) -> None:
    worker = Worker(tmp_path, first=True)
    worker.begin(0)
    worker.step(0, loss=1.0)  # the very value: people log the step's loss out of habit
    worker.journal.open(step=1, facts={"loss": 0.5})
    for name in ("loss", "grad_norm"):  # this row has no norm, but others do
        with pytest.raises(UsageError, match=rf"'{name}' is what the journal itself.*'test/{name}'"):
            worker.journal.add({name: 0.25, "accuracy": 0.5})
    worker.journal.after(1, is_past=False)
    with pytest.raises(UsageError, match="'loss' is what the journal itself"):
        worker.journal.add({"loss": 0.5})  # a sink has one value of a name for each step
    worker.journal.end()
    assert [(row["loss"], "accuracy" in row) for row in rows.read(tmp_path / rows.NAME)] == [(1.0, False), (0.5, False)]


def test_half_a_line_is_left_out_and_written_whole(tmp_path: Path) -> None:
    lost, other = Worker(tmp_path, first=True), Worker(tmp_path)
    for worker in (lost, other):
        worker.begin(0)
        for number in range(3):
            worker.step(number)
    with (tmp_path / rows.NAME).open("a") as file:
        file.write('{"step": 2, "lo')
    other.first = True
    other.step(3)
    assert steps_in(tmp_path) == [0, 1, 2]


def test_a_resumed_run_replaces_what_it_trains_again(tmp_path: Path) -> None:
    before = Worker(tmp_path, first=True)
    before.begin(0)
    for number in range(6):
        before.step(number, life=1)
    saved = [*before.progress.rows][:4]  # the checkpoint of step 4 has the rows that were closed by then
    before.step(6)
    (tmp_path / rows.NAME).write_bytes(b"".join(rows.line(row) for row in rows.read(tmp_path / rows.NAME)[:3]))
    after = Worker(tmp_path, first=True)
    after.progress.rows = saved
    after.begin(4)
    for number in range(4, 8):
        after.step(number, life=2)
    after.journal.end()
    lives = [1] * 4 + [2] * 4
    assert readers.jsonl(tmp_path, "life") == [*enumerate(lives)], "row 3 was lost with the machine: it is there again"


def test_a_run_that_begins_anew_keeps_what_was_there_aside(tmp_path: Path) -> None:
    for life in (1, 2):
        worker = Worker(tmp_path, first=True)
        worker.begin(0)
        worker.step(0, life=life)
        worker.journal.end()
    assert readers.jsonl(tmp_path, "life") == [(0, 2)]
    assert '"life": 1' in (tmp_path / f"{rows.NAME}.old").read_text()


def test_what_is_logged_after_a_loop_has_a_row_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):  # a finished run that is started again logs it again, and nothing is written
        worker = Worker(tmp_path, first=True)
        worker.begin(2 if (tmp_path / rows.NAME).exists() else 0)
        for number in range(worker.progress.step, 2):
            worker.step(number)
        worker.journal.after(1, is_past=False)
        worker.journal.add({"test": 0.5})
        worker.journal.add({"f1": 0.25})
        worker.journal.end()
        found = rows.read(tmp_path / rows.NAME)
        assert [rows.key_of(row) for row in found] == [(0, False), (1, False), (1, True)]
        assert found[2].items() >= {"test": 0.5, "f1": 0.25}.items()


def test_a_joiner_logs_nothing_where_the_others_have_been(tmp_path: Path) -> None:
    worker = Worker(tmp_path, first=True)
    worker.begin(0)
    worker.journal.after(9, is_past=True)
    worker.journal.add({"test": 0.5})
    worker.journal.end()
    assert worker.progress.rows == []


def test_only_what_json_has_can_be_logged() -> None:
    worker = Worker(None, first=True)
    with pytest.raises(UsageError, match="no step yet"):
        worker.journal.add({"loss": 0.5})
    worker.journal.open(step=3, facts={})
    endless: list[Any] = []
    endless.append(endless)
    worker.journal.add({"step": 3, "nan": math.nan, "deep": {"a": [np.float32(0.5)]}, "flag": np.True_})
    for values, words in [
        ([1], "list"),
        ({1: 2}, "name"),
        ({"x": torch.ones(2)}, "Tensor"),
        ({"x": object()}, "object"),
        ({"x": endless}, "contains itself"),
        ({"time": 1.0}, "itself"),
        ({"step": 4}, "not the step"),
    ]:
        with pytest.raises(UsageError, match=words):
            worker.journal.add(values)  # type: ignore[arg-type]
    worker.journal.close()
    (row,) = worker.progress.rows
    assert row["nan"] is None
    assert row["deep"] == {"a": [0.5]}
    assert row["flag"] is True


def test_without_a_folder_there_is_a_file_only_once_something_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = Worker(None, first=True)
    worker.begin(0)
    worker.step(0)
    worker.step(1)
    assert not [*tmp_path.iterdir()]
    worker.step(2, accuracy=0.5)
    worker.journal.end()
    assert steps_in(tmp_path / journal_module.FOLDER) == [0, 1, 2]


def test_a_folder_that_is_lost_to_another_run_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def taken() -> None:
        raise CheckpointError("another run has it")

    journal = Journal(Progress(), is_first=lambda: True, folder=tmp_path, check=taken)
    with caplog.at_level(logging.WARNING):
        journal.begin(0)
        for number in range(3):
            journal.write()
            journal.open(step=number, facts={"loss": 0.5})
            journal.close()
    assert not [*tmp_path.iterdir()]
    assert len([record for record in caplog.records if "another run has it" in record.message]) == 1


def test_a_sink_gets_each_row_once_and_the_last_ones_again(tmp_path: Path) -> None:
    notes = Notes()
    lost, other = Worker(tmp_path, first=True, sinks=(notes,)), Worker(tmp_path, sinks=(notes,))
    for worker in (lost, other):
        worker.begin(0)
        for number in range(5):
            worker.step(number)
    notes.write({"step": 4})  # the one that is lost has got so far, and not to the file
    other.first = True
    other.step(5)
    other.journal.end()
    assert [row["step"] for row in notes.rows] == list(range(6))
    assert notes.begun == [0, 0]
    assert notes.ended == 1


def test_a_sink_that_fails_ends_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Notes):
        def write(self, row: Mapping[str, Any]) -> None:
            raise KeyError("no network")

    fails, notes = Fails(), Notes()
    worker = Worker(tmp_path, first=True, sinks=(fails, notes))
    with caplog.at_level(logging.WARNING):
        worker.begin(0)
        for number in range(3):
            worker.step(number)
    assert len([record for record in caplog.records if "KeyError: 'no network'" in record.message]) == 1
    assert [row["step"] for row in notes.rows] == steps_in(tmp_path) == [0, 1]
