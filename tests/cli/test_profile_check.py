"""``holdfast profile --check``: is it a profile of this run?"""

from __future__ import annotations

import atexit
import io
import json
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.profile.key import write_profile
from holdfast.engine.profile.measure import measure
from holdfast.engine.profile.round_trips import MeasuredLink
from holdfast.engine.profile.run_script import until_training
from holdfast.plan.profile import Link
from tests.cli.conftest import Call
from tests.cli.profiling import script


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    layers = until_training([script(tmp_path)], lambda run: measure(run.engine, rounds=3))
    made_up = MeasuredLink(link=Link(bandwidth=1e9, latency=1e-4), seconds={}, error=0.0)
    write_profile(tmp_path / "known.json", layers.profile("train", made_up))
    return tmp_path / "known.json"


def test_a_profile_of_this_run_is_recognized(known: Path, call: Call) -> None:
    said = call("profile", "--check", "known.json", "train.py")
    assert said.code == 0
    assert "known.json" in said.out
    assert not known.with_name("profile.json").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [({"width": 9}, ["model", "0 Linear", "160 bytes", "180"]), ({"micro": 8}, ["micro-batch", "4 samples", "[4, 4]"])],
)
def test_a_profile_of_another_run_is_told_with_the_reason(
    known: Path, call: Call, change: dict[str, int], told: list[str]
) -> None:
    script(known.parent, **change)
    said = call("profile", "--check", "known.json", "train.py")
    assert said.code == 2
    assert all(part in said.err for part in ["known.json", *told])


def test_check_for_machines(known: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    script(known.parent, micro=8)
    at_exit: list[Any] = []
    # The answer is the last line, printed at the exit. A Run registers something of its own.
    monkeypatch.setattr(atexit, "register", lambda work, *words: at_exit.append(partial(work, *words)))
    assert call("profile", "--check", "known.json", "--json", "train.py").code == 2
    written = io.StringIO()
    with redirect_stdout(written):
        [show() for show in at_exit]
    answer = json.loads(written.getvalue())
    assert not answer["fits"]
    assert "micro-batch" in answer["reason"]
