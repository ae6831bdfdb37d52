"""``holdfast ckpt``: look at checkpoints of any format, check, compare and convert them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from holdfast.checkpoint.pieces import Catalogue
    from holdfast.checkpoint.places import Place

app = typer.Typer(
    help="Look at checkpoints of any format, check, compare and convert them. Exit code 4: a bad checkpoint.",
    no_args_is_help=True,
)
Where = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint, or a run's folder: then its newest one. Also s3://…")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
All = Annotated[bool, typer.Option("--all", help="Show every row of long tables.")]
Format = Annotated[str | None, typer.Option(metavar="NAME", help="Take it for this format, instead of looking.")]
RulesFile = Annotated[
    Path | None, typer.Option("--rules", help="A YAML file that describes a layout which cannot be derived.")
]
Sections = Annotated[
    list[str] | None, typer.Option("--section", metavar="NAME", help="Only this part, such as model; may be repeated.")
]


def _open(path: Place, format: str | None = None, rules: Path | None = None) -> Catalogue:
    from holdfast.checkpoint.formats import open_checkpoint
    from holdfast.checkpoint.rules import Rules

    return open_checkpoint(path, format=format, rules=None if rules is None else Rules.from_yaml(rules))


def _place(text: str) -> Place:
    from holdfast.checkpoint.places import place_of

    return place_of(text)


def _shown(path: Place, catalogue: Catalogue) -> Place:
    """The checkpoint that was meant, as the path was given: of a run's folder, its newest one."""
    here, root = path.absolute(), catalogue.root.absolute()
    if not path.is_dir():
        return path
    return path / str(root.relative_to(here)) if root.is_relative_to(here) else catalogue.root


def _print_json(outcome: Mapping[str, Any]) -> None:
    print(json.dumps(outcome))


@app.command()
def ls(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A run's folder, or any other.")] = ".",
    everything: All = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints in a folder and below it, complete or not."""
    from holdfast.checkpoint.listing import find
    from holdfast.cli.ckpt_tables import show_list
    from holdfast.screen import Screen

    place = _place(path)
    found = find(place)
    show_list(Screen(aside=as_json, everything=everything), place, found)
    if as_json:
        _print_json({"path": str(place), "checkpoints": [one.to_json() for one in found]})


@app.command()
def inspect(
    path: Where,
    tensors: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Where each piece of these tensors lies, such as '*.bias'.")
    ] = None,
    rules: RulesFile = None,
    format: Format = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds: tensors, values, files and who wrote them. Reads no tensor."""
    from holdfast.checkpoint.inspection import matching, to_json
    from holdfast.cli.ckpt_tables import show_checkpoint
    from holdfast.screen import Screen

    place = _place(path)
    catalogue = _open(place, format, rules)
    where = _shown(place, catalogue)
    show_checkpoint(Screen(aside=as_json, everything=everything), catalogue, where, tensors)
    if as_json:
        _print_json(to_json(catalogue, where, matching(catalogue, tensors)))


@app.command()
def verify(
    path: Where,
    rules: RulesFile = None,
    format: Format = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Check every byte of a checkpoint, and name everything that is damaged. Exit code 4 if anything is."""
    from holdfast.checkpoint.progress_bar import bar
    from holdfast.checkpoint.verify import open_to_verify, work_of
    from holdfast.checkpoint.verify import verify as check
    from holdfast.cli.ckpt_tables import show_verdict
    from holdfast.screen import Screen

    place = _place(path)
    catalogue = open_to_verify(place, lambda: _open(place, format, rules))
    where = _shown(place, catalogue)
    begin = time.monotonic()
    with bar(f"checking {where}", work_of(catalogue)) as progress:
        verdict = check(catalogue, progress=progress)
    seconds = time.monotonic() - begin
    show_verdict(Screen(aside=as_json, everything=everything), where, verdict, seconds=seconds)
    if as_json:
        _print_json({"path": str(where), "format": catalogue.format, "seconds": round(seconds, 3), **verdict.to_json()})
    raise typer.Exit(0 if verdict.ok else 4)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Elements that differ by at most this are equal, under any dtype."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=REPLACEMENT", help="Change names of A before they are compared; may be repeated."),
    ] = None,
    section: Sections = None,
    rules_a: Annotated[Path | None, typer.Option(help="Rules for A.")] = None,
    rules_b: Annotated[Path | None, typer.Option(help="Rules for B.")] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints of any formats, tensor by tensor and value by value.

    Sections that only one of them has are named, but are no difference unless asked for with --section.
    Exit code 0: equal; 1: different; 4: a checkpoint cannot be read.
    """
    from holdfast.checkpoint.diff import Comparison, parse_rename
    from holdfast.checkpoint.progress_bar import bar
    from holdfast.cli.ckpt_tables import show_difference
    from holdfast.screen import Screen

    renames = [parse_rename(text) for text in rename or ()]
    one, other = _place(a), _place(b)
    left, right = _open(one, rules=rules_a), _open(other, rules=rules_b)
    comparison = Comparison(left, right, sections=section or (), renames=renames, tolerance=tolerance)
    with bar("comparing", comparison.bytes) as progress:
        difference = comparison.run(progress=progress)
    shown = _shown(one, left), _shown(other, right)
    show_difference(Screen(aside=as_json, everything=everything), *shown, difference)
    if as_json:
        _print_json({"a": str(shown[0]), "b": str(shown[1]), **difference.to_json()})
    raise typer.Exit(0 if difference.same else 1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="A new folder; for torch, a new file.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="holdfast, hf, dcp, torch or deepspeed-universal.")],
    rules: RulesFile = None,
    format: Format = None,
    section: Sections = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="fp32|bf16|fp16", help="For the model's floating-point tensors; else all keep theirs."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST, all of it, if it is a checkpoint.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in another format, a few megabytes at a time."""
    from holdfast.checkpoint import convert as work
    from holdfast.checkpoint.progress_bar import bar
    from holdfast.screen import Screen
    from holdfast.words import count, size_text

    screen = Screen(aside=as_json)
    start, end = _place(source), _place(destination)
    catalogue = _open(start, format, rules)
    where = _shown(start, catalogue)
    catalogue = work.select(catalogue, section) if section else catalogue
    catalogue = work.cast(catalogue, dtype) if dtype else catalogue
    lost = work.left_behind(catalogue, to)
    work.check_destination(end, where, overwrite=overwrite)
    for sentence in catalogue.details.get("left_out", ()):
        screen.say(f"not read: {sentence}", style="yellow")
    if lost:
        screen.say(f"left out, as {to} cannot hold it: {', '.join(lost)}", style="yellow")
    size = sum(entry.nbytes for entry in work.written(catalogue, to).values())
    begin = time.monotonic()
    with bar(f"writing {end}", size) as progress:
        work.convert(catalogue, end, to, overwrite=overwrite, progress=progress)
    seconds = time.monotonic() - begin
    number = len(work.written(catalogue, to))
    text = f"{end}: {count(number, 'tensor')}, {size_text(size)}"
    screen.say(f"{text}, from {catalogue.format} to {to} in {seconds:.1f} s", style="bold green")
    if as_json:
        outcome = {"source": str(where), "from": catalogue.format, "destination": str(end), "to": to}
        _print_json({**outcome, "tensors": number, "bytes": size, "left_out": lost, "seconds": round(seconds, 3)})
