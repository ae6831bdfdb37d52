"""docs/porting.md: its code is that of the files under examples/, and the programs that people have run as they are."""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path

import pytest

from tests.examples.test_programs import EXAMPLES, NEEDS, PROGRAMS

PAGE = (EXAMPLES.parent / "docs" / "porting.md").read_text()
BLOCK = re.compile(r"\[examples/(\w+)\.py\]\([^)]*\):?\n+```python\n(.*?)```", re.DOTALL)


def excerpts() -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in BLOCK.finditer(PAGE)]


def is_in(part: str, whole: str) -> bool:
    """Whether consecutive lines of one text are those of another, but for how far they are indented."""
    wanted = [line for line in textwrap.dedent(part).splitlines() if line.strip()]
    lines = [line for line in whole.splitlines() if line.strip()]
    for first in range(len(lines) - len(wanted) + 1):
        found = textwrap.dedent("\n".join(lines[first : first + len(wanted)])).splitlines()
        if found == wanted:
            return True
    return False


def test_every_program_is_there_with_and_without_holdfast() -> None:
    names = [name for name, _ in excerpts()]
    assert sorted(names) == sorted([*PROGRAMS, *(f"plain_{name}" for name in PROGRAMS)])


@pytest.mark.parametrize(("name", "code"), excerpts(), ids=[name for name, _ in excerpts()])
def test_the_page_shows_what_the_file_has(name: str, code: str) -> None:
    assert is_in(code, (EXAMPLES / f"{name}.py").read_text())


def test_code_that_is_not_in_the_file_is_noticed() -> None:
    """The control."""
    name, code = excerpts()[0]
    assert not is_in(code.replace("=", "==", 1), (EXAMPLES / f"{name}.py").read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_that_people_have_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"examples/plain_{name}.py needs {NEEDS[name]}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    importlib.import_module(f"plain_{name}").main(steps=2)
