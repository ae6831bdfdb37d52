"""The axis "determinism": is a restarted run the same as an undisturbed one, and which state does that need?

Every run is a fresh process. A restart inside the process that saved would find its random numbers, its loader and
its compiled functions still there, and look better than it is. A restart that may be called identical has an
interpreter of its own. In a quick study runs that save, or leave a part out, are forks of a process that has imported
the framework and done nothing else: an import takes longer than the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.study.adapters.base import SAVES
from holdfast.study.process import Failed, Start
from holdfast.study.restart_verdict import (
    CONTROL,
    EVERYTHING,
    IDENTICAL,
    SAVING,
    USUAL,
    LessonRun,
    RestartCase,
    RestartVerdict,
    Row,
    judge_control,
    judge_restart,
    judge_saving,
    judge_untested,
    row,
)
from holdfast.study.turns import AT_ONCE
from holdfast.words import count

MID_EPOCH = "mid-epoch"  # the save point at which the absence of any part can be noticed
LIMIT_S = 120.0  # seconds for one run; the slowest import takes 3 s, on a busy machine several times as long

Say = Callable[[str], None]
Restart = tuple[str, frozenset[str]]  # the save point, and the parts that are restored


def plan(hello: Mapping[str, Any], variant: str, *, quick: bool) -> list[RestartCase]:
    """Return the restarts to try. A quick study tries one restart of each variant: with everything, from mid-epoch.

    >>> hello = {"parts": [{"name": "model"}, {"name": "loader"}], "usual": ["model"]}
    >>> for case in plan(hello, "", quick=True): print(case.words)
    step 0, everything
    mid-epoch, everything
    epoch's end, everything
    mid-epoch, usual
    mid-epoch, without model
    mid-epoch, without loader
    >>> [case.words for case in plan(hello, "worker processes", quick=True)]
    ['worker processes, mid-epoch, everything']
    """
    everything = _names(hello)
    whole = RestartCase(name=EVERYTHING, variant=variant, parts=everything)
    if quick and variant:
        return [replace(whole, save_at=MID_EPOCH)]
    fewer = [RestartCase(name=USUAL, variant=variant, parts=frozenset(hello["usual"]))]
    for left_out in (part["name"] for part in hello["parts"]):
        rest = everything - {left_out}
        fewer += [RestartCase(name=f"without {left_out}", variant=variant, parts=rest, left_out=left_out)]
    points = [MID_EPOCH] if quick else list(SAVES)
    return [replace(whole, save_at=at) for at in SAVES] + [replace(case, save_at=at) for case in fewer for at in points]


def restarts(cases: list[RestartCase]) -> list[Restart]:
    """Return the restarts that these cases need; one may answer several, if the usual way saves everything.

    >>> two = [RestartCase(name=name, save_at="step 0", parts=frozenset({"model"})) for name in ("everything", "usual")]
    >>> len(restarts(two))
    1
    """
    return list(dict.fromkeys((case.save_at, case.parts) for case in cases))


def savers(work: list[Restart], *, quick: bool) -> list[list[Restart]]:
    """Group the restarts by the run that saves for them.

    A run saves one set of parts, as a script would that leaves the rest out: to ask one part for its state may change
    another (PyTorch's loader makes its iterator then, which draws a random number). In a quick study one run saves for
    all restarts; the case "saving itself" shows whether that disturbs it.

    >>> work = restarts(plan({"parts": [{"name": "model"}], "usual": ["model"]}, "", quick=False))
    >>> [len(each) for each in savers(work, quick=False)], [len(each) for each in savers(work, quick=True)]
    ([3, 3], [6])
    """
    if quick:
        return [work]
    return [[each for each in work if each[1] == parts] for parts in dict.fromkeys(parts for _, parts in work)]


def measure(
    framework: str,
    start: Start,
    hello: Mapping[str, Any],
    *,
    fork: Start | None = None,
    scratch: Path,
    logs: Path,
    quick: bool,
    say: Say,
    seed: int = 0,
    limit_s: float = LIMIT_S,
    at_once: int = AT_ONCE,
) -> list[Row]:
    """Return all rows of a framework; a failure is a row, too.

    Args:
        framework: its name.
        start: starts a new interpreter of it.
        hello: its answer to that request.
        fork: starts a process more quickly, for runs that save or leave a part out; ``start`` if it is None.
        scratch: folder for checkpoints, which are removed again.
        logs: folder for what processes print.
        quick: try fewer restarts.
        say: called with every result.
        seed: of the run.
        limit_s: seconds after which a run counts as hanging.
        at_once: processes at a time.
    """
    rows: list[Row] = []
    for variant in hello["variants"]:
        with TemporaryDirectory(dir=scratch) as folder, ThreadPoolExecutor(at_once) as pool:
            runs = LessonRuns(
                framework=framework,
                start=start,
                fork=fork or start,
                everything=_names(hello),
                log=logs / f"{framework}-determinism.log",
                folder=Path(folder),
                variant=variant,
                seed=seed,
                limit_s=limit_s,
            )
            cases = plan(hello, variant, quick=quick)
            axis = DeterminismAxis(runs=runs, cases=cases, quick=quick, pool=pool, say=say)
            rows += axis.rows()
    return rows


@dataclass(frozen=True, kw_only=True)
class LessonRuns:
    """Runs of a framework's lesson, each in a fresh process."""

    framework: str
    start: Start
    fork: Start  # for those that save, and where a part is left out
    everything: frozenset[str]
    log: Path
    folder: Path
    variant: str
    seed: int
    limit_s: float

    def undisturbed(self) -> LessonRun | Failed:
        """Train from the start to the end; variants may use a fork, because their control claims nothing."""
        return self._train(self.fork if self.variant else self.start)

    def saving(self, restarts: Iterable[Restart]) -> LessonRun | Failed:
        """Train, and on the way save for each restart its parts and no others."""
        return self._train(self.fork, saves=sorted(self._save(restart) for restart in restarts))

    def restarted(self, restart: Restart) -> LessonRun | Failed:
        """Train from a save to the end; in an interpreter of its own if everything is restored."""
        step, folder, parts = self._save(restart)
        return self._train(self.start if restart[1] == self.everything else self.fork, restore=(folder, step, parts))

    def _save(self, restart: Restart) -> tuple[int, str, list[str]]:
        step, parts = SAVES[restart[0]], sorted(restart[1])
        return step, str(self.folder / f"step-{step}" / ("+".join(parts) or "whole")), parts

    def _train(self, start: Start, **given: Any) -> LessonRun | Failed:
        try:
            with start(self.log) as process:
                answer = process.ask("train", within=self.limit_s, seed=self.seed, variant=self.variant, **given)
        except Failed as e:
            return e
        return LessonRun(**answer)


@dataclass(frozen=True, kw_only=True)
class DeterminismAxis:
    """All cases of one framework and one variant: the control, the runs that save, then the restarts."""

    runs: LessonRuns
    cases: list[RestartCase]
    quick: bool
    pool: ThreadPoolExecutor
    say: Say

    def rows(self) -> list[Row]:
        """Run all cases and return a row for each."""
        variant = self.runs.variant
        control_case, saving_case = (
            RestartCase(name=CONTROL, variant=variant),
            RestartCase(name=SAVING, variant=variant),
        )
        control, again = self.pool.map(lambda _: self.runs.undisturbed(), range(2))
        verdict = judge_control(control, again)
        rows = [self._row(control_case, verdict)]
        if isinstance(control, Failed) or verdict.verdict != IDENTICAL:
            return rows + [self._row(case, judge_untested(verdict)) for case in (saving_case, *self.cases)]
        groups = savers(restarts(self.cases), quick=self.quick)
        outcomes = list(self.pool.map(self.runs.saving, groups))
        rows.append(self._row(saving_case, judge_saving(control, outcomes[0])))
        saved = {restart: outcome for group, outcome in zip(groups, outcomes, strict=True) for restart in group}
        return rows + self._restart_rows(control, saved)

    def _restart_rows(self, control: LessonRun, saved: dict[Restart, LessonRun | Failed]) -> list[Row]:
        """``saved``: how the run ended that saved for each restart."""
        possible = sum(isinstance(saving, LessonRun) for saving in saved.values())
        self.say(f"{self.runs.framework}: {count(possible, 'restart')}, each in a fresh process")
        runs = {restart: self.pool.submit(self._restarted, restart, saving) for restart, saving in saved.items()}
        rows = []
        try:
            for case in self.cases:
                run, whole = runs[case.save_at, case.parts].result(), runs[case.save_at, self.runs.everything].result()
                rows.append(self._row(case, judge_restart(case, control, run, whole)))
        finally:
            for future in runs.values():
                future.cancel()  # after Ctrl-C, those that have not begun
        return rows

    def _restarted(self, restart: Restart, saving: LessonRun | Failed) -> LessonRun | Failed:
        if isinstance(saving, Failed):
            return Failed(f"nothing to restart from: {saving}")
        return self.runs.restarted(restart)

    def _row(self, case: RestartCase, verdict: RestartVerdict) -> Row:
        self.say(f"{self.runs.framework}, {case.words}: {verdict.says}")
        return row(self.runs.framework, case, verdict)


def _names(hello: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(part["name"] for part in hello["parts"])
