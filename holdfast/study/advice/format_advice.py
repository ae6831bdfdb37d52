"""Advice on the format: the one that loses the least training time among those that no kill harmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.study.advice.sentence import Advice
from holdfast.study.models import MODELS, elements
from holdfast.study.numbers import listed, spread_text
from holdfast.study.rows import (
    Results,
    Row,
    blows,
    main_costs,
    main_model,
    measured,
    middle,
    name_of,
    overlap,
    rows_of,
    same_format,
)
from holdfast.words import count, seconds_text

NEW_NAME = "under a new name, sync, then remove the old one"  # a folder cannot be renamed over another one
NAMED = 3  # most formats in a list that need not be complete

Clause = tuple[str, list[Row]]  # a sentence, or nothing, and the rows that it rests on


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen format. ``kill``: the row that shows that it survived; None if no format was killed, or none did."""

    row: Row
    kill: Row | None
    others: Sequence[Row]  # the other formats that were weighed, the best first


def kills(results: Results) -> list[Row]:
    """Return the rows about kills."""
    return [row for row in measured(results, "crash_safety") if row["what"] == "kill"]


def choose_format(results: Results, framework: str | None = None) -> Choice | None:
    """Return the best format of a framework, or of all; if no kill was survived, the one that loses least time."""
    costs = [row for row in main_costs(results) if framework in (None, row["framework"])]
    safe = [row for row in kills(results) if row["verdict"] == "safe"]
    survivors = [row for row in costs if same_format(safe, row)]
    if not costs:
        return None
    best, *others = survivors or costs
    return Choice(row=best, kill=same_format(safe, best), others=others)


def on_format(results: Results) -> list[Advice]:
    """Return advice on the best format of all."""
    choice = choose_format(results)
    if choice is None:
        return []
    found = [_best(results, choice), _rivals(results, choice), flips(results, [choice.row])]
    found.append(_untested(results, main_costs(results)))
    text = " ".join(said for said, _ in found if said)
    return [Advice(axis="cost", sentence=text, rests_on=[row for _, rests in found for row in rests])]


def _best(results: Results, choice: Choice) -> Clause:
    model, best = main_model(results), name_of(choice.row)
    lost = f"{spread_text(choice.row['lost_s'])} of training"
    if choice.kill is not None:
        where = _elsewhere(results, choice.kill)
        text = f"Save {model} as {best}: a save costs {lost}, and no kill of {blows(choice.kill)} harmed it ({where})."
        return text, [choice.row, choice.kill]
    if harmed := kills(results):
        text = (
            f"No format that was killed survived all kills: save {NEW_NAME}. For {model}, {best} costs {lost} a save."
        )
        return text, [choice.row, *harmed]
    return f"Save {model} as {best}: a save costs {lost}. No format was tested for kills.", [choice.row]


def _elsewhere(results: Results, kill: Row) -> str:
    """Return in words what was killed: the model is named if it is not the one that the advice is for."""
    model, other = main_model(results), kill.get("model")
    if other is None or other == model:
        return "SIGKILL while saving"
    ours = next((row["bytes"] for row in rows_of(results, "limits") if row["model"] == model), None)
    smaller = ours is not None and other in MODELS and 8 * elements(MODELS[other]()) < ours
    return f"SIGKILL while saving {other}, {'a smaller' if smaller else 'another'} model"


def _rivals(results: Results, choice: Choice) -> Clause:
    """Return which formats cannot be told from the best by their cost; if none, which is the next."""
    if not choice.others:
        alone = choice.kill is not None and len(kills(results)) > 1
        return ("No other format that was killed survived all kills." if alone else ""), []
    alike = [row for row in choice.others if overlap(choice.row, row, "lost_s")]
    rounds = results.get("settings", {}).get("rounds")
    within = f"in {count(rounds, 'round')}" if rounds else "here"
    if alike:
        names = listed([name_of(row) for row in [choice.row, *alike]])
        text = f"By their cost {names} cannot be told apart {within}, for their ranges overlap; "
        return f"{text}{name_of(choice.row)} has the lowest median.", alike
    weighed = f"{len(choice.others) + 1} formats{' that no kill harmed' if choice.kill else ''}"
    second = choice.others[0]
    text = f"That is the least of the {weighed}, {within}; next is {name_of(second)} with "
    return f"{text}{seconds_text(middle(second, 'lost_s'))}.", [second]


def flips(results: Results, rows: Sequence[Row]) -> Clause:
    """Return which of these formats load flipped bits."""
    found = [same_format(measured(results, "crash_safety"), row, what="bit flip") for row in rows]
    silent = [row for row in found if row is not None and row["silent"]]
    if not silent:
        return "", []
    names, loaded = listed([name_of(row) for row in silent]), sum(int(row["silent"]) for row in silent)
    tries = count(sum(int(row["tries"]) for row in silent), "flipped bit")
    return f"Without a word {names} loaded {loaded} of {tries}: keep a checksum.", silent


def _untested(results: Results, rows: Sequence[Row]) -> Clause:
    """Return which of these formats were not tested for kills."""
    untested = [row for row in rows if not same_format(kills(results), row)]
    if not untested or not kills(results):
        return "", []
    tried = [same_format(rows_of(results, "crash_safety"), row, what="kill") for row in untested]
    names = listed([name_of(row) for row in untested], NAMED)
    return f"Not tested for kills: {names}.", [*untested, *(row for row in tried if row is not None)]


def on_frameworks(results: Results) -> list[Advice]:
    """Return advice on the best format of every other framework, for users who cannot change theirs."""
    best = choose_format(results)
    frameworks = dict.fromkeys(row["framework"] for row in main_costs(results))
    choices = [choose_format(results, name) for name in frameworks if best and name != best.row["framework"]]
    there = [choice for choice in choices if choice is not None]
    if not there:
        return []
    rows = [choice.row for choice in there]
    names = [f"{name_of(row)} {seconds_text(middle(row, 'lost_s'))}" for row in rows]
    first = f"If you are bound to a framework, take one of these, with the training lost a save: {listed(names)}."
    survived = [choice.kill for choice in there if choice.kill is not None]
    found = [(first, [*rows, *survived]), _harmed(results, rows), flips(results, rows), _untested(results, rows)]
    text = " ".join(said for said, _ in found if said)
    return [Advice(axis="cost", sentence=text, rests_on=[row for _, rests in found for row in rests])]


def _harmed(results: Results, rows: Sequence[Row]) -> Clause:
    """Return how to save formats that a kill harmed, for frameworks without a format that survived."""
    unsafe = [row for row in kills(results) if row["verdict"] == "unsafe"]
    harmed = [row for row in rows if same_format(unsafe, row)]
    if not harmed:
        return "", []
    whose = [row["framework"] for row in harmed]
    text = (
        f"For {listed(whose)} no format was found that survives all kills: "
        f"save {listed([name_of(row) for row in harmed])} {NEW_NAME}."
    )
    return text, [row for row in unsafe if row["framework"] in whose]
