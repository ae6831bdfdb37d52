"""The pictures: one for each axis that has rows, whatever failed, and none that would mislead."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from math import hypot
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from holdfast.study.advice.interval_advice import on_interval
from holdfast.study.plots import DRAWN, draw
from holdfast.study.plots.cost_plot import PARTS, end_of_axis
from holdfast.study.plots.interval_plot import draw_interval
from holdfast.study.plots.look import DPI, WIDTH, headed
from holdfast.study.plots.scale_plot import LOOK, LOOKS
from holdfast.study.plots.verdicts_plot import mark_of
from holdfast.study.rows import AXES
from holdfast.words import seconds_text, size_text
from tests.study.example import SIZES, example

Results = dict[str, Any]
Show = Callable[[str, Results], tuple[Any, list[Text]]]  # what is in a figure, its own types do not tell
NUMBERS = {"bytes", "raw_bytes", "of_raw_bytes", "duplicated", "parts", "tries", "killed"}


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Draws the picture of an axis; gives it back with the texts that are seen in it."""
    found: list[Figure] = []
    texts: list[Text] = []
    write = Text.draw

    def seen(text: Text, *args: Any) -> None:
        if text.get_visible() and text.get_text():
            texts.append(text)
        write(text, *args)

    def draw_only(figure: Figure, _: Path) -> None:
        found.append(figure)
        figure.canvas.draw()

    def shown(key: str, results: Results) -> tuple[Figure, list[Text]]:
        texts.clear()
        assert DRAWN[key][1](Path("nowhere"), results)
        return found[-1], list(dict.fromkeys(texts))

    monkeypatch.setattr(Text, "draw", seen)
    monkeypatch.setattr(Figure, "savefig", draw_only)
    return shown


def of_framework(name: str) -> Results:
    results = example(missing=None)
    for axis in AXES:
        results[axis] = [row for row in results[axis] if row.get("framework", name) == name]
    return results


def with_models(count: int) -> Results:
    results = example(missing=None)
    models = list(SIZES)[-count:]
    results["formats"] = [row for row in results["formats"] if row["model"] in models]
    return results


def fail(row: dict[str, Any]) -> None:
    for name in [name for name, value in row.items() if name in NUMBERS or isinstance(value, dict)]:
        del row[name]
    row |= {"verdict": "failed", "error": "gone", "says": "gone"}


def without_time(results: Results | None = None, every: int = 1) -> Results:
    """Times below the clock's, and memory that nobody could read."""
    results = results or example(missing=None)
    for axis in ("cost", "formats", "scale"):
        for row in results[axis][::every]:
            row |= {name: dict.fromkeys(value, 0.0) for name, value in row.items() if is_spread(value)}
            row |= {"peak_mb": None}
    return results


def is_spread(value: object) -> bool:
    return isinstance(value, dict) and "median" in value


def half_failed() -> Results:
    """A third without times, another without anything."""
    results = without_time(every=3)
    for axis in ("cost", "formats", "scale", "crash_safety"):
        for row in results[axis][1::3]:
            fail(row)
    return results


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
    results = example()
    for row in results[axis]:
        fail(row)
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
    assert len(draw(of_framework("jax"), tmp_path)) == len(DRAWN)


def test_what_was_not_tested_looks_like_nothing_that_was() -> None:
    verdicts = [{"verdict": name, "first_step": 0} for name in ("identical", "differs", "not testable", "failed")]
    marks = [mark_of(verdict) for verdict in verdicts]
    assert len({sign for sign, _ in marks}) == len({color for _, color in marks}) == 4


def shared(one: Bbox, other: Bbox) -> float:
    """How far two boxes reach into each other; below zero where they do not."""
    return float(min(min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)))


@pytest.mark.parametrize("key", DRAWN)
def test_no_text_covers_another_or_leaves_the_picture(show: Show, key: str) -> None:
    cases = [example(missing=None), of_framework("jax"), half_failed(), without_time()]
    for results in cases[: 2 if key == "interval" else None]:
        figure, texts = show(key, results)
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts if not text.get_rotation() % 90]
        for said, box in boxes:
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, f"{said} is cut"
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, f"{said} is cut"
        for (one, first), (other, second) in combinations(boxes, 2):
            assert shared(first, second) < 4, f"{one!r} and {other!r} cover each other"


def test_a_long_title_is_not_cut(show: Show) -> None:
    results = of_framework("pytorch")
    results["cost"] = [row for row in results["cost"] if row["format"] == "torch.save, renamed"]
    figure, texts = show("interval", results)
    title = next(text for text in texts if "(pytorch)" in text.get_text())
    assert title.get_window_extent().x1 < figure.bbox.width


def test_each_bar_ends_at_its_number_and_lost_time_has_its_own(show: Show) -> None:
    results = example(missing=None)
    (axes,) = show("cost", results)[0].axes
    entries = headed([row for row in results["cost"] if row["model"] == "resnet50"])
    limit = end_of_axis([row for _, row in entries if row and "error" not in row])
    for place, (_, row) in enumerate(entries):
        texts = [text for text in axes.texts if abs(text.get_position()[1] - place) < 0.5 and row is not None]
        if row is None or "error" in row:
            assert [text.get_text() for text in texts] == (["✗ failed"] if row else [])
            continue
        durable, lost = row["durable_s"]["median"], row["lost_s"]["median"]
        at_bar, at_right = sorted(texts, key=lambda text: text.get_window_extent().x0)
        assert at_bar.get_text().removeprefix("→ ") == seconds_text(durable)
        assert at_bar.get_text().startswith("→") == (durable > limit)
        assert 0 < at_bar.get_position()[0] - min(durable, limit) < 0.05 * limit
        assert at_bar.get_window_extent().x1 < axes.bbox.x1
        assert at_right.get_text() == seconds_text(lost)
        bars = [patch for patch in axes.patches if abs(patch.get_y() + patch.get_height() / 2 - place) < 0.5]
        assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(min(durable, limit))
        (line,) = [
            line for line in axes.lines if abs(line.get_ydata()[-1] - place) < 0.5 and line.get_marker() != "None"
        ]
        assert line.get_xdata()[-1] == pytest.approx(min(lost, limit))
        mark = axes.transData.transform((line.get_xdata()[-1], line.get_ydata()[-1]))
        assert at_bar.get_window_extent().y0 > mark[1], "the mark of lost time covers the bar's number"
    assert "seconds" in axes.get_xlabel()
    assert "◆" in axes.get_xlabel(), "bars and marks are different seconds"


def test_a_disk_slower_than_all_saves_is_in_the_picture(show: Show) -> None:
    results = example()
    for row in results["limits"]:
        row["seconds"] = {"median": 9.0, "low": 9.0, "high": 9.0}
    (axes,) = show("cost", results)[0].axes
    assert axes.get_xlim()[1] > 9.0


def test_marks_of_ranks_are_whole_and_none_hides_another(show: Show) -> None:
    results = example(missing=None)
    for row in results["scale"]:  # all the same, one round: nothing but their place tells them apart
        if "error" not in row:
            row["slowest_s"] = {"median": 0.1669, "low": 0.1669, "high": 0.1669}
    for axes in show("scale", results)[0].axes:
        lines = [line for line in axes.lines if line.get_transform() == axes.transData]
        points = [tuple(axes.transData.transform(pair)) for line in lines for pair in line.get_xydata()]
        radius = LOOK["markersize"] / 2 / 72 * DPI
        for x, y in points:
            assert axes.bbox.x0 + radius < x < axes.bbox.x1 - radius
            assert y < axes.bbox.y1 - radius
        assert len({(round(x), round(y)) for x, y in points}) == len(points)
        assert min(hypot(a - c, b - d) for (a, b), (c, d) in combinations(points, 2)) > radius


def test_bytes_beyond_one_copy_stand_beside_the_mark_of_their_line(show: Show) -> None:
    results = example(missing=None)
    figure, _ = show("scale", results)
    names = {handle.get_marker(): handle.get_label() for handle in figure.legends[0].legend_handles}
    for axes in figure.axes:
        framework = axes.get_title(loc="left")
        marks = {
            names[line.get_marker()]: line.get_ydata()[0]
            for line in axes.lines
            if line.get_transform() == axes.transAxes
        }
        texts = {text.get_position()[1]: text.get_text() for text in axes.texts if text.get_position()[0] > 1}
        said = {strategy: texts[height] for strategy, height in marks.items()}
        rows = [row for row in results["scale"] if (row["framework"], row["ranks"]) == (framework, 4)]
        good = [row for row in rows if "error" not in row]
        expected = {
            row["strategy"]: f"+{size_text(row['duplicated'])}" if row["duplicated"] else "none" for row in good
        }
        assert said == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_formats_of_any_number_of_models_are_told_apart(show: Show, count: int) -> None:
    results = with_models(count)
    good = [row for row in results["formats"] if "error" not in row]
    good[0]["save_s"] = {"median": 0.0, "low": 0.0, "high": 0.0}  # which has no place on a logarithmic axis
    good[-1]["of_raw_bytes"] = 1.52
    figure, texts = show("formats", results)
    assert "→ 152%" in [text.get_text() for text in texts]
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_marker() not in ("None", None)]
        points = [tuple(axes.transData.transform(pair)) for line in lines for pair in line.get_xydata()]
        assert len(points) == len(good)
        assert all(axes.bbox.contains(x, y) for x, y in points)
        assert min(abs(b - d) for (_, b), (_, d) in combinations(points, 2)) > 0.9 * 5 / 72 * DPI
        ticks = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
        assert len(ticks) >= 2


def test_a_format_that_failed_with_a_model_is_named_beside_its_line(show: Show) -> None:
    figure, texts = show("formats", example(missing=None))
    (note,) = [text for text in texts if text.get_text() == "✗ vgg16"]
    assert note.get_window_extent().x0 > figure.axes[1].bbox.x1, "it covers marks"


def test_the_dot_is_where_the_advice_is(show: Show) -> None:
    results = example()
    for row in results["cost"]:
        if "error" not in row:
            row["lost_s"] = {"median": 0.0005, "low": 0.0005, "high": 0.0005}
    figure, texts = show("interval", results)
    (given,) = [line for line in figure.axes[0].lines if line.get_markersize() == 9]
    assert given.get_xdata()[0] == 10.0
    (advice,) = on_interval(results)
    assert "every 10 s" in advice.sentence
    ticks = [text.get_text() for text in texts if text.get_text().endswith("%") and ":" not in text.get_text()]
    assert len(ticks) == len(set(ticks)) > 2


def test_a_save_that_costs_nothing_has_no_best_interval(tmp_path: Path) -> None:
    assert not draw_interval(tmp_path / "interval.png", without_time())


def test_every_case_at_every_save_point_has_its_box(show: Show) -> None:
    results = example(missing=None)
    figure, texts = show("determinism", results)
    signs = Counter(text.get_text() for axes in figure.axes for text in axes.texts)
    assert signs == Counter(mark_of(row)[0] for row in results["determinism"])
    assert any("step 0, mid-epoch, epoch's end" in text.get_text() for text in texts)
    for row in results["determinism"]:
        row["save_at"] = row["save_at"] and "mid-epoch"
    _, texts = show("determinism", results)
    assert any(text.get_text().endswith(" mid-epoch") for text in texts)


def test_print_without_colours_tells_as_much() -> None:
    def grey(color: str) -> float:
        return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))

    verdicts = [{"verdict": name, "first_step": 0} for name in ("identical", "differs", "not testable")]
    assert all(abs(grey(a) - grey(b)) > 0.07 for a, b in combinations([mark_of(each)[1] for each in verdicts], 2))
    assert len({hatch for _, hatch in PARTS.values()}) == len(PARTS)
    for key in ("marker", "linestyle"):
        assert len({look[key] for look in LOOKS}) == len(LOOKS)
