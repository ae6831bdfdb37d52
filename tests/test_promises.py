"""The tables of promises in the documentation: each line names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TITLE = "## What is promised, and the test that shows it"
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def lines_of(page: str) -> list[str]:
    """The lines of the table of promises in a page, without its head."""
    _, _, section = (ROOT / "docs" / page).read_text().partition(TITLE)
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return table[2:]


@pytest.mark.parametrize("page", ["recovery.md", "cluster.md"])
def test_each_promise_names_a_test_that_exists(page: str) -> None:
    lines = lines_of(page)
    assert len(lines) > 20
    for line in lines:
        named = NAMED.findall(line.split("|")[3])
        assert named, f"a promise without a test: {line}"
        for path, name in named:
            assert f"def {name}" in (ROOT / path).read_text(), f"{path} has no {name}"
