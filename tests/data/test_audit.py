"""The audit of a ledger, and the ledger itself: whatever is lost, doubled or contradictory is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.data.audit import LedgerError, Violation, audit, read_ledgers
from holdfast.data.ledger import NAME, Ledger
from holdfast.data.stream import Stream
from holdfast.data.stream_feed import StreamFeed
from tests.data.test_stream import Ranks, order_of

Lines = list[dict[str, Any]]


def letters(shard: str) -> Iterator[str]:
    yield from shard


def lines_of(number: int = 6, epochs: int | None = None) -> Lines:
    """The ledger of a small stream: shards of 5, 3 and 4 samples in two lanes."""
    stream = Stream(letters, shards=["abcde", "xyz", "fghi"], epochs=epochs)
    feed = StreamFeed(stream, order=order_of(stream), collate=list)
    found: Lines = [{"ledger": 1, "start": "1/a", **feed.facts}]
    for step in range(number):
        if feed.is_over(feed.state()):
            break
        feed.prepare(step, Ranks())
        indices = range(feed.order.micro_batches(step))
        feed.begin(step, indices)
        for index in indices:
            feed.read(step, index)
        feed.agree(Ranks().exchange)
        feed.keep()
        feed.drop()
        state = feed.state()
        assert state is not None
        found.append({"start": "1/a", "workers": ["0.0", "0.1"], **state["record"]})
    return found


def judge(lines: Lines) -> Any:
    return audit([json.dumps(line).encode() for line in lines])


def test_a_right_ledger() -> None:
    found = judge(lines_of())
    assert (found.steps, found.samples, found.epochs, found.lost, found.shards) == (6, 24, 1, 0, 3)
    assert judge(lines_of(99, epochs=2)).samples == 24
    assert judge(lines_of(99, epochs=2)).epochs == 2


def _span(lines: Lines, step: int) -> list[int]:
    return lines[1 + step]["used"][0][1][0]


def _lose(lines: Lines) -> None:
    _span(lines, 1)[2] += 1


def _lose_at_the_end_of_the_ledger(lines: Lines) -> None:
    lines[-1]["used"][1][1].clear()
    lines[-1]["samples"] -= 2


def _lose_at_the_end_of_a_shard(lines: Lines) -> None:
    ends = next(line["ends"] for line in lines if line.get("ends"))
    ends[0][2] += 1


def _double(lines: Lines) -> None:
    _span(lines, 2)[2] -= 1


def _read_a_micro_batch_twice(lines: Lines) -> None:
    lines[2]["used"][0] = lines[2]["used"][1]


def _leave_a_shard(lines: Lines) -> None:
    for line in lines:
        line["ends"] = [end for end in line.get("ends", ()) if end[1] != 2]


def _skip_a_step(lines: Lines) -> None:
    del lines[3]


def _contradict(lines: Lines) -> None:
    again = json.loads(json.dumps(lines[2]))
    again["used"][0][1][0][2] += 1
    lines.append(again)


def _forget_the_begin(lines: Lines) -> None:
    del lines[1:3]


def _count_wrong(lines: Lines) -> None:
    lines[1]["samples"] += 1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_lose, "step 1: sample 2 of abcde was lost"),
        (_lose_at_the_end_of_the_ledger, "step 5: .* lost"),
        (_lose_at_the_end_of_a_shard, "step 1: sample 3 of xyz was lost"),
        (_double, "step 2: sample 3 of abcde was used twice"),
        (_read_a_micro_batch_twice, "step 1: .* used twice"),
        (_leave_a_shard, "fghi was left after 4 samples"),
        (_skip_a_step, "step 2 is not in the ledger"),
        (_contradict, "step 1: two records"),
        (_forget_the_begin, "step 0 is not in the ledger"),
        (_count_wrong, "step 0: it has 5 samples, and has used 4"),
    ],
)
def test_what_is_wrong_is_named(spoil: Callable[[Lines], None], says: str) -> None:
    lines = lines_of()
    judge(lines)
    spoil(lines)
    with pytest.raises(Violation, match=says):
        judge(lines)


def test_a_later_start_replaces_the_steps_that_it_trains_again() -> None:
    lines = lines_of()
    again = [{**line, "start": "3/b", "workers": ["0.1", "0.2"]} for line in lines]
    found = judge([*lines[:6], {**again[0]}, *again[4:]])
    assert (found.steps, found.starts, found.again) == (6, 2, 2)
    with pytest.raises(Violation, match="step 5 is not in the ledger, but step 6 is"):
        judge([*lines[:6], {**again[-1], "step": 6}])


def test_workers_that_are_lost_are_counted() -> None:
    lines = lines_of()
    lines[4]["workers"] = ["0.1", "0.2"]
    for line in lines[5:]:
        line["workers"] = ["0.2", "0.3", "0.4"]
    found = judge(lines)
    assert (found.workers, found.lost) == (5, 2)


def test_the_next_first_worker_writes_what_is_missing(tmp_path: Path) -> None:
    """The first one dies before it writes step 2, in the middle of a line; the others have the record."""
    head, *records = lines_of()
    facts = {key: head[key] for key in ("shards", "lanes")}
    one, other = Ledger(tmp_path / NAME, facts), Ledger(tmp_path / NAME, facts)
    for number, record in enumerate(records):
        bare = {key: value for key, value in record.items() if key not in ("start", "workers")}
        if number < 2:
            one.note(bare, start="1/a", workers=["0.0", "0.1"], first=True)
        if number == 2:
            one.close()
            with (tmp_path / NAME).open("ab") as file:
                file.write(b'{"start":"1/a","st')
        other.note(bare, start="1/a", workers=["0.1"] if number > 2 else ["0.0", "0.1"], first=number > 2)
    found = audit(read_ledgers([tmp_path]))
    assert (found.steps, found.torn, found.lost) == (6, 1, 1)
    lines = (tmp_path / NAME).read_bytes().splitlines()
    assert len(lines) == 1 + 6 + 1, "nothing is written twice"


def test_a_run_that_goes_back_writes_those_steps_again(tmp_path: Path) -> None:
    head, *records = lines_of()
    for start, steps in {"1/a": range(5), "1/b": range(3, 6)}.items():
        ledger = Ledger(tmp_path / NAME, {key: head[key] for key in ("shards", "lanes")})
        bare = [{key: value for key, value in each.items() if key not in ("start", "workers")} for each in records]
        ledger.hold(bare[steps[0] - 1] if steps[0] else None)
        for step in steps:
            ledger.note(bare[step], start=start, workers=["0.0"], first=True)
    found = audit(read_ledgers([tmp_path]))
    assert (found.steps, found.starts, found.again) == (6, 2, 2)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (0, "lanes", 1000),  # the audit would not end
        (0, "lanes", 0),
        (0, "shards", None),
        (1, "used", [[0, [["x", 0, 0, 2]]]]),
        (1, "used", [[0, [[0, 99, 0, 2]]]]),
        (1, "ends", None),
        (1, "to", [[0, 0, 0]]),
        (1, "step", None),
        (1, "start", 3),
        (1, "workers", 3),
    ],
)
def test_a_damaged_line_is_named(line: int, key: str, value: Any) -> None:
    lines = lines_of()
    lines[line] = {**lines[line], key: value}
    with pytest.raises(LedgerError, match=f"line {line + 1} of the ledger is damaged"):
        audit([json.dumps(each).encode() for each in lines])


def test_the_command(tmp_path: Path) -> None:
    """Exit code 0: proven; 1: a violation; 4: no ledger."""
    run = CliRunner()
    write = lambda lines: (tmp_path / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))  # noqa: E731
    write(lines_of())
    result = run.invoke(app, ["data", "verify", str(tmp_path), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1])["samples"] == 24
    lines = lines_of()
    _lose(lines)
    write(lines)
    result = run.invoke(app, ["data", "verify", str(tmp_path / NAME)])
    assert result.exit_code == 1
    assert "sample 2 of abcde was lost" in result.output
    for spoiled in ("", "{}\n"):
        (tmp_path / NAME).write_text(spoiled)
        assert _code(run.invoke(app, ["data", "verify", str(tmp_path)])) == LedgerError.exit_code == 4
    assert _code(run.invoke(app, ["data", "verify", str(tmp_path / "nothing")])) == 4


def _code(result: Any) -> int:
    """As ``holdfast.cli.main.main`` ends with it."""
    assert isinstance(result.exception, LedgerError)
    return result.exception.exit_code
