"""Who loads what a crash has left: another process than the one that saved, as after any crash."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.study.framework_processes import FrameworkProcesses
from holdfast.study.inside.killed_saves import NEW, OLD
from holdfast.study.models import Shape
from holdfast.study.process import Failed, Start
from holdfast.study.rows import error_text

LIMIT = 60.0  # seconds for a load; one that hangs on damaged input is ended
SHOWN, LENGTH = 3, 160  # errors in a row, and their letters

Looked = dict[str, Any]  # {"error": words or None, "digests": of each array, or None}


class Witness:
    """Holds a model, whose old and new version it knows by their digests. It outlives what it is made to load: a
    process that ends or hangs on that is started again, and has noticed in its own way."""

    def __init__(self, framework: str, start: Start, logs: Path) -> None:
        self.framework = framework
        self._processes = FrameworkProcesses({framework: start}, logs)
        self.old: dict[str, str] = {}
        self.new: dict[str, str] = {}

    def model(self, shapes: list[Shape]) -> None:
        """From now on it is about this model."""
        self._processes.model(shapes, seed=0, together=True)
        versions = self._processes.ask(self.framework, "versions_of", within=LIMIT)
        self.old, self.new = versions[str(OLD)], versions[str(NEW)]

    def save_old(self, form: str, folder: Path) -> None:
        """The old version lies there, and nothing else."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        given = {"form": form, "folder": str(folder.absolute()), "version": OLD}
        self._processes.ask(self.framework, "overwrite", within=LIMIT, **given)
        looked = self.look(form, folder)
        if looked["digests"] != self.old:
            raise Failed(f"what nobody has disturbed does not load as it was saved: {looked['error'] or 'it differs'}")

    def look(self, form: str, folder: Path) -> Looked:
        """What is there now."""
        given = {"form": form, "folder": str(folder.absolute())}
        try:
            looked = self._processes.ask(self.framework, "look", within=LIMIT, **given)
        except Failed as e:
            looked = {"error": str(e), "digests": None}
        error = looked["error"]
        return looked | {"error": error and error.replace(f"{folder.absolute()}/", "")}

    def __enter__(self) -> Witness:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()


def a_few(errors: Sequence[str]) -> list[str]:
    """The first line of each, each only once.

    >>> a_few(["EOFError: too short\\nsee above", "EOFError: too short"])
    ['EOFError: too short']
    """
    lines = (error_text(error.strip().partition("\n")[0], LENGTH) for error in errors)
    return list(dict.fromkeys(lines))[:SHOWN]
