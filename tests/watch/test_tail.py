"""Reading of files that grow, are cut, are replaced, and hold what is no event."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.watch.tail import Tail


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read().records == []  # the file is not there yet
    path.write_text('{"a": 1}\n{"a"')
    assert tail.read().records == [{"a": 1}]
    assert tail.read().records == []
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.read().records == [{"a": 2}]


def test_a_file_that_was_cut_or_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(path)
    assert len(tail.read().records) == 2
    path.write_text('{"a": 3}\n')
    found = tail.read()
    assert (found.again, found.records) == (True, [{"a": 3}])
    other = tmp_path / "other"
    other.write_text('{"a": 4}\n{"a": 5}\n{"a": 6}\n')
    os.replace(other, path)
    found = tail.read()
    assert (found.again, [each["a"] for each in found.records]) == (True, [4, 5, 6])


def test_what_is_no_object_is_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    deep = "[" * 100_000
    path.write_text(f'nonsense\n{{"a": 1}}\n[1]\n\n{deep}\n\xff\n{{"a": 2}}\n')
    found = Tail(path).read()
    assert ([each["a"] for each in found.records], found.unread) == ([1, 2], 4)


def test_a_file_is_read_in_bounded_parts_and_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 0}\n' + "x" * 5000 + "\n" + "".join(f'{{"a": {n}}}\n' for n in range(1, 200)))
    tail = Tail(path, part=100, longest=50)
    found, unread, more = [], 0, True
    while more:
        one = tail.read()
        assert len(one.records) <= 100
        found += [each["a"] for each in one.records]
        unread, more = unread + one.unread, one.more
    assert found == list(range(200))
    assert unread == 1
    assert tail.share == 1.0
