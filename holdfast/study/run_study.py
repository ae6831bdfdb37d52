"""The whole study: install the frameworks, measure every axis, derive advice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from holdfast.errors import HoldfastError, UsageError
from holdfast.study import crash_axis, determinism_axis, machine, scale_axis
from holdfast.study.adapters import NAMES
from holdfast.study.adapters.base import SaveFormat
from holdfast.study.advice import advise
from holdfast.study.cost_rows import cost_rows, format_rows, limit_rows
from holdfast.study.framework_processes import FrameworkProcesses
from holdfast.study.framework_zygote import FrameworkZygote
from holdfast.study.install import Installed, ensure
from holdfast.study.models import StudyModel, model_of
from holdfast.study.process import Failed, Process, Start
from holdfast.study.turns import AT_ONCE, take

Say = Callable[[str], None]
Row = dict[str, Any]
Hello = dict[str, Any] | Failed


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """The amount of measuring.

    Args:
        costly: names of the models whose saves are also measured beside training steps.
        others: names of the models whose saves and loads are measured alone.
        scaled: name of the model that 1, 2 and 4 ranks save.
        killed: name of the model whose saves are killed.
        rounds: counted rounds of each costly model.
        other_rounds: counted rounds of the other models and of the ranks.
        kills: kills of each format that are spread over a save.
    """

    costly: tuple[str, ...]
    others: tuple[str, ...]
    scaled: str
    killed: str
    rounds: int
    other_rounds: int
    kills: int


QUICK = StudyPlan(
    costly=("small-gpt",), others=("lenet",), scaled="small-gpt", killed="small-gpt", rounds=2, other_rounds=1, kills=2
)
FULL = StudyPlan(
    costly=("gpt", "resnet50"),
    others=("lenet", "vgg16"),
    scaled="resnet50",
    killed="gpt",
    rounds=5,
    other_rounds=2,
    kills=8,
)


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """The settings that a user gives.

    Args:
        frameworks: names of adapters.
        quick: fewer rounds, models and kills, for about five minutes.
        model: the model that the advice is for: a name, or the path of a checkpoint; None takes the plan's.
        mtbf: mean seconds between two failures, for the advice on the interval.
        seed: decides the order of turns and the moments of kills.
        out: folder of the report; checkpoints are written there too.

    Raises:
        UsageError: an unknown framework, no framework, or a time between failures that is not positive.

    >>> StudySettings(frameworks=("pytorch", "numpy"))
    Traceback (most recent call last):
    holdfast.errors.UsageError: there is no adapter for 'numpy' (there are pytorch, tensorflow, jax, chainer, holdfast)
    """

    frameworks: tuple[str, ...] = NAMES
    quick: bool = False
    model: str | None = None
    mtbf: float = 6 * 3600.0
    seed: int = 0
    out: Path = Path("holdfast-study")

    def __post_init__(self) -> None:
        for name in self.frameworks:
            if name not in NAMES:
                raise UsageError(f"there is no adapter for {name!r}", hint=f"there are {', '.join(NAMES)}")
        if not self.frameworks:
            raise UsageError("no framework is given", hint=f"there are {', '.join(NAMES)}")
        if self.mtbf <= 0:
            raise UsageError("the time between failures must be positive", hint="as in --mtbf 6h")


def study(settings: StudySettings, say: Say) -> dict[str, Any]:
    """Measure everything, and return the results as ``report.json`` has them.

    Args:
        settings: what to measure, and where to write checkpoints and logs.
        say: called with a sentence whenever something else is being done.

    Raises:
        UsageError: the folder cannot be written, the disk is too full, or the model is unknown.
        HoldfastError: none of the frameworks can be measured.
    """
    plan = QUICK if settings.quick else FULL
    costly = [model_of(name) for name in ([settings.model] if settings.model else plan.costly)]
    others = [model_of(name) for name in plan.others if name != settings.model]
    with _scratch(settings.out) as folder:
        machine.check_room(folder, _room(plan, [*costly, *others]))
        installed = [ensure(name, say) for name in settings.frameworks]
        results = _opening(settings, plan, costly)
        starts = {each.framework: partial(Process, each.framework, each.python) for each in installed if each.python}
        with FrameworkProcesses(starts, settings.out / "logs") as processes:
            say("starting the frameworks")
            hellos = processes.hello()
            results["frameworks"] = [_framework(each, hellos.get(each.framework)) for each in installed]
            able = {name: hello for name, hello in hellos.items() if not isinstance(hello, Failed)}
            if not able:
                reasons = "; ".join(f"{row['framework']}: {row['why']}" for row in results["frameworks"])
                raise HoldfastError(f"none of the frameworks can be measured: {reasons}")
            alone = {name: partial(starts[name], threads=1) for name in able}
            axes = Measurements(settings=settings, plan=plan, starts=alone, able=able, folder=folder, say=say)
            with axes.zygotes() as forks:
                results |= axes.costs(processes, forks, costly, others)
                processes.close()
                results |= axes.others(forks)
    results["advice"] = advise(results)
    return results


def _room(plan: StudyPlan, models: Sequence[StudyModel]) -> int:
    """Return the most bytes on the disk at once: some saves of the largest model, or one file of each rank."""
    return max(3 * max(model.nbytes for model in models), (1 + max(scale_axis.RANKS)) * model_of(plan.scaled).nbytes)


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """Make a folder for checkpoints below ``out``, on the same disk, and remove it at the end."""
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix="scratch-", dir=out))
    except OSError as e:
        raise UsageError(f"{out} cannot be written: {e.strerror or e}", hint="give another folder with --out") from e
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _opening(settings: StudySettings, plan: StudyPlan, costly: Sequence[StudyModel]) -> Row:
    """Return the part of the results that is known before anything is measured."""
    return {
        "version": version("holdfast"),
        "when": datetime.now().isoformat(timespec="seconds"),
        "machine": machine.facts(settings.out),
        "settings": {
            "quick": settings.quick,
            "mtbf_s": settings.mtbf,
            "models": [model.name for model in costly],
            "rounds": plan.rounds,
            "seed": settings.seed,
        },
    }


def _framework(installed: Installed, hello: Hello | None) -> Row:
    """Return a framework's row: its versions and parts, or the reason why it cannot be measured."""
    row: Row = {"framework": installed.framework, "install_s": round(installed.seconds, 1), "versions": {}}
    if hello is None or isinstance(hello, Failed):
        return row | {"ok": False, "why": installed.why if hello is None else str(hello)}
    parts = [part | {"usual": part["name"] in hello["usual"]} for part in hello["parts"]]
    row |= {"ok": True, "why": installed.why, "versions": hello["versions"]}
    return row | {"parts": parts, "usual_means": hello["usual_means"]}


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The axes of the study, each as a method that returns its rows."""

    settings: StudySettings
    plan: StudyPlan
    starts: Mapping[str, Start]  # with one thread each, because several processes run at once
    able: Mapping[str, Row]  # each framework's answer to "hello"
    folder: Path
    say: Say

    @contextmanager
    def zygotes(self) -> Iterator[dict[str, Start]]:
        """Start a zygote of every framework; all have imported it before anything is measured beside them."""
        with ExitStack() as stack:
            begun = {name: start(self._logs / f"{name}.log") for name, start in self.starts.items()}
            found = {name: stack.enter_context(FrameworkZygote(process)) for name, process in begun.items()}
            for zygote in found.values():
                zygote.ready()
            yield {name: zygote.fork for name, zygote in found.items()}

    def costs(
        self,
        processes: FrameworkProcesses,
        forks: Mapping[str, Start],
        costly: Sequence[StudyModel],
        others: Sequence[StudyModel],
    ) -> Row:
        """Measure cost, formats and the limits of the machine, all in the same turns."""
        formats = {name: [SaveFormat(**form) for form in hello["formats"]] for name, hello in self.able.items()}
        turns_of = partial(take, processes, formats=formats, folder=self.folder, seed=self.settings.seed, say=self.say)
        found: Row = {"limits": [], "cost": [], "formats": []}
        for model in costly:
            turns = turns_of(model, rounds=self.plan.rounds, training=True, forks=forks)
            found["cost"] += cost_rows(turns)
            found["limits"] += limit_rows(turns)
            found["formats"] += format_rows(turns)
        for model in others:
            turns = turns_of(model, rounds=self.plan.other_rounds)
            found["limits"] += limit_rows(turns)
            found["formats"] += format_rows(turns)
        return found

    def others(self, forks: Mapping[str, Start]) -> Row:
        """Measure the axes that need many processes: scale, crash safety and determinism."""
        found: Row = {"scale": [], "crash_safety": [], "determinism": []}
        for name in self.able:  # one after the other: these are times
            found["scale"] += self._scale(name, forks[name])
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for rows in pool.map(self._crash, self.able, forks.values()):
                found["crash_safety"] += rows
            for rows in pool.map(self._determinism, self.able, forks.values()):
                found["determinism"] += rows
        return found

    @property
    def _logs(self) -> Path:
        return self.settings.out / "logs"

    def _scale(self, name: str, fork: Start) -> list[Row]:
        self.say(f"{name}: saved by 1, 2 and 4 ranks")
        return scale_axis.measure(
            name,
            fork,
            self.able[name]["strategies"],
            shapes=model_of(self.plan.scaled).shapes,
            folder=self.folder / name,
            logs=self._logs,
            rounds=self.plan.other_rounds,
            seed=self.settings.seed,
            say=self.say,
        )

    def _crash(self, name: str, fork: Start) -> list[Row]:
        return crash_axis.measure(
            name,
            fork,
            [form["name"] for form in self.able[name]["formats"]],
            model=model_of(self.plan.killed),
            folder=self.folder / name,
            logs=self._logs,
            kills=self.plan.kills,
            seed=self.settings.seed,
            say=self.say,
        )

    def _determinism(self, name: str, fork: Start) -> list[Row]:
        return determinism_axis.measure(
            name,
            self.starts[name],
            self.able[name],
            fork=fork if self.settings.quick else None,
            scratch=self.folder,
            logs=self._logs,
            quick=self.settings.quick,
            say=self.say,
            seed=self.settings.seed,
            at_once=1,
        )
