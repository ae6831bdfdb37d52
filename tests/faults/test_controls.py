"""Negative controls: with training done wrong on purpose, the checks of the sweep must fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.judge import covered
from tests.harness import assert_each_sample_once_per_epoch, launch


@pytest.mark.parametrize(
    "sabotage",
    ["double-update", *(covered("pipelines have this control", name) for name in ("skip-gradient", "repeat-sample"))],
)
def test_the_hash_notices(tmp_path: Path, undisturbed, sabotage: str) -> None:
    """All workers do it, so that they still agree with each other: only the hash can tell."""
    faults = "; ".join(f"{sabotage} worker=0.{i} step=4" for i in range(3))
    result = launch(tmp_path, faults=faults, environment={"STEPS": "10"})
    assert result.code == 0
    assert result.sha256 != undisturbed(10).sha256
    assert result.losses[:4] == undisturbed(10).losses[:4]
    assert result.losses != undisturbed(10).losses


def test_counting_samples_notices_a_repeated_one(tmp_path: Path) -> None:
    result = launch(tmp_path, faults="repeat-sample worker=0.1 step=3", environment={"STEPS": "10"})
    with pytest.raises(AssertionError, match="epoch 0"):
        assert_each_sample_once_per_epoch(result, size=70, steps_per_epoch=5)


def test_one_sabotaged_replica_is_noticed(tmp_path: Path) -> None:
    result = launch(tmp_path, faults="double-update worker=0.1 step=4", environment={"STEPS": "10"})
    with pytest.raises(AssertionError, match="workers disagree"):
        _ = result.sha256


def test_another_seed_gives_another_hash(tmp_path: Path, undisturbed) -> None:
    result = launch(tmp_path, environment={"STEPS": "10", "MODEL_SEED": "1"})
    assert result.sha256 != undisturbed(10).sha256
