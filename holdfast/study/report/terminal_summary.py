"""The study on a terminal: advice, and a short table for each axis."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.screen import Screen
from holdfast.study.numbers import listed
from holdfast.study.restart_verdict import EVERYTHING, USUAL, needed
from holdfast.study.rows import (
    Results,
    Row,
    crash_text,
    failure,
    main_costs,
    main_model,
    middle,
    name_of,
    rows_of,
    runs_of,
)
from holdfast.words import seconds_text, size_text

FAILED = "failed"


def show(screen: Screen, results: Results) -> None:
    """Print advice and short tables to a screen."""
    for row in rows_of(results, "frameworks"):
        if not row["ok"]:
            screen.say(f"{row['framework']} was left out: {row['why']}")
    _cost(screen, results)
    _formats(screen, results)
    _scale(screen, results)
    _determinism(screen, results)
    _crash_safety(screen, results)
    if results["advice"]:
        screen.say("Advice", style="bold")
    for number, each in enumerate(results["advice"], 1):
        screen.say(f"{number:2}. {each['sentence']}")


def _table(screen: Screen, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    if rows:
        screen.table(columns, rows, title=title)
        screen.say()


def _cost(screen: Screen, results: Results) -> None:
    names = ("lost_s", "stall_s", "durable_s", "load_cold_s")
    rows = []
    for row in main_costs(results):
        times = [seconds_text(middle(row, name)) for name in names]
        rows.append([name_of(row), *times, f"{middle(row, 'of_raw'):.3g}x", size_text(row["bytes"])])
    failed = [row for row in rows_of(results, "cost") if failure(row) and row["model"] == main_model(results)]
    rows += [[name_of(row), FAILED, *[""] * 5] for row in failed]
    columns = ["format~", ">lost", ">stall", ">durable", ">load, cold?", ">raw disk", ">size?"]
    _table(screen, columns, rows, f"What a checkpoint of {main_model(results)} costs, the least lost training first")


def _formats(screen: Screen, results: Results) -> None:
    rows = rows_of(results, "formats")
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        text = FAILED if failure(row) else f"{row['of_raw_bytes']:.0%} {seconds_text(middle(row, 'save_s'))}"
        lines.setdefault(name_of(row), {})[row["model"]] = text
    shown = [[name, *(found.get(model, "") for model in models)] for name, found in lines.items()]
    _table(screen, ["format~", *(f">{model}" for model in models)], shown, "Size, of the raw bytes, and time to save")


def _scale(screen: Screen, results: Results) -> None:
    rows = rows_of(results, "scale")
    ranks = sorted({int(row["ranks"]) for row in rows})
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        lines.setdefault(f"{row['framework']}: {row['strategy']}", {})[row["ranks"]] = row
    shown = []
    for name, found in lines.items():
        good = {number: row for number, row in found.items() if not failure(row)}
        times = dict.fromkeys(found, FAILED) | {n: seconds_text(middle(row, "slowest_s")) for n, row in good.items()}
        twice = size_text(good[ranks[-1]]["duplicated"]) if ranks[-1] in good else ""
        shown.append([name, *(times.get(number, "") for number in ranks), twice])
    columns = ["strategy~", *(f">{number} rank{'s' if number > 1 else ''}" for number in ranks), ">beyond one copy"]
    _table(screen, columns, shown, "Scale: the slowest rank")


def _determinism(screen: Screen, results: Results) -> None:
    rows = rows_of(results, "determinism")
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(runs_of(row), []).append(row)
    shown = []
    for name, found in lines.items():
        parts = needed([dict(row) for row in found], found[0]["framework"], found[0]["variant"])
        shown.append([name, _verdicts(found, EVERYTHING), _verdicts(found, USUAL), listed(parts)])
    columns = ["framework~", "everything restored~", "as documented~", "missed if left out~"]
    _table(screen, columns, shown, "Determinism: the run after a restart")


def _verdicts(rows: Sequence[Row], case: str) -> str:
    """Return the verdicts on a case at all save points; one word if they agree."""
    found = {str(row["save_at"]): str(row["verdict"]) for row in rows if row["case"] == case}
    if len(set(found.values())) <= 1:
        return next(iter(found.values()), "")
    return ", ".join(f"{place}: {verdict}" for place, verdict in found.items())


def _crash_safety(screen: Screen, results: Results) -> None:
    rows = rows_of(results, "crash_safety")
    kinds = list(dict.fromkeys(str(row["what"]) for row in rows))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        text = FAILED if failure(row) else crash_text(row)
        lines.setdefault(name_of(row), {})[row["what"]] = text
    shown = [[name, *(found.get(kind, "") for kind in kinds)] for name, found in lines.items()]
    _table(screen, ["format~", *(f"{kind}~" for kind in kinds)], shown, "Crash safety")
