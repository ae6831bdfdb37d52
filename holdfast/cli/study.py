"""``holdfast study``: checkpoint-restart on this machine."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

FRAMEWORKS = "pytorch,tensorflow,jax,chainer,holdfast"


def study(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, models and kills: within five minutes.")
    ] = False,
    frameworks: Annotated[str, typer.Option(help="Frameworks to measure, with commas between.")] = FRAMEWORKS,
    model: Annotated[
        str | None,
        typer.Option(help="The model to advise on: lenet, gpt, resnet50, vgg16, or the path of your own checkpoint."),
    ] = None,
    mtbf: Annotated[str, typer.Option(help="The time between failures, as in 90m, 6h or 2d.")] = "6h",
    seed: Annotated[int, typer.Option(min=0, help="Of the order of turns, and of the moments of kills.")] = 0,
    out: Annotated[
        Path, typer.Option(help="For the report. Checkpoints are written there too: choose the disk by it.")
    ] = Path("holdfast-study"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Measure what checkpoints cost here, over frameworks and formats, and advise what to do about it.

    Each framework gets a venv of its own under .study/ (once; gigabytes in all). Measured are cost, formats and sizes,
    scale, determinism and crash safety; report.html, report.md, report.json and pictures are written to --out.
    """
    # Imported here, so that the other commands do not wait for numpy and matplotlib.
    from holdfast.study import run_study as tool
    from holdfast.study.process import end_all
    from holdfast.study.report import summary, write
    from holdfast.words import parse_duration

    names = tuple(dict.fromkeys(name.strip() for name in frameworks.split(",") if name.strip()))
    settings = tool.StudySettings(
        frameworks=names, quick=quick, model=model, mtbf=parse_duration(mtbf, "--mtbf"), seed=seed, out=out
    )

    def interrupt(*_: object) -> None:
        end_all()  # else threads would go on with their axis
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    with progress() as say:
        results = tool.study(settings, say)
        say("drawing")
        write(results, out)
    summary(results, as_json=as_json)
    print(f"the whole report: {out / 'report.html'}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(results))


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show progress on stderr: on a terminal one line that changes, else a line for each message."""
    from holdfast.screen import make_console

    console, begin = make_console(aside=True), time.monotonic()

    def line(text: str) -> str:
        minutes, seconds = divmod(int(time.monotonic() - begin), 60)
        return f"{minutes:3}:{seconds:02}  {text}"

    if not console.is_terminal:
        yield lambda text: console.print(line(text), markup=False)
        return
    with console.status(line("begin")) as status:
        yield lambda text: status.update(line(text).replace("[", "\\["))
