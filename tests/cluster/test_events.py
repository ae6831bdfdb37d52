"""The event log: whoever writes, whenever it dies, whole lines come out."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path

from holdfast.cluster.events import Events, read_events


def test_lines_of_many_writers_stay_whole_and_in_each_writers_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(worker: int) -> None:
        events = Events(path)  # each has its own descriptor, as processes have
        for step in range(200):
            events.write("commit", worker=worker, step=step, padding="x" * 500)

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = defaultdict(list)
    for event in read_events(path):
        steps[event["worker"]].append(event["step"])
    assert dict(steps) == {worker: list(range(200)) for worker in range(4)}


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Events(path).write("commit", step=1)
    with path.open("a") as file:
        file.write('{"event": "com')
    assert [event["step"] for event in read_events(path)] == [1]


def test_a_second_log_continues_the_first(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for step in range(2):
        Events(path).write("commit", step=step)
    found = list(read_events(path))
    assert [event["step"] for event in found] == [0, 1]
    assert found[0]["t"] <= found[1]["t"]


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Events(None).write("commit", step=3)
    assert list(tmp_path.iterdir()) == []
