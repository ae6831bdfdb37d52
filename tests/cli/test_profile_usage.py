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
        ({"command": None}, "there is no script to profile"),
        ({"command": ["missing.py"]}, "there is no script 'missing.py'"),
        ({"memory": 0}, "(--memory is in GB of one device)"),
        ({"memory": float("nan")}, "(--memory is in GB of one device)"),
        *[
            ({"bandwidth": one}, f"--bandwidth {one:g} is no network (1e-06 to 1,000,000 Gbit/s)")
            for one in (1e30, 1e308, 1e-300, float("nan"), float("inf"), 0.0, -1.0)
        ],
        *[
            ({"latency": one}, f"--latency {one:g} is no network (0 to 60,000 ms)")
            for one in (1e30, 1e308, float("nan"), float("inf"), -1.0)
        ],
        ({"check": Path("missing.json")}, "cannot read the profile missing.json"),
        ({"check": Path("missing.json"), "fresh": True}, "--check only compares"),
        ({"peer": "head"}, "'head' is not HOST:PORT"),
        ({"peer": "head:1", "latency": 1}, "--peer measures what"),
        ({"peer": "head:1"}, "several machines need the job's token"),
        ({"serve": "29800"}, "--serve only waits for a peer"),
        ({"serve": "29800", "command": None}, "several machines need the job's token"),
        ({"serve": "here", "command": None}, "'here' is not HOST:PORT"),
        ({"output": Path("missing/profile.json")}, "cannot be written"),
        ({"output": Path()}, "cannot be written"),
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
