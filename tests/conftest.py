"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: exactness needs one thread everywhere

from tests import warm
from tests.harness import Result, end_zygotes, launch

PIPELINE = Path(__file__).parent / "faults" / "pipeline.py"
settings.register_profile("default", deadline=None)  # a busy machine is no failure
settings.register_profile("thorough", deadline=None, max_examples=1000)
FEW = 3  # the --soak of `make test`; with a larger one all sweeps are complete


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--history", type=int, default=None, help="one history of tests/world, by its number")
    parser.addoption(
        "--soak",
        type=int,
        default=FEW,
        help=f"random kill scenarios to run; with more than {FEW}, the thorough tests too",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("--soak") > FEW else "default")
    config.addinivalue_line(
        "markers", "thorough(reason): runs with a longer --soak; the reason says what covers it else"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak") > FEW:
        return
    for item in items:
        if (mark := item.get_closest_marker("thorough")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]}; `make thorough` runs it"))


def pytest_sessionfinish() -> None:
    end_zygotes()
    warm.end_nursery()


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


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """The undisturbed run of ``tests/faults/pipeline.py`` with so many steps, on one worker that holds all layers."""
    known: dict[int, Result] = {}

    def run(steps: int) -> Result:
        if steps not in known:
            folder: Path = tmp_path_factory.mktemp("whole")
            environment = {"STEPS": str(steps), "MODEL": str(folder / "model.safetensors")}
            known[steps] = launch(folder, script=PIPELINE, workers=1, environment=environment)
        return known[steps]

    return run
