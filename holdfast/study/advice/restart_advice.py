"""Advice on the parts to save for a restart that is identical to an undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.study.advice.sentence import Advice
from holdfast.study.numbers import listed
from holdfast.study.restart_verdict import (
    CONTROL,
    DIFFERS,
    EVERYTHING,
    FAILED,
    IDENTICAL,
    NOT_TESTABLE,
    SAVING,
    USUAL,
    needed,
    ordinal,
)
from holdfast.study.rows import Results, Row, error_text, rows_of

HELD = "holdfast"  # whose Run saves everything by itself
LONGEST = 150  # most letters of an error in a sentence


def on_restart(results: Results) -> list[Advice]:
    """Return a sentence or two for each framework; if it is not testable, only that is said."""
    rows = rows_of(results, "determinism")
    found = []
    for framework in dict.fromkeys(row["framework"] for row in rows):
        ours = [row for row in rows if row["framework"] == framework]
        clauses, rests = _plain(framework, [row for row in ours if not row["variant"]])
        for variant in dict.fromkeys(row["variant"] for row in ours if row["variant"]):
            more, under = _whole([row for row in ours if row["variant"] == variant], variant)
            clauses, rests = clauses + more, rests + under
        if clauses:
            text = f"{framework}: {'. '.join([clauses[0], *map(_begun, clauses[1:])])}."
            found.append(Advice(axis="determinism", sentence=text, rests_on=rests))
    return found


def _plain(framework: str, rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    whole = _whole(rows, "")
    if not any(row["verdict"] == IDENTICAL for row in whole[1]):
        return whole
    found = (_parts(framework, rows), whole, _usual(framework, rows), _saving(rows))
    return [clause for clauses, _ in found for clause in clauses], [row for _, rests in found for row in rests]


def _whole(rows: Sequence[Row], variant: str) -> tuple[list[str], list[Row]]:
    """Return whether a restart with everything is identical, by save point."""
    control = [row for row in rows if row["case"] == CONTROL]
    whole = [row for row in rows if row["case"] == EVERYTHING]
    untestable = [row for row in [*control, *whole] if row["verdict"] == NOT_TESTABLE]
    if untestable:
        return [f"{f'with {variant}, ' if variant else ''}not testable: {untestable[0]['says']}"], untestable
    same = [row for row in whole if row["verdict"] == IDENTICAL]
    other = [row for row in whole if row["verdict"] == DIFFERS]
    failed = [row for row in whole if row["verdict"] == FAILED]
    said = []
    if same:
        said.append(f"is identical when saved at {_places(same)}")
    if other:
        said.append(f"differs when saved at {_places(other)}")
    if failed:
        said.append(f"failed when saved at {_places(failed)} ({error_text(str(failed[0]['says']), LONGEST)})")
    if not said:
        return [], []
    text = f"with {f'{variant} and ' if variant else ''}everything restored the run {', but '.join(said)}"
    return [text], [*control, *same, *other, *failed]


def _parts(framework: str, rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Return the parts whose absence was noticed, and those that were not missed."""
    names = needed([dict(row) for row in rows], framework)
    left = [row for row in rows if row["left_out"]]
    noticed = [row for row in left if row["left_out"] in names and row["verdict"] == DIFFERS]
    if not noticed:
        return [], []
    by_when: dict[str, list[str]] = {}
    for name in names:
        by_when.setdefault(_missed([row for row in noticed if row["left_out"] == name]), []).append(name)
    shown = [f"{listed(parts)} ({when})" for when, parts in by_when.items()]
    clauses = [f"for the same run, bit for bit, save what is missed otherwise: {'; '.join(shown)}"]
    rests = noticed
    for verdict, words in ((IDENTICAL, "not missed here"), (NOT_TESTABLE, "not testable"), (FAILED, "failed without")):
        others = [row for row in left if row["verdict"] == verdict and row["left_out"] not in names]
        if others:
            clauses.append(f"{words}: {listed([*dict.fromkeys(str(row['left_out']) for row in others)])}")
            rests = rests + others
    return clauses, rests


def _missed(rows: Sequence[Row]) -> str:
    """Return when the absence of a part showed first.

    >>> _missed([{"first_step": 2}, {"first_step": 0}]), _missed([{"first_step": 3}])
    ('from the first step after the restart', 'from the 4th step after the restart')
    >>> _missed([{"first_step": None, "where": ["average"]}])
    'same losses, other average'
    """
    steps = [int(row["first_step"]) for row in rows if row["first_step"] is not None]
    if not steps:
        return f"same losses, other {listed(rows[0]['where'])}"
    return f"from the {ordinal(min(steps))} step after the restart"


def _usual(framework: str, rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Return whether the usual way is enough. A framework without parts shows nothing about parts."""
    usual = [row for row in rows if row["case"] == USUAL]
    other = [row for row in usual if row["verdict"] == DIFFERS]
    same = [row for row in usual if row["verdict"] == IDENTICAL]
    if not other and not any(row["left_out"] for row in rows):
        own = "a Run saves and restores everything by itself, so there is nothing to leave out"
        return ([own], same) if same and framework == HELD else ([], [])
    if other:
        return [f"what its documentation saves is not enough: saved at {_places(other)} the run differs"], other
    return ([f"what its documentation saves is enough at {_places(same)}"], same) if same else ([], [])


def _saving(rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    other = [row for row in rows if row["case"] == SAVING and row["verdict"] == DIFFERS]
    return (["saving itself changes the run"], other) if other else ([], [])


def _begun(clause: str) -> str:
    return clause[0].upper() + clause[1:]


def _places(rows: Sequence[Row]) -> str:
    """Return the save points of rows, as a text.

    >>> _places([{"save_at": "step 0"}, {"save_at": "mid-epoch"}])
    'step 0 and mid-epoch'
    """
    return listed([str(row["save_at"]) for row in rows])
