"""``holdfast data``: what a run has read of its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="What a run has read of its data.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep ``verify`` a command of its own: a group of one command would lose its name."""


@app.command()
def verify(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG...", help="A run's folder of checkpoints, its --log-dir, or ledgers themselves."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Prove from the ledger of a run with a stream that no sample was lost or used twice.

    Exit code 0: proven; 1: the first violation is named; 4: there is no ledger.
    """
    from holdfast.data.audit import Violation, audit, read_ledgers
    from holdfast.screen import Screen
    from holdfast.words import count

    screen = Screen(aside=as_json)
    lines = read_ledgers(logs)
    try:
        found = audit(lines)
    except Violation as e:
        screen.say(str(e), style="bold red")
        if as_json:
            print(json.dumps({"ok": False, "violation": str(e)}))
        raise typer.Exit(1) from None
    shards = f"{found.shards} of {count(found.of_shards, 'shard')} in {count(found.lanes, 'lane')}"
    screen.say(f"{count(found.steps, 'step')}, {count(found.samples, 'sample')} from {shards}")
    screen.say(f"epochs that every lane has completed: {found.epochs}")
    resumes = f"{count(found.starts, 'start')} ({count(found.again, 'step')} trained again)"
    screen.say(f"{count(found.workers, 'worker')}, {found.lost} of them lost or gone; {resumes}")
    if found.torn:
        screen.say(f"{count(found.torn, 'line')} incomplete: a writer was killed, and its record is there again")
    screen.say("every sample was used exactly once in its epoch, none was lost", style="bold green")
    if as_json:
        print(json.dumps({"ok": True, **found.to_json()}))
