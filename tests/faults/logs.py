"""Runs of ``pipeline.py`` that keep a log, and what they are judged by when layers are lost that nobody else holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tests.faults.judge import assert_nothing_twice, assert_same, kill, places, train
from tests.harness import Result

STEPS = 8
STRUCK = 6  # the step of most kills: after an epoch's end, whose batch is ragged
SPLIT = "3,2,2,3"


def logged(
    folder: Path, *, lost: Iterable[str] = (), step: int = STRUCK, phase: str = "backward", **given: Any
) -> Result:
    """One copy of each layer on four workers, a checkpoint at the begin, and these workers killed."""
    settings = {"workers": 4, "stages": SPLIT, "tolerate": 0, "steps": STEPS, "LOG": "1", "EVERY": "100"}
    settings |= {"CHECKPOINT": str(folder / "saved"), **given}
    strikes = [kill(lost, step=step, phase=phase), str(settings.get("faults", ""))]
    settings["faults"] = "; ".join(filter(None, strikes))
    settings["LOG_MEDDLE"] = f"ready *; {settings.get('LOG_MEDDLE', '')}"
    return train(folder, **settings)  # type: ignore[arg-type]


def assert_replayed(result: Result, whole: Result, lost: Collection[str]) -> None:
    """As if nothing had happened: survivors went on as they were, and of the layers only lost ones came again."""
    assert_same(result, whole)
    assert_survivors_went_on(result, lost)
    assert result.of("replay"), "nothing was computed again"
    gone = {layer for worker in lost for layer in places(result, 1).get(worker, ())}
    for event in result.of("replay"):
        if event["generation"] == 2:
            # Those who are struck at once may be missed one after the other.
            assert layers_of(event) == gone or (len(lost) > 1 and layers_of(event) <= gone), event
    for event in result.of("recomputed"):
        assert {int(layer) for layer in event["counts"]} <= layers_of(replay_of(result, event["generation"]))


def assert_survivors_went_on(result: Result, lost: Collection[str], *, first: int = 4) -> None:
    """No worker but the lost ones ended before the others, nobody went back to a checkpoint, no step came twice."""
    assert not result.of("resumed"), "the run went back to its checkpoint"
    assert not result.of("log-useless"), result.of("log-useless")
    assert failures(result) <= set(lost)
    survivors = {f"0.{number}" for number in range(first)} - set(lost)
    assert survivors <= {line["worker"] for line in result.results}, "survivors never restart"
    assert_nothing_twice(result)


def failures(result: Result) -> set[str]:
    """Members that were lost; one that ends as it should may be missed before it has said so."""
    return {e["worker"] for e in result.of("failure") if e["member"] and e["cause"] != "exited with code 0"}


def replay_of(result: Result, generation: int) -> dict[str, Any]:
    return next(event for event in result.of("replay") if event["generation"] == generation)


def layers_of(event: dict[str, Any]) -> set[int]:
    return {layer for first, stop in event["layers"] for layer in range(first, stop)}


def assert_as_if_nothing_had_happened(result: Result, whole: Result) -> None:
    """Whether the log has helped or not."""
    assert result.code == 0, result.said
    assert result.sha256 == whole.sha256
    assert result.losses == whole.losses
    assert result.results[0]["weights"] == whole.results[0]["weights"]
    for line in result.results:
        assert line["values"].items() <= whole.results[0]["values"].items()


def assert_fell_back(folder: Path, result: Result, whole: Result, *words: str) -> None:
    """The log was of no use, as the event and the worker say in these words, and the run is right all the same."""
    assert_as_if_nothing_had_happened(result, whole)
    assert result.of("log-useless")
    assert result.of("resumed"), "the run goes on from a checkpoint"
    reasons = " ".join(event["reason"] for event in result.of("log-useless"))
    said = said_in(folder)
    for word in words:
        assert word in reasons
        assert word in said


def said_in(folder: Path) -> str:
    """What the workers have written, which is what a user sees."""
    return "".join(path.read_text() for path in sorted((folder / "logs").rglob("*")) if path.suffix != ".jsonl")


def log_sizes(result: Result) -> dict[str, list[dict[str, Any]]]:
    """What each worker's log held, step by step (``LOG_MEDDLE="watch *"``)."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in result.of("log"):
        found.setdefault(event["worker"], []).append(event)
    return found
