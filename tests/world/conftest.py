"""A history that is replayed by its number tells what happened in it, if it fails."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.world.history import lived

LINE = 240  # characters of an event that are shown


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call" and report.failed and item.config.getoption("--history") is not None and lived:
        report.sections.append(("what happened", "\n".join(str(event)[:LINE] for event in lived[-1].events)))
    return report
