"""``holdfast profile`` with options that make no sense."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.profile import profile
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": None}, "holdfast profile"),
        ({"command": ["missing.py"]}, "'missing.py'"),
        ({"memory": 0}, "--memory"),
        ({"memory": float("nan")}, "--memory"),
        *[
            ({"bandwidth": one}, f"--bandwidth {one:g}")
            for one in (1e30, 1e308, 1e-300, float("nan"), float("inf"), 0.0, -1.0)
        ],
        *[({"latency": one}, f"--latency {one:g}") for one in (1e30, 1e308, float("nan"), float("inf"), -1.0)],
        ({"check": Path("missing.json")}, "missing.json"),
        ({"check": Path("missing.json"), "fresh": True}, "--check"),
        ({"peer": "head"}, "HOST:PORT"),
        ({"peer": "head:1", "latency": 1}, "--peer"),
        ({"peer": "head:1"}, "token"),
        ({"serve": "29800"}, "--serve"),
        ({"serve": "29800", "command": None}, "token"),
        ({"serve": "here", "command": None}, "HOST:PORT"),
        ({"output": Path("missing/profile.json")}, "--output"),
        ({"output": Path()}, "--output"),
    ],
)
def test_bad_use_is_a_sentence_before_the_script_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    with pytest.raises(UsageError, match=re.escape(said)):
        profile(**{"command": ["train.py"], **options})
    assert not (tmp_path / "started").exists()
