"""The table of ``holdfast top``: a view of a run as lines for a terminal, and as an object for scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.screen import visible
from holdfast.watch.view import Moment, View, WorkerView
from holdfast.words import count, size_text, time_text

NEWS = 6  # moments that are listed below the table
LOST = 4  # workers that are listed after they are lost
Memory = Callable[[str, Iterable[int]], int | None]

COLORS = {"training": "green", "lost": "red", "joining": "yellow", "starting": "yellow", "recovering": "yellow"}
COLORS |= {"stopped": "red", "finished": "green", "waiting": "cyan", "ended": "dim", "nothing": "dim"}
COLUMNS = (
    "worker",
    "host",
    ">pid",
    "state",
    "layers",
    ">step",
    ">ms",
    ">computing",
    ">waiting",
    ">sent",
    ">memory",
    "",
)


def to_json(view: View, moments: Iterable[Moment], memory: Memory) -> dict[str, Any]:
    """Return what ``holdfast top --once --json`` prints: the view, and the memory of each worker on this machine."""
    found = view.to_json()
    for worker in found["workers"]:
        worker["memory"] = memory(worker["name"], worker["pids"])
    found["moments"] = [vars(moment) for moment in moments]
    return found


def picture(view: View, moments: list[Moment], memory: Memory, *, rows: int = 40) -> RenderableType:
    """Return the table with a headline above and the news below. ``rows``: workers that fit."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name.strip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    for worker in view.workers[:rows]:
        table.add_row(*map(_cell, _row(worker, memory)))
    for worker in view.gone[-LOST:]:
        table.add_row(*map(_cell, _row(worker, memory)), style="dim")
    parts: list[RenderableType] = [_headline(view), _numbers(view), table]
    if len(view.workers) > rows:
        parts.append(Text(f"… and {count(len(view.workers) - rows, 'worker')} more", style="dim"))
    parts += [Text(visible(line), style="yellow" if not view.survival.workers else "") for line in view.survival.words]
    parts += [_news(moment) for moment in moments[-NEWS:]]
    return Group(*parts)


def _headline(view: View) -> Text:
    text = Text(f"● {view.phase}", style=f"bold {COLORS[view.phase]}")
    command = visible(" ".join(view.command))
    text.append(f"  {command}", style="default")
    if view.why:
        text.append(f"  ({visible(view.why)})", style="dim")
    return text


def _numbers(view: View) -> Text:
    parts = [f"step {view.step:,}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.5g}")
    if view.lr is not None:
        parts.append(f"lr {view.lr:.3g}")
    if view.grad_norm is not None:
        parts.append(f"gradient norm {view.grad_norm:.3g}")
    if view.rate:
        parts.append(f"{view.rate:.3g} steps/s" if view.rate >= 1 else f"{1 / view.rate:.3g} s a step")
    training = sum(worker.state == "training" for worker in view.workers)
    parts.append(f"{training} of {count(len(view.workers), 'worker')} train")
    parts.append(f"generation {view.generation}")
    parts.append(count(view.restarts, "restart"))
    if view.recovery_ms is not None:
        parts.append(f"{count(view.counts.get('recovery', 0), 'recovery')}, {view.recovery_ms:.0f} ms (median)")
    if view.saved:
        parts.append(f"checkpoint of step {view.saved[-1].step:,}")
    return Text(", ".join(parts))


def _row(worker: WorkerView, memory: Memory) -> list[str | Text]:
    layers = f"{worker.first}-{worker.stop - 1}" if worker.stop else ""
    held = memory(worker.name, worker.pids)
    return [
        worker.name,
        worker.host,
        ",".join(str(pid) for pid in worker.pids[:2]),
        Text(worker.state, style=COLORS[worker.state]),
        layers,
        "" if worker.step is None else f"{worker.step:,}",
        _ms(worker.seconds),
        _ms(worker.computing),
        _ms(worker.waiting),
        "" if worker.sent is None else size_text(worker.sent),
        "" if held is None else size_text(held),
        Text("slow", style="bold red") if worker.slow else Text(visible(worker.why), style="dim"),
    ]


def _cell(value: str | Text) -> Text:
    """Return a cell's text as it is: rich would take brackets in it for markup."""
    return Text(visible(value)) if isinstance(value, str) else value


def _news(moment: Moment) -> Text:
    return Text(f"{time_text(moment.t, short=True)}  {visible(moment.text)}", style="red" if moment.bad else "dim")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f}" if seconds >= 0.01 else f"{1000 * seconds:.2g}"
