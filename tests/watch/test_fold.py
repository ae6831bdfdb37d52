"""The fold on recorded events of real runs, on hostile ones, and on many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.watch.fold import HISTORY, Fold
from holdfast.watch.reader import Reader
from holdfast.watch.series import POINTS

RECORDED = Path(__file__).parent / "recorded"


def events_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def folded(events: list[dict[str, Any]], **settings: Any) -> Fold:
    fold = Fold(**settings)
    for event in events:
        fold.hear(event)
    return fold


def until(events: list[dict[str, Any]], kind: str, number: int = 1) -> list[dict[str, Any]]:
    """The events up to the first of a kind."""
    places = [place for place, event in enumerate(events) if event["event"] == kind]
    return events[: places[number - 1] + 1]


def test_a_lost_stage_is_seen_from_the_kill_to_the_end() -> None:
    events = events_of("stage_lost")
    before = folded(until(events, "failure")[:-2]).view()
    assert (before.phase, before.layers, len(before.workers)) == ("training", 10, 4)
    assert [(worker.name, worker.first, worker.stop) for worker in before.workers][-1] == ("0.3", 7, 10)
    assert before.survival.alone[-1] == ("0.3", "7-9")
    assert "log" in before.survival.words[0]
    lost = folded(until(events, "failure"))
    assert (lost.view().phase, lost.view().gone[0].name) == ("recovering", "0.3")
    regrouped = folded(until(events, "generation", 2)).view()
    assert "not settled" in regrouped.survival.words[0]
    end = folded(events)
    view = end.view()
    assert (view.phase, view.step, view.unread) == ("finished", 8, 0)
    assert view.survival.words == ("The run is over.",)
    kinds = [moment.kind for moment in end.moments]
    assert {"loss", "replay", "recovery", "checkpoint"} <= set(kinds)
    [recovery] = [event for event in events if event["event"] == "recovery"]
    assert view.recovery_ms == recovery["ms"]
    assert [saved.step for saved in view.saved] == [event["step"] for event in events if event["event"] == "checkpoint"]
    assert end.curves["loss"].to_json()["steps"] == list(range(8))


def test_where_a_worker_spends_its_steps() -> None:
    events = until(events_of("stage_lost"), "failure")[:-2]
    commits = [event for event in events if event["event"] == "commit" and event["worker"] == "0.1"]
    worker = next(each for each in folded(events).view().workers if each.name == "0.1")
    assert worker.step == len(commits)
    assert worker.seconds is not None
    assert worker.waiting is not None
    assert worker.computing is not None
    assert 0 < worker.waiting < worker.seconds
    assert worker.computing == pytest.approx(worker.seconds - worker.waiting)
    assert min(event["sent"] for event in commits) <= (worker.sent or 0) <= max(event["sent"] for event in commits)


def test_replicas_that_train_apart_show_how_often_they_meet() -> None:
    events = events_of("replicas_apart")
    fold = folded(events)
    view = fold.view()
    assert (view.phase, view.unread) == ("finished", 0)
    assert view.counts["sync"] == len({event["number"] for event in events if event["event"] == "sync"})
    assert view.lssr == [event["lssr"] for event in events if event["event"] == "sync"][-1]


def test_the_past_is_shown_again() -> None:
    events = events_of("stage_lost")
    fold = folded(events)
    [failure] = [event for event in events if event["event"] == "failure"]
    past = fold.at(failure["t"] - 0.001).view()
    assert past.phase == "training"
    assert [worker.name for worker in past.workers] == ["0.0", "0.1", "0.2", "0.3"]
    assert past.step == 7
    assert past.loss == pytest.approx(next(event["loss"] for event in events if event.get("step") == 6))
    assert fold.view().phase == "finished"


def test_the_past_is_the_same_after_a_part_of_it_is_summed_up() -> None:
    events = events_of("stage_lost")
    fold, short = folded(events), folded(events, history=20)
    assert len(short._history) <= 20
    t = events[-4]["t"]
    assert short.at(t).view().workers == fold.at(t).view().workers
    assert (short.view().since or 0) > (fold.view().since or 0)


def test_a_run_that_goes_on_from_a_checkpoint_trains_its_steps_again() -> None:
    events = events_of("stage_lost")
    later = {"t": events[-1]["t"] + 1, "worker": "0.0", "generation": 1}
    again = [
        {**later, "event": "run", "command": ["pipeline.py"], "pid": 3},
        {**later, "event": "resumed", "step": 5, "path": "saved"},
        {**later, "event": "commit", "step": 5, "loss": 2.0},
    ]
    view = folded([*events, *again]).view()
    assert (view.phase, view.step, view.loss) == ("training", 6, 2.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["worker", "generation", "step", "loss", "workers", "hosts", "number", "first", "stop", "pipeline", "stage"]
FIELDS += ["reason", "cause", "ms", "lost", "host", "pid", "code", "bytes", "seconds", "waited", "sent", "boundaries"]
START = [event for event in events_of("stage_lost")[:30] if event["event"] != "commit"]
KINDS = sorted(Fold()._hearers)


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.floats(), st.dictionaries(st.sampled_from(FIELDS), JSON)), max_size=12
    ),
    st.randoms(use_true_random=False),
)
def test_no_event_makes_it_raise_or_say_what_json_does_not_have(
    strange: list[tuple[str, float, dict[str, Any]]], dice: Any
) -> None:
    events = START[:]
    for kind, t, fields in strange:
        events.insert(dice.randrange(len(events) + 1), {"t": t, "event": kind, **fields})
    fold = folded(events)
    fold.row({name: value for _, _, fields in strange for name, value in fields.items()})
    json.dumps(fold.view().to_json(), allow_nan=False)
    json.dumps([curve.to_json() for curve in fold.curves.values()], allow_nan=False)
    fold.at(START[-1]["t"]).view()


def test_memory_is_bounded_for_10_000_steps_and_200_workers() -> None:
    names, fold = [f"{n // 8}.{n % 8}" for n in range(200)], Fold(history=2_000)
    fold.hear({"t": 0.0, "event": "run", "command": ["train.py"], "pid": 1})
    for step in range(10_000):
        t = float(step)
        if step % 500 == 0:
            number = 1 + step // 500
            fold.hear({"t": t, "event": "generation", "number": number, "workers": names, "hosts": names, "reason": ""})
            for name in names:
                place = {"pipeline": 0, "stage": 0, "first": 0, "stop": 4, "host": name, "reason": ""}
                fold.hear({"t": t, "event": "layout", "worker": name, "generation": number, **place})
            fold.hear({"t": t, "event": "checkpoint", "step": step, "bytes": 5})
        for name in names if step % 500 == 0 else names[:1]:
            spent = {"seconds": 0.5, "waited": 0.1, "sent": 100}
            fold.hear({"t": t, "event": "commit", "worker": name, "generation": 1, "step": step, "loss": 1.0, **spent})
        fold.hear({"t": t, "event": "recovery", "lost": [], "ms": 3.0})
    view = fold.view()
    assert (view.step, len(view.workers), view.counts["recovery"], view.unread) == (10_000, 200, 10_000, 0)
    assert len(fold._history) <= 2_000 <= HISTORY
    assert len(fold.moments) <= 2_000
    assert all(len(curve) <= POINTS for curve in fold.curves.values())
    told = json.dumps([view.to_json(), *(curve.to_json() for curve in fold.curves.values())], allow_nan=False)
    assert len(told) < 200_000


def test_the_reader_follows_events_and_journal(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    assert reader.read_all().view().phase == "nothing"
    lines = (RECORDED / "replicas_apart.jsonl").read_bytes()
    events = tmp_path / "events.jsonl"
    events.write_bytes(lines[:1000])
    assert reader.read_all().view().phase in ("starting", "training")
    events.write_bytes(lines)
    elsewhere = tmp_path / "saved" / "metrics.jsonl"
    elsewhere.parent.mkdir()
    rows = (RECORDED / "replicas_apart_metrics.jsonl").read_bytes()
    elsewhere.write_bytes(rows)
    with events.open("a") as file:
        file.write(json.dumps({"t": 1.0, "event": "journal", "path": str(elsewhere)}) + "\n")
    view = reader.read_all().view()
    last = json.loads(rows.splitlines()[-1])
    assert (view.phase, view.lr, view.grad_norm) == ("finished", last["lr"], last["grad_norm"])
    assert len(reader.fold.curves["lr"]) == len(rows.splitlines())
    (tmp_path / "new").write_bytes(rows.splitlines(keepends=True)[0])
    (tmp_path / "new").replace(elsewhere)  # the next first worker has written it anew
    assert len(reader.read_all().curves["lr"]) == 1
    events.write_text("")
    assert reader.read_all().view().phase == "nothing"


def test_a_log_is_shown_of_workers_alone(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes((RECORDED / "stage_lost.jsonl").read_bytes())
    (tmp_path / "worker-0.1.log").write_text("x" * 100_000 + "the end")
    (tmp_path / "secret").write_text("secret")
    started = {"t": 1.0, "event": "started", "host": "0", "pid": 1, "worker": "x/../../secret"}
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(started) + "\n")
    (tmp_path / "worker-x").mkdir()
    reader = Reader(tmp_path)
    reader.read_all()
    tail = reader.log_tail("0.1")
    assert tail is not None
    assert tail.endswith("the end")
    assert len(tail) < 20_000
    assert reader.log_tail("0.2") is None  # it has printed nothing
    assert reader.log_tail("../secret") is None
    assert reader.log_tail("x/../../secret") is None
