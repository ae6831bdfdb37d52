"""The checks themselves: what is told a lie must notice it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.study.adapters.base import SAVES, STEPS
from tests.study.adapters import conformance
from tests.study.conftest import Start

Answer = dict[str, Any]


class Liar:
    """A process of which the answers to one request are changed."""

    def __init__(self, process: Any, op: str, change: Callable[[Answer], Answer]) -> None:
        self.process, self.op, self.change = process, op, change

    def ask(self, op: str, **given: Any) -> Answer:
        answer = self.process.ask(op, **given)
        return {**answer, **self.change(answer)} if op == self.op else answer


FORM = {"name": "torch.save", "compressed": False}


def check_loss(process: Any, folder: Path) -> None:
    """Save, then let the check damage what was saved."""
    conformance.check_round_trip(process, FORM, folder)
    conformance.check_notices_a_loss(process, FORM["name"], folder)


Check = Callable[[Any, Path], object]
LIES: dict[str, tuple[str, Callable[[Answer], Answer], Check]] = {  # request, false answer, check
    "versions": ("hello", lambda answer: {"versions": {}}, lambda process, _: conformance.check_hello(process)),
    "bytes": (
        "make",
        lambda answer: {"bytes": answer["bytes"] - 4},
        lambda process, _: conformance.check_made(process),
    ),
    "loss": (
        "make",
        lambda answer: {"loss": 2 * answer["loss"]},
        lambda process, _: conformance.check_made(process),
    ),
    "files": (
        "save",
        lambda answer: {"files": answer["files"] + 1},
        lambda process, folder: conformance.check_round_trip(process, FORM, folder),
    ),
    "load": (
        "load",
        lambda answer: {"same": False},
        lambda process, folder: conformance.check_round_trip(process, FORM, folder),
    ),
    "digests": (
        "look",
        lambda answer: {"digests": answer["digests"] and {**answer["digests"], "weights/a": "0"}},
        lambda process, folder: conformance.check_overwrites(process, FORM["name"], folder),
    ),
    "truncation": ("look", lambda answer: {"error": None}, check_loss),
}


class Still:
    """A process of which the steps change nothing."""

    def __init__(self, process: Any) -> None:
        self.process = process

    def ask(self, op: str, **given: Any) -> Answer:
        if op != "beside":
            return self.process.ask(op, **given)
        Path(given["folder"]).mkdir()
        self.process.ask("overwrite", **given, version=conformance.OLD)
        return {"stall_s": 0.1, "step_s": 0.1, "steps": 3, "lost_s": 0.1}


def test_every_lie_about_saving_is_noticed(start: Start, tmp_path: Path) -> None:
    process = start("pytorch")
    conformance.check_made(process)
    for name, (op, change, check) in LIES.items():
        with pytest.raises(AssertionError):
            check(Liar(process, op, change), tmp_path / name)
    still: Any = Still(process)
    with pytest.raises(AssertionError, match="a step leaves"):
        conformance.check_steps(still, FORM["name"], tmp_path / "still" / "beside")


class Pretender:
    """Trains nothing; its answers are those of a perfect lesson with two parts, but for one fault."""

    made = 0

    def __init__(self, fault: str) -> None:
        self.fault = fault
        Pretender.made += 1
        self.number = Pretender.made
        self.trained = 0

    def ask(self, op: str, **given: Any) -> Answer:
        if op == "hello":
            return {"parts": [{"name": "model"}, {"name": "loader"}]}
        self.trained += 1
        _, first, parts = given.get("restore") or (None, 0, ["model", "loader"])
        losses = [f"{step}" for step in range(first, STEPS)]
        if len(parts) < 2 and self.fault != f"{parts[0]} alone suffices":
            losses[-1] = "another"
        if self._differs(given, first):
            losses[0] = "another"
        return {"first": first, "losses": losses, "digests": {"weights": "0"}}

    def _differs(self, given: dict[str, Any], first: int) -> bool:
        return {
            "random": self.number % 2 == 0,
            "disturbed by saving": "saves" in given,
            "cannot restart": "restore" in given and first == SAVES["epoch's end"],
            "remembers": self.trained > 1,
        }.get(self.fault, False)

    def kill(self) -> None: ...

    def __enter__(self) -> Pretender:
        return self

    def __exit__(self, *_: object) -> None: ...


def pretend(fault: str) -> Any:
    return lambda: Pretender(fault)


def test_a_perfect_lesson_passes(tmp_path: Path) -> None:
    conformance.check_lesson(pretend(""), tmp_path)


@pytest.mark.parametrize(
    "fault",
    ["random", "disturbed by saving", "cannot restart", "remembers", "model alone suffices", "loader alone suffices"],
)
def test_every_fault_of_a_lesson_is_noticed(fault: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        conformance.check_lesson(pretend(fault), tmp_path)


def test_what_a_framework_cannot_do_must_be_said_and_must_be_so(tmp_path: Path) -> None:
    conformance.check_lesson(pretend("cannot restart"), tmp_path, cannot={"epoch's end"})
    conformance.check_lesson(pretend("model alone suffices"), tmp_path, unseen={"loader"})
    with pytest.raises(AssertionError, match="saved at step 0"):
        conformance.check_lesson(pretend(""), tmp_path, cannot={"step 0"})
    with pytest.raises(AssertionError, match="without loader"):
        conformance.check_lesson(pretend(""), tmp_path, unseen={"loader"})
