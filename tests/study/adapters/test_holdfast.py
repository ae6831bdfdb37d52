"""Holdfast as the study uses it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.study import adapters
from holdfast.study.adapters.base import SAVES
from tests.study.adapters import conformance
from tests.study.conftest import Start


def test_it_saves_and_loads(start: Start, tmp_path: Path) -> None:
    conformance.check_saves(start("holdfast"), tmp_path)


def test_its_forks_save(start: Start, tmp_path: Path) -> None:
    conformance.check_forks(start("holdfast"), tmp_path)


def test_ranks_share_the_writing(start: Start, tmp_path: Path) -> None:
    written = conformance.check_ranks(lambda: start("holdfast"), tmp_path)["holdfast"]
    assert max(written) < 0.9 * conformance.RAW < conformance.RAW <= sum(written) < 1.5 * conformance.RAW


def test_a_restart_is_identical(start: Start, tmp_path: Path) -> None:
    """It has no parts to leave out; the next test does without all of it."""
    conformance.check_lesson(lambda: start("holdfast"), tmp_path)


def test_a_restart_without_its_checkpoint_begins_anew(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    process, middle = start("holdfast"), SAVES["mid-epoch"]
    saves = [(middle, str(tmp_path / "saved"), [])]
    control = process.ask("train", seed=7, saves=saves)
    (tmp_path / "nothing").mkdir()
    for folder, same in (("saved", True), ("nothing", False)):
        after = process.ask("train", seed=7, restore=(str(tmp_path / folder), middle, []))
        assert (conformance.differences(control, after) == []) == same
        assert (after["losses"] == control["losses"][:-middle]) != same
    assert not list(scratch.glob("holdfast-study-*")), "a lesson leaves its folder behind"


def test_it_needs_nothing_that_only_the_development_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)  # importing it is an error
    for module in ("holdfast_lesson", "pytorch_lesson"):
        monkeypatch.delitem(sys.modules, f"holdfast.study.adapters.{module}", raising=False)
    assert len(adapters.find("holdfast").lesson(0).train(1)) == 1
