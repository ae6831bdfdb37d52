"""Commands as a user calls them, in this process: importing torch again for each would take two seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from holdfast.cli.main import main


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


Call = Callable[..., Said]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """``call("plan", "--nodes", 4)`` is ``holdfast plan --nodes 4``, on a terminal with so many columns."""

    def run(*words: object, columns: int | None = None) -> Said:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, words)])
        # Wide enough, unless it is what is tested: the folders of tests have long names.
        monkeypatch.setenv("COLUMNS", str(columns or 200))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Said(int(end.value.code or 0), *capsys.readouterr())

    return run
