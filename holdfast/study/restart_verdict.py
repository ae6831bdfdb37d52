"""Whether a run after a restart is the one that would have been, as pure functions: nothing is started here."""

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
    """One question to a framework, and so one row."""

    name: str
    variant: str = ""
    save_at: str = ""  # the control and the saving itself belong to no save point
    parts: frozenset[str] = frozenset()  # that are restored
    left_out: str | None = None

    @property
    def words(self) -> str:
        return ", ".join(filter(None, (self.variant, self.save_at, self.name)))


@dataclass(frozen=True, kw_only=True)
class LessonRun:
    """What a lesson left behind: the bits of its losses from step ``first`` on, and a hash of each thing at its end."""

    first: int
    losses: Sequence[str]
    digests: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """``first_step``: of the losses, counted from the restart; None where the losses are the same."""

    first_step: int | None
    where: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RestartVerdict:
    verdict: str
    says: str
    difference: RunDifference | None = None


def difference(reference: LessonRun, run: LessonRun) -> RunDifference | None:
    """What is not the same, bit for bit, from the first step of ``run`` on.

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
    """Two undisturbed runs: only where they are equal can any restart be judged.

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
    """A run that was saved on its way, against one that was not."""
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
    """A restart against the undisturbed run. ``whole`` is the restart with everything from the same save: where that
    one differs already, a part that was left out is not to blame alone, and the sentence says so."""
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
    """Some frameworks' errors are pages long: the log has them whole.

    >>> judge_failed(Failed("KeyError: no loader\\nknown are\\n  model")).says
    'KeyError: no loader'
    """
    return RestartVerdict(verdict=FAILED, says=error_text(str(why).partition("\n")[0], 200))


def judge_untested(control: RestartVerdict) -> RestartVerdict:
    """What is said of all other cases when the control was not identical: never that they are."""
    why = "two undisturbed runs differ already" if control.verdict == NOT_TESTABLE else "the undisturbed run fails"
    return RestartVerdict(verdict=NOT_TESTABLE, says=f"not run: {why}")


def row(framework: str, case: RestartCase, verdict: RestartVerdict) -> Row:
    """A row of the results.

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
    """The parts without which a restart differs, in the order of the rows.

    Only save points count from which a restart with everything is identical: elsewhere, a difference shows nothing.
    """
    ours = [row for row in rows if row["framework"] == framework and row["variant"] == variant]
    sound = {row["save_at"] for row in ours if row["case"] == EVERYTHING and row["verdict"] == IDENTICAL}
    noticed = [row for row in ours if row["left_out"] and row["verdict"] == DIFFERS and row["save_at"] in sound]
    return list(dict.fromkeys(row["left_out"] for row in noticed))


def _since(found: RunDifference, when: str) -> str:
    """
    >>> _since(RunDifference(first_step=1, where=("losses",)), "after the restart")
    'from the second step after the restart'
    >>> _since(RunDifference(first_step=None, where=("weights", "average")), "after the restart")
    'same losses, other weights and average'
    """
    if found.first_step is None:
        return f"same losses, other {' and '.join(found.where)}"
    return f"from the {ordinal(found.first_step)} step {when}"


def ordinal(step: int) -> str:
    """Steps are counted from 0, and named from the first.

    >>> ordinal(0), ordinal(6)
    ('first', '7th')
    """
    return _ORDINALS[step] if step < len(_ORDINALS) else f"{step + 1}th"
