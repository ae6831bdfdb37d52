"""PyTorch as the study uses it."""

from __future__ import annotations

from pathlib import Path

from holdfast.study.adapters.base import EVERY_RANK, RANK_ZERO, SAVES
from tests.study.adapters import conformance
from tests.study.conftest import Start


def test_it_saves_and_loads(start: Start, tmp_path: Path) -> None:
    conformance.check_saves(start("pytorch"), tmp_path)


def test_its_forks_save(start: Start, tmp_path: Path) -> None:
    conformance.check_forks(start("pytorch"), tmp_path)


def test_ranks_write_as_often_as_the_strategy_says(start: Start, tmp_path: Path) -> None:
    written = conformance.check_ranks(lambda: start("pytorch"), tmp_path)
    once = conformance.RAW
    assert written[RANK_ZERO][1] < 0.01 * once < once <= written[RANK_ZERO][0]
    assert min(written[EVERY_RANK]) >= once
    assert max(written["DCP"]) < 0.9 * once < once <= sum(written["DCP"]) < 1.5 * once


def test_a_restart_is_identical_with_every_part(start: Start, tmp_path: Path) -> None:
    conformance.check_lesson(lambda: start("pytorch"), tmp_path)


def test_worker_processes_draw_other_numbers_after_a_restart_in_mid_epoch(start: Start, tmp_path: Path) -> None:
    """A worker's generators are no part of the loader's state: they begin anew, where those of the run had gone on."""
    lesson = {"seed": 7, "variant": "worker processes"}
    first, second = start("pytorch"), start("pytorch")
    parts = [part["name"] for part in first.ask("hello")["parts"]]
    saves = {name: (step, str(tmp_path / name), parts) for name, step in SAVES.items()}
    run = first.ask("train", **lesson, saves=[*saves.values()])
    assert second.ask("train", **lesson) == run
    for name, (step, folder, _) in saves.items():
        after = second.ask("train", **lesson, restore=(folder, step, parts))
        differs = conformance.differences(run, after)
        assert differs[:1] == (["losses"] if name == "mid-epoch" else []), name
