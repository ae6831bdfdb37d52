"""``holdfast demo``: workers are killed at random, and the weights come out the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.watch import Beside


def demo(
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers on this machine. Default: 4, with --pipeline 5.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of each of the two runs. Default: 80, with --watch 200.")
    ] = None,
    kills: Annotated[
        int | None, typer.Option(min=0, help="Workers to kill in the second run. Default: 6, with --watch 0.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the training, and of whom to kill when.")] = 0,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Each worker has memory for some of the layers only.")
    ] = False,
    sync: Annotated[
        bool, typer.Option("--sync", help="Replicas of the second run talk only when their updates matter.")
    ] = False,
    watched: Annotated[
        bool, typer.Option("--watch", help="Kill workers of the second run yourself, on a live page.")
    ] = False,
    out: Annotated[Path, typer.Option(help="For picture, logs and events.")] = Path("holdfast-demo"),
    as_json: Annotated[bool, typer.Option("--json", help="The verdict as a JSON object on the last line.")] = False,
) -> None:
    """Watch workers die, and the training not care.

    Trains a byte-level GPT on the source of Python's own standard library, first undisturbed, then
    again while workers are killed at random, and compares the weights bit for bit. With --pipeline the
    second run is cut into pipelines, and the first is one worker that holds the whole model. With --sync
    replicas of the second run synchronise after some of the steps only (SelSync); what a killed one had done alone is
    lost with it, so the weights are other ones, but the same on all replicas. With --watch a link is printed, to a page
    with both runs, on which you kill workers of the second one yourself.
    """
    # Imported here, so that the other commands do not wait for rich and asyncio.
    from rich.console import Console

    from holdfast.demo.display import LiveShow, PlainShow, Show
    from holdfast.demo.two_runs import DISTURBED, UNDISTURBED, DemoSettings, run_demo

    number = workers or (5 if pipeline else 4)
    steps = steps or (200 if watched else 80)
    kills = (0 if watched else 6) if kills is None else kills
    settings = DemoSettings(
        workers=number, steps=steps, kills=kills, seed=seed, pipeline=pipeline, sync=sync, by_hand=watched, out=out
    )
    console = Console(highlight=False, stderr=as_json)
    on_terminal = console.is_terminal and not as_json
    show: Show = LiveShow(console) if on_terminal else PlainShow(sys.stderr if as_json else sys.stdout)
    given = f"workers: {number}, steps: {steps}, kills: {kills}"
    console.print(f"a byte-level GPT on Python's own source ({given})", soft_wrap=True)
    if pipeline:
        console.print("undisturbed: one worker; disturbed: no worker has the memory for all layers", soft_wrap=True)
    page = Beside(str(out / DISTURBED), str(out / UNDISTURBED), "--actions", tells=True) if watched else None
    if page is not None:
        console.print(page.line(), style="bold", soft_wrap=True, markup=False)
        console.print("the undisturbed run comes first; then the page is yours", soft_wrap=True)
    verdict = run_demo(settings, show)
    console.print(*verdict.lines(), sep="\n", soft_wrap=True, markup=False)
    console.print(verdict.headline(), style="bold green" if verdict.good else "bold red")
    if as_json:
        print(json.dumps(verdict.to_json()))
    raise typer.Exit(0 if verdict.good else 1)
