"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: exactness needs one thread everywhere

from tests import injected, warm
from tests.harness import Result, end_zygotes, launch

gc.disable()  # until all tests are collected: it would look at millions of objects that all stay
PIPELINE = Path(__file__).parent / "faults" / "pipeline.py"
# A busy machine is no failure. The same examples each time: what fails is the change, not the day; new ones are looked
# for by `make thorough`.
settings.register_profile("default", deadline=None, derandomize=True)
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


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: a collection need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    end_zygotes()
    warm.end_nursery()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """The report of a test, also one of another process, has the faults that it has injected."""
    report = yield
    if call.when == "call":
        report.user_properties.append((injected.PROPERTY, dict(injected.injected)))
        injected.injected.clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many faults of which kind were injected."""
    total: Counter[str] = Counter()
    for report in (each for outcome in ("passed", "failed") for each in terminalreporter.stats.get(outcome, [])):
        total.update(dict(getattr(report, "user_properties", ())).get(injected.PROPERTY, {}))
    for line in injected.lines(total):
        terminalreporter.write_line(line)


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
