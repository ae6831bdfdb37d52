"""The witness: a process that loads what a crash has left, another one than the one that saved."""

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

LIMIT = 60.0  # seconds for a load; one that takes longer hangs on damaged input, and is ended
SHOWN, LENGTH = 3, 160  # most errors of a row, and most letters of each: a report has to stay readable

Looked = dict[str, Any]  # {"error": words or None, "digests": of each array, or None}


class Witness:
    """A process with a model, whose old and new version it knows by their digests.

    A process that dies or hangs on what it loads is started again; it counts as having noticed the damage.
    """

    def __init__(self, framework: str, start: Start, logs: Path) -> None:
        self.framework = framework
        self._processes = FrameworkProcesses({framework: start}, logs)
        self.old: dict[str, str] = {}
        self.new: dict[str, str] = {}

    def model(self, shapes: list[Shape]) -> None:
        """Set the model."""
        self._processes.model(shapes, seed=0, together=True)
        versions = self._processes.ask(self.framework, "versions_of", within=LIMIT)
        self.old, self.new = versions[str(OLD)], versions[str(NEW)]

    def save_old(self, form: str, folder: Path) -> None:
        """Save the old version into the folder, alone; raises ``Failed`` if it does not load."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        given = {"form": form, "folder": str(folder.absolute()), "version": OLD}
        self._processes.ask(self.framework, "overwrite", within=LIMIT, **given)
        looked = self.look(form, folder)
        if looked["digests"] != self.old:
            raise Failed(f"what nobody has disturbed does not load as it was saved: {looked['error'] or 'it differs'}")

    def look(self, form: str, folder: Path) -> Looked:
        """Load what is in the folder; return the error, or the digests."""
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
    """Return the first line of some errors, each only once.

    >>> a_few(["EOFError: too short\\nsee above", "EOFError: too short"])
    ['EOFError: too short']
    """
    lines = (error_text(error.strip().partition("\n")[0], LENGTH) for error in errors)
    return list(dict.fromkeys(lines))[:SHOWN]
