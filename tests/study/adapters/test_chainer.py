"""Chainer, in its own interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.study.adapters.base import SAVES
from tests.study.adapters import conformance
from tests.study.conftest import Start


def test_it_saves_and_loads(start: Start, tmp_path: Path) -> None:
    conformance.check_saves(start("chainer"), tmp_path)


def test_its_lesson_restarts(start: Start, tmp_path: Path) -> None:
    conformance.check_lesson(lambda: start("chainer"), tmp_path)


def test_a_snapshot_of_the_trainer_is_not_enough(start: Start, tmp_path: Path) -> None:
    """It covers no generator: the first step after a restart has other dropout."""
    usual = start("chainer").ask("hello")["usual"]
    step = SAVES["mid-epoch"]
    save, restore = (step, str(tmp_path / "usual"), usual), (str(tmp_path / "usual"), step, usual)
    whole = start("chainer").ask("train", seed=7, saves=[save])
    after = start("chainer").ask("train", seed=7, restore=restore)
    assert after["losses"][0] != whole["losses"][step]


@pytest.mark.parametrize(("form", "least", "most"), [("npz", 0.9, 0.97), ("npz raw", 1, 1.02)])
def test_compression_gains_little(start: Start, tmp_path: Path, form: str, least: float, most: float) -> None:
    process = start("chainer")
    raw = process.ask("make", shapes=[("weight", (500, 500))], seed=0)["bytes"]
    assert least < process.ask("save", form=form, folder=str(tmp_path / "x"))["bytes"] / raw < most
