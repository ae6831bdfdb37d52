"""Starts programs of integrations under an agent, and compares what their workers report."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

from tests.harness import Result, launch


def train(
    folder: Path, script: Path, *, workers: int, preload: tuple[str, ...], faults: str = "", **settings: object
) -> Result:
    folder.mkdir(exist_ok=True)
    environment = {name: str(value) for name, value in settings.items()}
    given = {"workers": workers, "preload": preload, "faults": faults, "environment": environment}
    with chdir(folder):  # paths are part of what is compared
        result = launch(folder, script=script, **given)  # type: ignore[arg-type]
    assert result.code == 0, result.said
    return result


def reported(result: Result) -> dict[str, Any]:
    """What all workers report alike, but for their number."""
    found = [{key: value for key, value in line.items() if key != "workers"} for line in result.results]
    assert found, "nobody has come to the end"
    assert all(line == found[0] for line in found), found
    return found[0]


def lost(result: Result) -> set[str]:
    return {event["worker"] for event in result.of("failure")}
