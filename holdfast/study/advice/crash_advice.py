"""Advice on crash safety: kills, flipped bits and cut files."""

from __future__ import annotations

from holdfast.study.advice.format_advice import NAMED, NEW_NAME, kills
from holdfast.study.advice.sentence import Advice
from holdfast.study.numbers import listed
from holdfast.study.rows import Results, Row, bad_of, blows, main_costs, measured, middle, name_of, overlap, same_format
from holdfast.words import seconds_text

RENAMED = ", renamed"  # suffix of a format's name if it is written beside the old file and renamed


def on_kills(results: Results) -> list[Advice]:
    """Return advice on formats of which a kill left nothing whole."""
    unsafe = [row for row in kills(results) if row["verdict"] == "unsafe"]
    if not unsafe:
        return []
    unsafe.sort(key=bad_of, reverse=True)
    first, *others = (f"{name_of(row)} {bad_of(row)} of {blows(row)}" for row in unsafe)
    names = listed([f"{first} kills", *others], NAMED)
    remedy, rests = _remedy(results, unsafe)
    text = (
        f"Killed while overwriting, some formats left neither the old nor the new one whole: {names}. "
        f"Save {NEW_NAME} (a single file can be renamed over it).{remedy}"
    )
    if any(row["format"].startswith("orbax") for row in unsafe):
        text += " Orbax was tried with force=True, that is, overwriting."
    fastest = next(iter(main_costs(results)), None)
    if fastest is not None and same_format(unsafe, fastest):
        lost = seconds_text(middle(fastest, "lost_s"))
        text += f" That holds for the one that loses the least time, too: {name_of(fastest)}, {lost}."
        rests.append(fastest)
    return [Advice(axis="crash_safety", sentence=text, rests_on=[*unsafe, *rests])]


def _remedy(results: Results, unsafe: list[Row]) -> tuple[str, list[Row]]:
    """Return what renaming was worth here, and the rows that show it."""
    costs = main_costs(results)
    for row in unsafe:
        twin = {**row, "format": f"{row['format']}{RENAMED}"}
        kill = same_format(kills(results), twin)
        if kill is None or kill["verdict"] != "safe":
            continue
        before, after = same_format(costs, row), same_format(costs, twin)
        text = f" So renamed, no kill of {blows(kill)} harmed {row['format']}"
        if before is None or after is None:
            return f"{text}.", [kill]
        lost = [seconds_text(middle(each, "lost_s")) for each in (after, before)]
        alike = ", no difference that could be told" if overlap(before, after, "lost_s") else ""
        return f"{text}; a save cost {lost[0]} against {lost[1]}{alike}.", [kill, before, after]
    return "", []


def on_damage(results: Results) -> list[Advice]:
    """Return advice on damage that loads without an error."""
    rows = [row for row in measured(results, "crash_safety") if row["what"] != "kill"]
    silent = sorted((row for row in rows if row["silent"]), key=lambda row: -int(row["silent"]))
    if not silent:
        return []
    names = [f"{name_of(row)} {row['silent']} of {row['tries']} {row['what']}s" for row in silent]
    text = "Keep a checksum of each file and compare it before loading: damage was loaded without a word by "
    noticed = [row for row in rows if row["what"] == "bit flip" and not row["silent"]]
    good = f". Every bit flip was noticed or harmless with {listed([name_of(row) for row in noticed], NAMED)}"
    text += f"{listed(names, NAMED)}{good if noticed else ''}."
    return [Advice(axis="crash_safety", sentence=text, rests_on=[*silent, *noticed])]
