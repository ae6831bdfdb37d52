"""Output of the demo: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from holdfast.demo.story import Death, Story
from holdfast.words import size_text

REFRESH_SECONDS = 0.15  # between two drawings, which take time from the workers on the same cores
PLAIN_LINES = 8  # lines about ordinary progress in a run: more would hide the kills


class Show(Protocol):
    """A display: ``begin`` a run, ``tell`` what happens, ``tick`` often, ``close`` before other output."""

    def begin(self, name: str, story: Story) -> None: ...

    def tell(self, sentence: str) -> None: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


class PlainShow:
    """Plain lines, one for each thing that happens."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name = ""
        self._story = Story(steps=0)
        self._told = 0

    def begin(self, name: str, story: Story) -> None:
        self._name, self._story, self._told = name, story, 0

    def tell(self, sentence: str) -> None:
        print(f"{self._name}: {sentence}" if self._name else sentence, file=self._stream, flush=True)

    def tick(self) -> None:
        story = self._story
        every = max(1, story.steps // PLAIN_LINES)
        if story.step // every > self._told // every or story.step == story.steps > self._told:
            self._told = story.step
            talk = f", {story.syncs.text(story.step)}" if story.syncs else ""
            self.tell(f"{bar(story.step, story.steps)} step {story.step}/{story.steps}, loss {story.loss:.4f}{talk}")

    def close(self) -> None:
        self._name = ""


def bar(done: int, total: int, width: int = 20) -> str:
    """Return a progress bar of characters.

    >>> bar(1, 4, width=8)
    '[##......]'
    """
    filled = width * done // total
    return "[" + "#" * filled + "." * (width - filled) + "]"


class LiveShow:
    """A display for terminals, redrawn in place: bars of both runs, the workers, and a table of the killed."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._bars = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}", style="cyan"),
            TextColumn("{task.fields[seconds]:5.1f} s", style="dim"),
        )
        self._story = Story(steps=0)
        self._sentence = ""
        self._began = 0.0
        self._drawn = 0.0

    def begin(self, name: str, story: Story) -> None:
        self._story, self._began = story, time.monotonic()
        self._task = self._bars.add_task(name, total=story.steps, loss="-", seconds=0.0)
        self._live.start()
        self.tell("workers are being started")

    def tell(self, sentence: str) -> None:
        self._sentence = sentence
        self._draw()

    def tick(self) -> None:
        if time.monotonic() - self._drawn > REFRESH_SECONDS:
            self._draw()

    def close(self) -> None:
        self._sentence = ""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        story = self._story
        loss = "-" if story.loss is None else f"{story.loss:.4f}"
        self._bars.update(self._task, completed=story.step, loss=loss, seconds=self._drawn - self._began)
        parts: list[RenderableType] = [self._bars]
        if story.members and self._sentence:
            cut = story.arrangements and story.arrangements[-1].is_cut
            parts.append(places_table(story) if cut else _workers(story))
        if story.syncs:
            parts.append(Text(f"replicas     {story.syncs.text(story.step)}", style="cyan"))
        if self._sentence:
            parts.append(Text(self._sentence, style="bold"))
        if story.deaths:
            parts.append(deaths_table(story.deaths))
        self._live.update(Group(*parts), refresh=True)


def _workers(story: Story) -> Text:
    alive = Text("workers     ")
    dying = {death.worker for death in story.deaths}
    for worker in story.members:
        alive.append(f" ✗ {worker}" if worker in dying else f" ● {worker}", "red" if worker in dying else "green")
    return alive


def places_table(story: Story) -> Table:
    """Return a table of each worker's layers, and of the bytes that it received for them."""
    now = story.arrangements[-1]
    dying = {death.worker for death in story.deaths}
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("pipeline", "stage", "worker", "layers", "received"):
        table.add_column(heading, justify="left" if heading in ("worker", "layers") else "right")
    for pipeline in now.pipelines:
        for place in pipeline:
            color = "red" if place.worker in dying else "green"
            name = Text(f"{'✗' if place.worker in dying else '●'} {place.worker}", style=color)
            strip = "".join("■" if layer in place.layers else "·" for layer in range(now.layers))
            sent = now.received.get(place.worker, 0)
            number = str(place.pipeline) if place.stage == 0 else ""
            table.add_row(number, str(place.stage), name, Text(strip, style=color), size_text(sent) if sent else "")
    for worker in now.waiting:
        table.add_row("", "", Text(f"● {worker}"), "none yet", "")
    return table


def deaths_table(deaths: list[Death]) -> Table:
    """Return a table of the killed workers: when, and how long the others took to go on."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("killed", "in step", "noticed after", "next step committed after"):
        table.add_column(heading, justify="right")
    for death in deaths:
        table.add_row(
            Text(f"✗ {death.worker}", style="red"), str(death.step), _ms(death.noticed_ms), _ms(death.recovered_ms)
        )
    return table


def _ms(value: float | None) -> str:
    return "…" if value is None else f"{value:.0f} ms"
