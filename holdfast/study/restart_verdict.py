"""Judgements on restarts, as pure functions: is a run the same as an undisturbed one, bit for bit?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.study.process import Failed
from holdfast.study.rows import error_text

Row = dict[str, Any]

CONTROL, SAVING, EVERYTHING, USUAL = "control", "saving itself", "everything", "usual"
IDENTICAL, DIFFERS, NOT_TESTABLE, FAILED = "identical", "differs", "not testable", "failed"
LOSSES = "losses"
_ORDINALS = ("first", "second", "third")


@dataclass(frozen=True, kw_only=True)
class RestartCase:
    """One question to a framework, and one row of the results."""

    name: str
    variant: str = ""
    save_at: str = ""  # the save point; the control and the saving itself have none
    parts: frozenset[str] = frozenset()  # the parts that are restored
    left_out: str | None = None

    @property
    def words(self) -> str:
        """Variant, save point and name, for people."""
        return ", ".join(filter(None, (self.variant, self.save_at, self.name)))


@dataclass(frozen=True, kw_only=True)
class LessonRun:
    """Result of a lesson: the bits of its losses from step ``first`` on, and a hash of each final state."""

    first: int
    losses: Sequence[str]
    digests: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """Difference between two runs.

    Args:
        first_step: the first step with another loss, counted from the restart; None if all losses are the same.
        where: names of the states that differ, the losses first.
    """

    first_step: int | None
    where: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RestartVerdict:
    """The verdict on a case: one word, a sentence, and the difference if there is one."""

    verdict: str
    says: str
    difference: RunDifference | None = None


def difference(reference: LessonRun, run: LessonRun) -> RunDifference | None:
    """Return what differs, bit for bit, from the first step of ``run`` on; None if nothing does.

    >>> control = LessonRun(first=0, losses=["a", "b", "c"], digests={"weights": "1", "average": "2"})
    >>> difference(control, LessonRun(first=1, losses=["b", "c"], digests={"weights": "1", "average": "2"}))
    >>> difference(control, LessonRun(first=1, losses=["b", "x"], digests={"weights": "3", "average": "2"}))
    RunDifference(first_step=1, where=('losses', 'weights'))
    """
    expected = reference.losses[run.first :]
    first = next(
        (step for step, pair in enumerate(zip(expected, run.losses, strict=False)) if pair[0] != pair[1]), None
    )
    if first is None and len(expected) != len(run.losses):
        first = min(len(expected), len(run.losses))
    names = dict.fromkeys((*reference.digests, *run.digests))
    where = [name for name in names if reference.digests.get(name) != run.digests.get(name)]
    if first is not None:
        where.insert(0, LOSSES)
    return RunDifference(first_step=first, where=tuple(where)) if where else None


def judge_control(first: LessonRun | Failed, second: LessonRun | Failed) -> RestartVerdict:
    """Judge two undisturbed runs: if they differ, no restart can be judged.

    >>> run = LessonRun(first=0, losses=["a"], digests={})
    >>> judge_control(run, LessonRun(first=0, losses=["b"], digests={})).says
    'two undisturbed runs differ already, from the first step on: no restart can be judged'
    """
    for run in (first, second):
        if isinstance(run, Failed):
            return judge_failed(run)
    assert isinstance(first, LessonRun)
    assert isinstance(second, LessonRun)
    found = difference(first, second)
    if found is None:
        return RestartVerdict(verdict=IDENTICAL, says="two undisturbed runs are the same, bit for bit")
    says = f"two undisturbed runs differ already, {_since(found, 'on')}: no restart can be judged"
    return RestartVerdict(verdict=NOT_TESTABLE, says=says, difference=found)


def judge_saving(control: LessonRun, saving: LessonRun | Failed) -> RestartVerdict:
    """Judge a run that saves, against one that does not."""
    if isinstance(saving, Failed):
        return judge_failed(saving)
    found = difference(control, saving)
    if found is None:
        return RestartVerdict(verdict=IDENTICAL, says="a run that saves is the same as one that does not")
    says = f"saving changes the run that saves, {_since(found, 'after the first save')}"
    return RestartVerdict(verdict=DIFFERS, says=says, difference=found)


def judge_restart(
    case: RestartCase, control: LessonRun, run: LessonRun | Failed, whole: LessonRun | Failed
) -> RestartVerdict:
    """Judge a restart against the undisturbed run.

    ``whole`` is the restart with everything, from the same save point. If it differs as well, the part that was left
    out is not to blame alone, and the sentence says so.
    """
    if isinstance(run, Failed):
        return judge_failed(run)
    found = difference(control, run)
    if found is None:
        says = "identical: leaving it out is not noticed here" if case.left_out else "identical, bit for bit"
        return RestartVerdict(verdict=IDENTICAL, says=says)
    says = _since(found, "after the restart")
    if found.first_step is not None:
        says = f"differs {says}"
    if case.name != EVERYTHING and isinstance(whole, LessonRun) and difference(control, whole):
        says += "; with everything restored it differs, too"
    return RestartVerdict(verdict=DIFFERS, says=says, difference=found)


def judge_failed(why: Failed) -> RestartVerdict:
    """Return the verdict on a run that failed, with the first line of its error: some errors are pages long.

    >>> judge_failed(Failed("KeyError: no loader\\nknown are\\n  model")).says
    'KeyError: no loader'
    """
    return RestartVerdict(verdict=FAILED, says=error_text(str(why).partition("\n")[0], 200))


def judge_untested(control: RestartVerdict) -> RestartVerdict:
    """Return the verdict on every other case if the control was not identical: nothing can be said."""
    why = "two undisturbed runs differ already" if control.verdict == NOT_TESTABLE else "the undisturbed run fails"
    return RestartVerdict(verdict=NOT_TESTABLE, says=f"not run: {why}")


def row(framework: str, case: RestartCase, verdict: RestartVerdict) -> Row:
    """Return a case as a row of the results.

    >>> case = RestartCase(name="without loader", save_at="mid-epoch", left_out="loader")
    >>> row("jax", case, RestartVerdict(verdict="failed", says="OSError: gone"))["id"]
    'determinism/jax/mid-epoch/without loader'
    """
    found = verdict.difference
    return {
        "id": "/".join(filter(None, ("determinism", framework, case.variant, case.save_at, case.name))),
        "framework": framework,
        "variant": case.variant,
        "save_at": case.save_at or None,
        "case": case.name,
        "left_out": case.left_out,
        "verdict": verdict.verdict,
        "first_step": found.first_step if found else None,
        "where": list(found.where) if found else [],
        "says": verdict.says,
        **({"error": verdict.says} if verdict.verdict == FAILED else {}),
    }


def needed(rows: Iterable[Row], framework: str, variant: str = "") -> list[str]:
    """Return the parts without which a restart differs, in the order of the rows.

    A save point counts only if a restart with everything is identical from there: else a difference shows nothing.
    """
    ours = [row for row in rows if row["framework"] == framework and row["variant"] == variant]
    sound = {row["save_at"] for row in ours if row["case"] == EVERYTHING and row["verdict"] == IDENTICAL}
    noticed = [row for row in ours if row["left_out"] and row["verdict"] == DIFFERS and row["save_at"] in sound]
    return list(dict.fromkeys(row["left_out"] for row in noticed))


def _since(found: RunDifference, when: str) -> str:
    """Return in words when two runs begin to differ.

    >>> _since(RunDifference(first_step=1, where=("losses",)), "after the restart")
    'from the second step after the restart'
    >>> _since(RunDifference(first_step=None, where=("weights", "average")), "after the restart")
    'same losses, other weights and average'
    """
    if found.first_step is None:
        return f"same losses, other {' and '.join(found.where)}"
    return f"from the {ordinal(found.first_step)} step {when}"


def ordinal(step: int) -> str:
    """Return the name of a step; step 0 is the first.

    >>> ordinal(0), ordinal(6)
    ('first', '7th')
    """
    return _ORDINALS[step] if step < len(_ORDINALS) else f"{step + 1}th"
