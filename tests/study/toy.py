"""A framework of pure Python for the tests of the study, with faults on demand; it answers through the real server.

``interpreter(folder, random=True)`` makes what a ``Process`` can start in the place of a Python.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

from holdfast.study.adapters.base import EPOCH, Adapter, Lesson, ModelInTraining, Shapes, StatePart, bits

PARTS = ("model", "optimizer", "RNG", "loader", "average")


def interpreter(folder: Path, **faults: Any) -> Path:
    """Starts the toy whatever it is told, and writes a line to ``folder/starts`` each time. ``faults``:

    random: no two runs are the same; disturbs: a save draws a random number; unless: {part: "raise" | "crash" | "hang"}
    when a restart is without it; breaks: "train" or "save" raises.
    """
    path = folder / "python"
    command = f"exec {sys.executable} {Path(__file__)} '{json.dumps(faults)}'"
    path.write_text(f"#!/bin/sh\necho >> {folder}/starts\n{command}\n")
    path.chmod(0o755)
    return path


def starts(folder: Path) -> int:
    return len((folder / "starts").read_bytes())


class ToyLesson(Lesson):
    def __init__(self, seed: int, faults: dict[str, Any]) -> None:
        self.faults = faults
        self.source = random.Random(None if faults.get("random") else seed)
        self.state: dict[str, Any] = {"model": self.source.random(), "optimizer": 0.0, "average": 0.0}
        self.state["loader"] = []

    def train(self, steps: int) -> list[str]:
        self._break("train")
        return [bits(self._step()) for _ in range(steps)]

    def _step(self) -> float:
        self._shuffle()
        target = self.state["loader"].pop() + self.source.random()
        error = self.state["model"] - target
        self.state["optimizer"] = 0.9 * self.state["optimizer"] + error
        self.state["model"] -= 0.1 * self.state["optimizer"]
        self.state["average"] = 0.9 * self.state["average"] + 0.1 * self.state["model"]
        return float(error**2)

    def _shuffle(self) -> None:
        """When an epoch begins, or somebody asks for the loader's state then: as PyTorch's does."""
        if not self.state["loader"]:
            self.state["loader"] = self.source.sample(range(EPOCH), EPOCH)

    def digests(self) -> dict[str, str]:
        return {name: repr(self.state[part]) for name, part in (("weights", "model"), ("average", "average"))}

    def save(self, path: Path, parts: frozenset[str]) -> None:
        self._break("save")
        if "loader" in parts:
            self._shuffle()
        path.mkdir(parents=True)
        everything = {**self.state, "RNG": self.source.getstate()}
        (path / "state.json").write_text(json.dumps({part: everything[part] for part in sorted(parts)}))
        if self.faults.get("disturbs"):
            self.source.random()

    def restore(self, path: Path, parts: frozenset[str]) -> None:
        saved = json.loads((path / "state.json").read_text())
        assert saved.keys() == parts, "what is left out was not saved"
        for part in parts:
            if part == "RNG":
                version, numbers, rest = saved[part]
                self.source.setstate((version, tuple(numbers), rest))
            else:
                self.state[part] = saved[part]
        for part, what in self.faults.get("unless", {}).items():
            if part not in parts:
                self._fail(part, what)

    def _break(self, op: str) -> None:
        if self.faults.get("breaks") == op:
            raise RuntimeError(f"the toy cannot {op}")

    def _fail(self, part: str, what: str) -> None:
        if what == "raise":
            raise KeyError(f"{part} is missed")
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)


class Toy(Adapter):
    name = "toy"
    parts = tuple(StatePart(name=name, what=f"its {name}") for name in PARTS)
    usual = frozenset({"model", "optimizer"})
    usual_means = "model and optimizer"

    def __init__(self, faults: dict[str, Any]) -> None:
        self.faults = faults
        self.formats = ()

    def versions(self) -> dict[str, str]:
        return {"toy": "1"}

    def make(self, shapes: Shapes, seed: int) -> ModelInTraining:
        raise NotImplementedError

    def lesson(self, seed: int, variant: str = "") -> Lesson:
        return ToyLesson(seed, self.faults)


if __name__ == "__main__":
    from holdfast.study.inside.serve import serve

    module = types.ModuleType("toy")
    module.ADAPTER = Toy(json.loads(sys.argv[1]))  # type: ignore[attr-defined]
    sys.modules["holdfast.study.adapters.toy"] = module
    serve("toy")
