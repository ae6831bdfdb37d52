"""``holdfast top``: the workers of a run in a terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import UsageError

SECONDS = 0.5  # between two pictures: who is read by people need not be quicker


def top(
    log_dir: Annotated[Path, typer.Argument(metavar="[LOGDIR]", help="The --log-dir of the run.")] = Path(
        "holdfast-logs"
    ),
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False,
    journal: Annotated[
        Path | None, typer.Option(help="The run's metrics.jsonl. Default: where the run has said that it is.")
    ] = None,
) -> None:
    """Show a run's workers: who trains, who is slow, and what could be lost.

    It reads the files in the log directory and nothing else, so it cannot disturb the run. It ends with the run, or by
    Ctrl-C. ms: milliseconds of a step, computing and waiting for others; sent: bytes in a step.
    """
    # Imported here, so that the other commands do not wait for rich.
    from rich.console import Console
    from rich.live import Live

    from holdfast.watch.local_facts import memory_of
    from holdfast.watch.reader import Reader
    from holdfast.watch.table import picture, to_json

    if as_json and not once:
        raise UsageError("--json shows one moment", hint="--once --json")
    reader = Reader(log_dir, journal=journal)
    fold = reader.read_all()
    if as_json:
        print(json.dumps(to_json(fold.view(), fold.moments, memory_of), allow_nan=False))
        return
    console = Console(highlight=False)
    rows = 10_000 if once or not console.is_terminal else max(5, console.height - 20)
    if once or not console.is_terminal:
        console.print(picture(fold.view(), fold.moments, memory_of, rows=rows))
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        try:
            while True:
                view = fold.view()
                live.update(picture(view, fold.moments, memory_of, rows=rows), refresh=True)
                if view.phase in ("finished", "stopped") and not view.workers:
                    return
                time.sleep(SECONDS)
                fold = reader.read_all()
        except KeyboardInterrupt:
            return
