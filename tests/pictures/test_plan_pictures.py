"""Plans as tables and pictures: true to the timeline, within the terminal's width, short."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from holdfast.errors import UsageError
from holdfast.pictures.picture_file import check_path
from holdfast.pictures.plan_tables import headings, planned_for, show
from holdfast.pictures.step_chart import KINDS, PANELS, ROWS, chart, idle_shares, save, some
from holdfast.pictures.step_text import CUT, LOOK, STAGES, drawing, strip, windows
from holdfast.plan.outlook import look_ahead
from holdfast.plan.planner import Pipeline, PipelinePlan, make_plan
from holdfast.plan.profile import Link, Profile, uniform
from holdfast.plan.template import Templates, make_templates
from holdfast.plan.timeline import simulate

SLOW = Link(bandwidth=1e8, latency=1e-4)


def planned(profile: Profile, nodes: int, **options: int) -> tuple[Templates, PipelinePlan]:
    templates = make_templates(profile, nodes=nodes, **{"tolerate": 1, **options})
    names = [f"n{number}" for number in range(nodes)]
    plan = make_plan(templates, names, micro_batches=4 * nodes * templates.devices)
    assert isinstance(plan, PipelinePlan)
    return templates, plan


def pipeline(layers: int, nodes: int, micro_batches: int, profile: Profile | None = None) -> Pipeline:
    templates = make_templates(profile or uniform(layers), nodes=2 * nodes, tolerate=1, minimum=nodes)
    names = tuple(f"n{number}" for number in range(nodes))
    return Pipeline(template=templates.by_nodes[nodes], nodes=names, micro_batches=micro_batches)


def printed(templates: Templates, plan: PipelinePlan, *, width: int = 80, color: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, force_terminal=color, no_color=not color)
    show(console, templates, plan, look_ahead(templates, plan))
    return [line.rstrip() for line in out.getvalue().splitlines()]


# --- the picture tells the truth ------------------------------------------------------------------


@pytest.mark.parametrize("profile", [uniform(8), replace(uniform(8), between=SLOW)], ids=["fast", "slow links"])
def test_bars_are_the_timeline_and_bubbles_are_the_rest(profile: Profile) -> None:
    made = pipeline(8, 4, 9, profile)
    one = chart(made)
    spans = simulate([stage.times for stage in made.template.stages], 9)
    for stage, row in enumerate(one.bars):
        own = [span for span in spans if span.stage == stage]
        for kind in ("forward", "backward"):
            assert row[kind] == [(span.start, span.computed) for span in own if span.kind == kind]
        assert sum(b - a for a, b in row["send"]) == pytest.approx(sum(span.end - span.computed for span in own))
        every = sorted(bar for bars in row.values() for bar in bars)
        assert every[0][0] == 0.0
        assert every[-1][1] == pytest.approx(one.end)
        edges = np.array(every)
        assert np.allclose(edges[1:, 0], edges[:-1, 1]), "no gap and no overlap"
    assert one.end == pytest.approx(made.seconds, rel=0.02)


@pytest.mark.parametrize("micro_batches", [1, 3, 20])
def test_the_idle_share_is_that_of_the_picture(micro_batches: int) -> None:
    made = pipeline(8, 4, micro_batches, replace(uniform(8), between=SLOW))
    one = chart(made)
    drawn = [sum(b - a for a, b in row["bubble"]) / one.end for row in one.bars]
    assert idle_shares(made) == pytest.approx(drawn, abs=0.02)
    assert max(drawn) > 0.05


def test_fewer_micro_batches_leave_larger_bubbles() -> None:
    few, many = (idle_shares(pipeline(8, 4, number)) for number in (4, 40))
    assert all(a > b + 0.1 for a, b in zip(few, many, strict=True))


def test_each_character_is_what_the_stage_does_then() -> None:
    """Layers that take 1 s forward and 2 s back, and a character per second."""
    free = Link(bandwidth=1e30)
    plain = replace(uniform(2, forward=1.0, backward=2.0), between=free, inside=free)
    one = chart(pipeline(2, 2, 3, plain))
    assert one.end == pytest.approx(12.0)
    rows = ["".join(LOOK[kind][0] for kind in strip(row, (0.0, 12.0, 12))) for row in one.bars]
    assert rows == ["░░··██░██·██", "·░██░██░██··"]


def test_sends_and_tails_are_seen_where_they_take_long() -> None:
    slow = replace(uniform(4), between=Link(bandwidth=1e8))
    look = {name: character for name, (character, _) in LOOK.items()}
    for profile, seen in ((slow, True), (uniform(4), False)):
        text = "".join(line.plain for line in drawing(chart(pipeline(4, 2, 4, profile)), 80))
        assert (look["send"] in text) is seen
        assert ("not drawn: until" in text) is seen, "a long sum of gradients is not drawn to its end"
    assert len(set(look.values())) == len(KINDS), "each kind is told apart without colour"


@pytest.mark.parametrize(("layers", "micro_batches"), [(4, 4), (4, 64), (40, 160)])
def test_a_drawing_fits_and_shows_where_the_bubbles_are(layers: int, micro_batches: int) -> None:
    one = chart(pipeline(layers, layers, micro_batches))
    lines = [line.plain for line in drawing(one, 80)]
    stages = lines[: min(layers, STAGES)]
    assert {len(line) for line in stages} == {80}
    assert all(line.endswith("%") for line in stages)
    first, last = stages[0], stages[-1]
    assert LOOK["bubble"][0] in first.split(CUT)[0], "the first stage waits for its first backward"
    assert LOOK["backward"][0] in first.split(CUT)[0], "and the begin is drawn until then"
    assert LOOK["bubble"][0] in last.split(CUT)[-1], "the last stage is done first"


def test_a_long_step_is_drawn_from_both_ends() -> None:
    one = chart(pipeline(4, 4, 200))
    (begin, until, _), (again, end, _) = windows(one, 60)
    assert begin == 0.0
    assert until < again
    assert end == pytest.approx(one.end)
    (whole,) = windows(chart(pipeline(4, 4, 8)), 60)
    assert whole[:2] == (0.0, pytest.approx(chart(pipeline(4, 4, 8)).end))


# --- all of it, on a terminal ---------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("color", [False, True])
def test_everything_is_said_within_the_width(width: int, color: bool) -> None:
    templates, plan = planned(uniform(24), 11, minimum=2, tolerate=2)
    lines = printed(templates, plan, width=width, color=color)
    text = "\n".join(lines)
    if not color:
        assert max(map(len, lines)) <= width
    for said in (
        "24 equal layers on 11 nodes",
        "2 to 7 nodes",
        f"{44 / plan.seconds:.4g} samples/s",
        "1 node lost",
        "2 nodes lost at once",
        "training stops",
        "one node joins",
        "forward",
    ):
        assert said in text


def test_a_thousand_nodes_take_no_more_room_than_a_few() -> None:
    templates, plan = planned(uniform(16), 1000, minimum=2)
    lines = printed(templates, plan)
    assert len(lines) < 90
    assert max(map(len, lines)) <= 80
    assert "more templates" in " ".join(lines)


def test_many_outcomes_are_cut_short() -> None:
    """No two layers have as many bytes, so hardly two losses move as many."""
    plain = uniform(20)
    sizes = [2**20 + number**4 for number in range(20)]
    layers = tuple(replace(layer, weight_bytes=size) for layer, size in zip(plain.layers, sizes, strict=True))
    templates, plan = planned(replace(plain, layers=layers), 17, tolerate=2, minimum=5)
    lines = printed(templates, plan)
    assert len(lines) < 90
    assert sum("more outcomes" in line for line in lines) == 2


def test_lost_layers_are_named() -> None:
    """One pipeline and no tolerance: whoever is lost takes layers along."""
    templates, plan = planned(uniform(6), 3, tolerate=0, minimum=2)
    text = "\n".join(printed(templates, plan))
    assert "are lost" in text
    assert "no loss is tolerated" in text


# --- files ----------------------------------------------------------------------------------------


def test_pictures_are_written_and_the_same_each_time(tmp_path: Path) -> None:
    templates, plan = planned(uniform(12), 7, minimum=2)
    panels, title = headings(plan), planned_for(templates, plan)
    assert len(panels) == 2
    for name in ("a.png", "a.svg", "b.svg"):
        save(tmp_path / name, title=title, panels=panels)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    drawing = (tmp_path / "a.svg").read_text()
    assert ET.fromstring(drawing).tag.endswith("svg")
    for said in (title, panels[0][0], "bubble", "seconds of one step"):
        assert said in drawing


def test_a_picture_of_very_many_bars_stays_small(tmp_path: Path) -> None:
    save(tmp_path / "big.svg", title="big", panels=[("a pipeline", pipeline(30, 30, 90))])
    text = (tmp_path / "big.svg").read_text()
    assert len(text) < 500_000
    assert f"{ROWS} of 30 stages drawn" in text


def test_of_many_kinds_of_pipelines_only_some_are_drawn(tmp_path: Path) -> None:
    save(tmp_path / "many.svg", title="many", panels=[("one of its kind", pipeline(2, 2, 2))] * (PANELS + 2))
    assert (tmp_path / "many.svg").read_text().count("one of its kind") == PANELS


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "missing/plan.png"])
def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="picture"):
        check_path(tmp_path / name)


def test_some_keeps_both_ends() -> None:
    for count in range(1, 60):
        chosen = some(count, 12)
        assert chosen[0] == 0
        assert chosen[-1] == count - 1
        assert len(chosen) == len(set(chosen)) == min(count, 12)
