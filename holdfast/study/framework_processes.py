"""The frameworks' processes, kept from turn to turn; one that dies is started again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from holdfast.study.models import Shape
from holdfast.study.process import Failed, Process, Start

T = TypeVar("T")
LIMIT = 900.0  # seconds for a request; one that takes longer hangs, even on a slow disk


class FrameworkProcesses:
    """One process for each framework, with the model that is being measured.

    Args:
        starts: by framework, a function that starts its process.
        logs: folder for what processes print.
    """

    def __init__(self, starts: Mapping[str, Start], logs: Path) -> None:
        self._starts, self._logs = starts, logs
        self._processes: dict[str, Process] = {}
        self._makes: dict[str, Any] = {}
        self._made: set[str] = set()
        self._together = True

    def model(self, shapes: list[Shape], *, seed: int, together: bool) -> None:
        """Set the model; each framework makes it at its next request.

        ``together``: all frameworks hold the model at once. Else one drops its own when another is asked, for machines
        with too little memory.
        """
        self._makes = {"shapes": shapes, "seed": seed}
        self._together = together
        for framework in self._starts:
            self._drop(framework)

    def ask(self, framework: str, op: str, **given: Any) -> dict[str, Any]:
        """Send a request to a framework that holds the model, and return its answer; raises ``Failed``."""
        given = {"within": LIMIT, **given}
        return self._tried(framework, lambda process: self._with_model(framework, process).ask(op, **given))

    def hello(self) -> dict[str, dict[str, Any] | Failed]:
        """Start all processes at once; return what each framework can do, or why it cannot."""
        found: dict[str, dict[str, Any] | Failed] = {}
        for framework in self._starts:
            self._process(framework).send("hello")
        for framework in self._starts:
            try:
                found[framework] = self._tried(framework, lambda process: process.answer(within=LIMIT))
            except Failed as e:
                found[framework] = e
        return found

    def _with_model(self, framework: str, process: Process) -> Process:
        if framework not in self._made:
            for other in [] if self._together else [*self._made]:
                self._drop(other)
            process.ask("make", within=LIMIT, **self._makes)
            self._made.add(framework)
        return process

    def _drop(self, framework: str) -> None:
        if framework in self._made:
            self._made.discard(framework)
            try:
                self._tried(framework, lambda process: process.ask("drop", within=LIMIT))
            except Failed:
                pass  # then its process is new, and holds nothing

    def _process(self, framework: str) -> Process:
        if framework not in self._processes:
            self._processes[framework] = self._starts[framework](self._logs / f"{framework}.log")
        return self._processes[framework]

    def _tried(self, framework: str, work: Callable[[Process], T]) -> T:
        process = self._process(framework)
        try:
            return work(process)
        except Failed:
            if not process.alive:
                self._processes.pop(framework).kill()
                self._made.discard(framework)
            raise

    def __enter__(self) -> FrameworkProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        self._processes.clear()
