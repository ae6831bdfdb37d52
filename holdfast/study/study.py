"""The study from its begin to its end: install, measure every axis, advise, report."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError, UsageError
from holdfast.study import crash, determinism, machine, scale
from holdfast.study.adapters import NAMES
from holdfast.study.adapters.base import Format
from holdfast.study.advice import advise
from holdfast.study.cost import cost_rows, format_rows, limit_rows
from holdfast.study.install import Installed, ensure
from holdfast.study.models import model_of
from holdfast.study.process import Failed
from holdfast.study.team import Team
from holdfast.study.turns import Model, take

Say = Callable[[str], None]
Row = dict[str, Any]
AT_ONCE = determinism.AT_ONCE
Hello = dict[str, Any] | Failed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured. ``costly``: models whose saves are also measured beside training."""

    costly: tuple[str, ...]
    others: tuple[str, ...]
    scaled: str
    killed: str  # while it is saved
    rounds: int
    other_rounds: int
    kills: int


QUICK = Plan(costly=("gpt",), others=("lenet",), scaled="gpt", killed="small-gpt", rounds=2, other_rounds=1, kills=4)
FULL = Plan(
    costly=("gpt", "resnet50"),
    others=("lenet", "vgg16"),
    scaled="resnet50",
    killed="gpt",
    rounds=7,
    other_rounds=3,
    kills=12,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user has asked for.

    >>> Settings(frameworks=("pytorch", "numpy"))
    Traceback (most recent call last):
    holdfast.errors.UsageError: there is no adapter for 'numpy' (there are pytorch, tensorflow, jax, chainer, holdfast)
    """

    frameworks: tuple[str, ...] = NAMES
    quick: bool = False
    model: str | None = None  # the user's own
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


def study(settings: Settings, say: Say) -> dict[str, Any]:
    """Everything that was measured, and what follows from it."""
    plan = QUICK if settings.quick else FULL
    costly = [model_of(name) for name in ([settings.model] if settings.model else plan.costly)]
    others = [model_of(name) for name in plan.others if name != settings.model]
    with _scratch(settings.out) as folder:
        machine.check_room(folder, 3 * max(model.nbytes for model in [*costly, *others]))
        installed = [ensure(name, say) for name in settings.frameworks]
        results = _opening(settings, plan, costly)
        pythons = {each.framework: each.python for each in installed if each.python is not None}
        with Team(pythons, settings.out / "logs") as team:
            say("starting the frameworks")
            hellos = team.hello()
            results["frameworks"] = [_framework(each, hellos.get(each.framework)) for each in installed]
            able = {name: hello for name, hello in hellos.items() if not isinstance(hello, Failed)}
            if not able:
                reasons = "; ".join(f"{row['framework']}: {row['why']}" for row in results["frameworks"])
                raise HoldfastError(f"none of the frameworks can be measured: {reasons}")
            results |= _costs(team, able, settings, plan, costly, others, folder, say)
        axes = Axes(settings=settings, plan=plan, pythons=pythons, able=able, folder=folder, say=say)
        results |= axes.measure()
    results["advice"] = advise(results)
    return results


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder for checkpoints, on the disk that --out is on, and gone afterwards."""
    folder = out / "scratch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (out / "logs").mkdir(exist_ok=True)
    except OSError as e:
        raise UsageError(f"{out} cannot be written: {e.strerror or e}", hint="give another folder with --out") from e
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _opening(settings: Settings, plan: Plan, costly: Sequence[Model]) -> Row:
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
    """A row for each, with the reason if it cannot be measured."""
    row: Row = {"framework": installed.framework, "install_s": round(installed.seconds, 1), "versions": {}}
    if hello is None or isinstance(hello, Failed):
        return row | {"ok": False, "why": installed.why if hello is None else str(hello)}
    parts = [part | {"usual": part["name"] in hello["usual"]} for part in hello["parts"]]
    row |= {"ok": True, "why": installed.why, "versions": hello["versions"]}
    return row | {"parts": parts, "usual_means": hello["usual_means"]}


def _costs(
    team: Team,
    able: Mapping[str, Row],
    settings: Settings,
    plan: Plan,
    costly: Sequence[Model],
    others: Sequence[Model],
    folder: Path,
    say: Say,
) -> Row:
    """Cost, formats and the limits of the machine, from the same turns."""
    formats = {name: [Format(**form) for form in hello["formats"]] for name, hello in able.items()}
    found: Row = {"limits": [], "cost": [], "formats": []}
    for model in [*costly, *others]:
        training = model in costly
        rounds = plan.rounds if training else plan.other_rounds
        turns = take(team, model, formats, folder=folder, rounds=rounds, seed=settings.seed, training=training, say=say)
        found["limits"] += limit_rows(turns)
        found["cost"] += cost_rows(turns) if training else []
        found["formats"] += format_rows(turns)
    return found


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes that start processes of their own."""

    settings: Settings
    plan: Plan
    pythons: Mapping[str, Path]
    able: Mapping[str, Row]  # what the frameworks said they can do
    folder: Path
    say: Say

    def measure(self) -> Row:
        found: Row = {"scale": [], "crash_safety": [], "determinism": []}
        for name in self.able:  # one after the other: these are times
            found["scale"] += self._scale(name)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for rows in pool.map(self._crash, self.able):
                found["crash_safety"] += rows
            for rows in pool.map(self._determinism, self.able):
                found["determinism"] += rows
        return found

    @property
    def _logs(self) -> Path:
        return self.settings.out / "logs"

    def _scale(self, name: str) -> list[Row]:
        self.say(f"{name}: saved by 1, 2 and 4 ranks")
        return scale.measure(
            name,
            self.pythons[name],
            self.able[name]["strategies"],
            shapes=model_of(self.plan.scaled).shapes,
            folder=self.folder / name,
            logs=self._logs,
            rounds=self.plan.other_rounds,
            seed=self.settings.seed,
            say=self.say,
        )

    def _crash(self, name: str) -> list[Row]:
        return crash.measure(
            name,
            self.pythons[name],
            [form["name"] for form in self.able[name]["formats"]],
            shapes=model_of(self.plan.killed).shapes,
            folder=self.folder / name,
            logs=self._logs,
            kills=self.plan.kills,
            seed=self.settings.seed,
            say=self.say,
        )

    def _determinism(self, name: str) -> list[Row]:
        return determinism.measure(
            name,
            self.pythons[name],
            self.able[name],
            scratch=self.folder,
            logs=self._logs,
            quick=self.settings.quick,
            say=self.say,
            seed=self.settings.seed,
            at_once=1,
        )
