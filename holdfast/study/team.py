"""The frameworks' processes, kept from turn to turn; one that dies is started again, and says so in its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from holdfast.study.process import Failed, Process
from holdfast.study.shapes import Shape

T = TypeVar("T")


class Team:
    """One process for each framework, with the model that is measured now.

    ``together``: all hold their model at once. Where memory does not suffice for that, a framework lets go of its
    own when another one's turn comes.
    """

    def __init__(self, pythons: Mapping[str, Path], logs: Path, *, threads: int | None = None) -> None:
        self.pythons, self._logs, self._threads = pythons, logs, threads
        self._processes: dict[str, Process] = {}
        self._makes: dict[str, Any] = {}
        self._made: set[str] = set()
        self._together = True

    def model(self, shapes: list[Shape], *, seed: int, together: bool) -> None:
        """From now on it is this model; each makes it when its turn comes."""
        self._makes = {"shapes": shapes, "seed": seed}
        self._together = together
        for framework in self.pythons:
            self._drop(framework)

    def ask(self, framework: str, op: str, **given: Any) -> dict[str, Any]:
        """One request to a framework that holds the model."""
        return self._tried(framework, lambda process: self._with_model(framework, process).ask(op, **given))

    def hello(self) -> dict[str, dict[str, Any] | Failed]:
        """What each can do, or why it cannot; they start beside each other."""
        found: dict[str, dict[str, Any] | Failed] = {}
        for framework in self.pythons:
            self._process(framework).send("hello")
        for framework in self.pythons:
            try:
                found[framework] = self._tried(framework, lambda process: process.answer())
            except Failed as e:
                found[framework] = e
        return found

    def _with_model(self, framework: str, process: Process) -> Process:
        if framework not in self._made:
            for other in [] if self._together else [*self._made]:
                self._drop(other)
            process.ask("make", **self._makes)
            self._made.add(framework)
        return process

    def _drop(self, framework: str) -> None:
        if framework in self._made:
            self._made.discard(framework)
            self._tried(framework, lambda process: process.ask("drop"))

    def _process(self, framework: str) -> Process:
        if framework not in self._processes:
            log = self._logs / f"{framework}.log"
            self._processes[framework] = Process(framework, self.pythons[framework], log=log, threads=self._threads)
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

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        self._processes.clear()
