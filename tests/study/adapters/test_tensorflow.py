"""TensorFlow, in its own interpreter. Importing it takes seconds: few processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.study.adapters.base import SAVES
from holdfast.study.process import Failed, Process
from tests.study.adapters import conformance
from tests.study.conftest import Start

FORMATS = ("tf.train.Checkpoint", "keras")


@pytest.mark.timeout(300)
def test_it_saves_and_loads(start: Start, tmp_path: Path) -> None:
    conformance.check_saves(start("tensorflow"), tmp_path)


@pytest.mark.timeout(300)
def test_a_restart_is_identical_with_every_part(start: Start, tmp_path: Path) -> None:
    """The dropout's seed generator among them, without which a checkpoint of the model loads and differs."""
    conformance.check_lesson(lambda: start("tensorflow"), tmp_path)


@pytest.mark.timeout(300)
def test_what_it_refuses(start: Start, tmp_path: Path) -> None:
    """A checkpoint of other shapes, and to save a loader that has a random operation in it; without it, it saves."""
    process = start("tensorflow")
    with pytest.raises(Failed, match="is stateful"):
        _save_in_mid_epoch(process, tmp_path / "loader", ["model", "loader"])
    _save_in_mid_epoch(process, tmp_path / "model", ["model"])
    process.ask("make", shapes=[("one", (3, 4)), ("two", (5,))], seed=0)
    for form in FORMATS:
        process.ask("save", form=form, folder=str(tmp_path / form))
        assert process.ask("load", form=form, folder=str(tmp_path / form))["same"]
    process.ask("make", shapes=[("one", (3, 4)), ("two", (6,))], seed=0)
    for form in FORMATS:
        with pytest.raises(Failed, match="shape"):
            process.ask("load", form=form, folder=str(tmp_path / form))


def _save_in_mid_epoch(process: Process, folder: Path, parts: list[str]) -> None:
    save = (SAVES["mid-epoch"], str(folder), parts)
    process.ask("train", seed=0, variant="random map in tf.data", saves=[save])
