"""The pictures: one for each axis that has rows, whatever failed, and none that would mislead."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from holdfast.study.plots import draw
from holdfast.study.plots.look import DPI, WIDTH
from holdfast.study.plots.matrix import mark_of
from holdfast.study.plots.pictures import DRAWN
from holdfast.study.rows import AXES
from tests.study.example import example

Results = dict[str, Any]


def size_of(path: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def test_all_are_drawn_as_wide_as_a_phone_shows_them(tmp_path: Path) -> None:
    made = draw(example(missing=None), tmp_path)
    assert set(made) == set(DRAWN)
    for path, shows in made.values():
        assert shows
        assert size_of(path)[0] == round(WIDTH * DPI)
        ink = (image.imread(path)[:, :, :3] < 0.9).any(axis=2)
        assert ink.mean() > 0.02, "an empty picture"
        assert not ink[:, :2].any(), "cut off at the left"
        assert not ink[:, -2:].any(), "cut off at the right"


def test_a_study_without_rows_has_no_pictures(tmp_path: Path) -> None:
    for name, _, _ in DRAWN.values():
        (tmp_path / name).write_text("of an earlier study")
    assert draw({**example(), **{axis: [] for axis in AXES}}, tmp_path) == {}
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis != "limits"])
def test_an_axis_that_failed_wholly_breaks_nothing(tmp_path: Path, axis: str) -> None:
    numbers = {"bytes", "raw_bytes", "of_raw_bytes", "duplicated", "parts", "tries", "killed"}
    results = example()
    for row in results[axis]:
        for name in [name for name, value in row.items() if name in numbers or isinstance(value, dict)]:
            del row[name]
        row |= {"verdict": "failed", "error": "gone", "says": "gone"}
    _, picture, _ = DRAWN[axis]
    drawn = picture(tmp_path / "picture.png", results)
    assert drawn == (axis in ("determinism", "crash_safety"))  # where a failure has a box of its own


def test_names_with_signs_of_formulas_are_drawn(tmp_path: Path) -> None:
    results = example()
    for row in results["cost"] + results["formats"]:
        row["model"] = row["model"] + "$x_$^\\frac{"
    for row in results["scale"] + results["determinism"] + results["crash_safety"]:
        row["framework"] = row["framework"] + "$x_$^\\frac{"
    assert len(draw(results, tmp_path)) == len(DRAWN)


def test_one_framework_alone_is_drawn(tmp_path: Path) -> None:
    results = example()
    for axis in AXES:
        results[axis] = [row for row in results[axis] if row.get("framework", "jax") == "jax"]
    assert len(draw(results, tmp_path)) == len(DRAWN)


def test_what_was_not_tested_looks_like_nothing_that_was() -> None:
    verdicts = [{"verdict": name, "first_step": 0} for name in ("identical", "differs", "not testable", "failed")]
    marks = [mark_of(verdict) for verdict in verdicts]
    assert len({sign for sign, _ in marks}) == len({color for _, color in marks}) == 4
