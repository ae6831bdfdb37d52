"""Which format: the one that loses the least training time among those that no kill could harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.study.advice.sentence import Advice
from holdfast.study.numbers import spread_text
from holdfast.study.rows import Results, Row, blows, main_costs, main_model, measured, middle, name_of, same_format
from holdfast.words import count, seconds_text


@dataclass(frozen=True, kw_only=True)
class Choice:
    """``kill``: the row that says that it survived; None if no format was killed, or none survived."""

    row: Row
    kill: Row | None
    others: Sequence[Row]  # that were weighed, the best first


def kills(results: Results) -> list[Row]:
    return [row for row in measured(results, "crash_safety") if row["what"] == "kill"]


def choose_format(results: Results, framework: str | None = None) -> Choice | None:
    """The best of a framework's formats, or of all. Where none survived, or nobody tried, the one that loses least."""
    costs = [row for row in main_costs(results) if framework in (None, row["framework"])]
    safe = [row for row in kills(results) if row["verdict"] == "safe"]
    survivors = [row for row in costs if same_format(safe, row)]
    if not costs:
        return None
    best, *others = survivors or costs
    return Choice(row=best, kill=same_format(safe, best), others=others)


def on_format(results: Results) -> list[Advice]:
    choice = choose_format(results)
    if choice is None:
        return []
    model, best, rests = main_model(results), choice.row, [choice.row]
    lost = spread_text(best["lost_s"])
    if choice.kill is not None:
        rests.append(choice.kill)
        among = f"the {len(choice.others) + 1} formats that survived all kills" if choice.others else ""
        least = f", the least of {among}" if among else ", and no other format survived all kills"
        text = f"Save {model} as {name_of(best)}: a save costs {lost} of training{least} ({_survived(choice.kill)})."
    elif kills(results):
        rests += kills(results)
        text = f"No format survived all kills; {name_of(best)} loses the least training for {model}, {lost} a save."
    else:
        text = f"Save {model} as {name_of(best)}: a save costs {lost} of training, the least of all; none was killed."
    if choice.others:
        text += f" {_runner_up(best, choice.others[0])}"
        rests.append(choice.others[0])
    return [Advice(axis="cost", sentence=text, rests_on=rests)]


def _runner_up(best: Row, second: Row) -> str:
    lost = f"{name_of(second)} with {seconds_text(middle(second, 'lost_s'))}"
    if second["lost_s"]["low"] <= best["lost_s"]["high"]:
        return f"{lost} cannot be told from it: their ranges overlap."
    return f"Next is {lost}."


def _survived(kill: Row) -> str:
    return f"{blows(kill)} of {blows(kill)}"


def on_frameworks(results: Results) -> list[Advice]:
    """For those who cannot change their framework: one sentence, without the framework of the best format."""
    best = choose_format(results)
    if best is None:
        return []
    said, rests = [], []
    for framework in dict.fromkeys(row["framework"] for row in main_costs(results)):
        choice = choose_format(results, framework)
        if choice is None or framework == best.row["framework"]:
            continue
        text = f"{framework}: {choice.row['format']}, {seconds_text(middle(choice.row, 'lost_s'))} lost a save"
        killed = [row for row in kills(results) if row["framework"] == framework]
        if choice.kill is None:
            text += f" (none of its {count(len(killed), 'format')} survived all kills)" if killed else " (never killed)"
        said.append(text)
        rests += [choice.row, *([choice.kill] if choice.kill else killed)]
    if not said:
        return []
    return [Advice(axis="cost", sentence=f"For those bound to a framework: {'; '.join(said)}.", rests_on=rests)]
