"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: exactness needs one thread everywhere

from tests.harness import Result, launch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=int, default=3, help="random kill scenarios to run in tests/faults")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    """The undisturbed run of ``tests/faults/train.py`` with so many steps, on one worker."""
    known: dict[tuple[int, str], Result] = {}

    def run(steps: int, numerics: str = "exact") -> Result:
        if (steps, numerics) not in known:
            folder: Path = tmp_path_factory.mktemp("undisturbed")
            environment = {"STEPS": str(steps), "NUMERICS": numerics}
            known[steps, numerics] = launch(folder, workers=1, environment=environment)
        return known[steps, numerics]

    return run
