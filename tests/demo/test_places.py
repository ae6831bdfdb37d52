"""Who holds which layers, heard from events: when it is known, and whom nobody may kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console

from holdfast.demo.display import places_table
from holdfast.demo.killer import may_kill
from holdfast.demo.loss_picture import plot_losses
from holdfast.demo.story import Story

Stages = list[tuple[str, int, int]]  # worker, its first layer, and the one after its last


def enter(story: Story, number: int, pipelines: list[Stages], waiting: tuple[str, ...] = (), received: int = 0) -> str:
    """A generation, as its workers tell of it; returns what the story makes of it."""
    workers = [worker for stages in pipelines for worker, _, _ in stages]
    story.hear({"event": "generation", "t": 0.0, "number": number, "workers": sorted([*workers, *waiting])})
    events: list[dict[str, Any]] = []
    for pipeline, stages in enumerate(pipelines):
        for stage, (worker, first, stop) in enumerate(stages):
            place = {"pipeline": pipeline, "stage": stage, "first": first, "stop": stop}
            events.append({"event": "layout", "worker": worker, "generation": number, **place})
    events += [{"event": "layout", "worker": worker, "generation": number} for worker in waiting]
    for worker in (*workers, *waiting):
        assert not may_kill(story)  # not before all are in
        events.append({"event": "entered", "worker": worker, "generation": number, "received": received})
    told = [sentence for event in events if (sentence := story.hear(event)) is not None]
    return " / ".join(told)


TWO: list[Stages] = [[("0.0", 0, 3), ("0.1", 3, 6)], [("0.2", 0, 2), ("0.3", 2, 4), ("0.4", 4, 6)]]
ONE: list[Stages] = [[("0.0", 0, 3), ("0.1", 3, 6)]]
WHOLE: list[Stages] = [[("0.0", 0, 6)], [("0.1", 0, 6)]]


def test_pipelines_are_told_once_all_workers_are_in() -> None:
    story = Story(steps=9)
    told = enter(story, 1, TWO, received=1000)
    assert told == "2 pipelines: 0.0 [0-2] → 0.1 [3-5], 0.2 [0-1] → 0.3 [2-3] → 0.4 [4-5]; 5 kB sent"
    assert [len(pipeline) for pipeline in story.arrangements[0].pipelines] == [2, 3]


def test_where_everybody_holds_everything_there_is_nothing_to_tell() -> None:
    story = Story(steps=9)
    assert enter(story, 1, WHOLE) == ""
    assert may_kill(story)


def test_nobody_is_killed_who_holds_the_last_copy() -> None:
    story = Story(steps=9)
    enter(story, 1, TWO)
    assert may_kill(story)
    assert enter(story, 2, ONE, waiting=("0.5",)).endswith("; 0.5 left over")
    assert len(story.members) == 3
    assert not may_kill(story)
    enter(story, 3, TWO)
    assert may_kill(story)


def test_events_of_another_generation_do_not_count() -> None:
    story = Story(steps=9)
    story.hear({"event": "generation", "t": 0.0, "number": 4, "workers": ["0.0"]})
    place = {"pipeline": 0, "stage": 0, "first": 0, "stop": 6}
    for generation, known in ((3, 0), (4, 1)):
        story.hear({"event": "layout", "worker": "0.0", "generation": generation, **place})
        story.hear({"event": "entered", "worker": "0.0", "generation": generation, "received": 0})
        assert len(story.arrangements) == known


def test_the_table_shows_each_worker_s_layers() -> None:
    story = Story(steps=9)
    enter(story, 1, TWO, waiting=("0.5",), received=2_000_000)
    story.killed("0.3", 1.0)
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(places_table(story))
    rows = [line.split() for line in capture.get().splitlines()]
    assert ["0", "0", "●", "0.0", "■■■···", "2", "MB"] in rows
    assert ["1", "✗", "0.3", "··■■··", "2", "MB"] in rows
    assert rows[-1][:2] == ["●", "0.5"]


def test_the_picture_gets_a_part_for_the_places(tmp_path: Path) -> None:
    sizes: list[int] = []
    for pipelines in (WHOLE, TWO):
        story = Story(steps=2, losses={0: 2.0, 1: 1.0})
        enter(story, 1, pipelines)
        path = tmp_path / f"{len(sizes)}.png"
        plot_losses(path, undisturbed=story, disturbed=story, title="")
        sizes.append(int.from_bytes(path.read_bytes()[20:24]))  # a PNG's height
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("verdict", ["weights identical, bit for bit", "all replicas end with the same weights"])
def test_the_title_fits_into_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    story = Story(steps=2, losses={0: 2.0, 1: 1.0})
    plot_losses(tmp_path / "loss.png", undisturbed=story, disturbed=story, title=f"12 workers killed: {verdict}")
    monkeypatch.undo()
    (figure,) = drawn
    title = figure.axes[0]._left_title  # type: ignore[attr-defined]
    assert title.get_window_extent().x1 <= figure.bbox.x1
    plt.close(figure)
