"""``holdfast simulate``: a failure trace over training systems."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.plan.profile import Profile
    from holdfast.simulate.outcome import Setting, SystemOutcome
    from holdfast.simulate.prepare import Prepared
    from holdfast.simulate.recovery_time import Recovery
    from holdfast.simulate.trace import Trace

BINS = 100  # stretches of time in the JSON
MADE_UP = "uniform:"  # prefix of --model for a made-up model
LONG, LONG_PLANNED = 5_000_000, 30_000  # changes times nodes that take about five seconds, by tables and with plans


def simulate(
    trace: Annotated[
        str,
        typer.Option(help="A file, or synthetic:nodes=30,mtbf=10d,joins=30m,burst=4,burst_every=12h,hours=24,seed=0."),
    ],
    model: Annotated[str, typer.Option(help="A model of the tables, a profile's path, or uniform:96.")],
    systems: Annotated[
        str, typer.Option(help="Systems to simulate, with commas between.")
    ] = "holdfast,oobleck,recycle,varuna,bamboo,restart,ideal",
    tables: Annotated[Path | None, typer.Option(help="Measured throughput and times, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw throughput over time into this .png or .svg.")] = None,
    recovery_ms: Annotated[
        float | None, typer.Option(min=0, help="Holdfast's, beyond the redone step. Default: measured here.")
    ] = None,
    gbit: Annotated[float | None, typer.Option(help="A node's link, Gbit/s. Default: 10, or the profile's.")] = None,
    parameters: Annotated[
        float | None, typer.Option(min=1, help="Of a model in tables, if it is not one of Oobleck's.")
    ] = None,
    tolerate: Annotated[
        int | None, typer.Option(min=0, help="With a profile: as in holdfast plan. Default: 1.")
    ] = None,
    devices_per_node: Annotated[int | None, typer.Option(min=1, help="With a profile. Default: 1.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="With a profile: of a step. Default: 4 per device.")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="With a profile: GB of one device.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Simulate training systems under a failure trace: throughput, and GPU-hours used, idle and lost.

    With --tables their throughput is what somebody measured; without, what our cost model says of your profile.
    """
    # Imported here, so that the other commands do not wait for numpy and rich.
    from holdfast.pictures.picture_file import check_path
    from holdfast.screen import make_console
    from holdfast.simulate.measured_tables import Tables, read_tables
    from holdfast.simulate.outcome import check_enough, check_systems
    from holdfast.simulate.prepare import by_planner, by_tables, the_trace

    names = check_systems(systems)
    if plot is not None:
        check_path(plot)
    planned = {"tolerate": tolerate, "devices": devices_per_node, "micro_batches": micro_batches}
    if tables is not None:
        refuse({**planned, "memory": memory}, "is for a profile: tables have what was measured")
    else:
        refuse({"parameters": parameters}, "is for tables: a profile knows its own size")
    followed = the_trace(trace)
    measured = read_tables(tables) if tables is not None else the_profile(model, memory)
    recovery = the_recovery(recovery_ms) if "holdfast" in names else None
    warn_if_long(followed, planned=tables is None)
    if isinstance(measured, Tables):
        prepared = by_tables(followed, measured, model, recovery=recovery, gbit=gbit, parameters=parameters)
    else:
        with make_console(aside=True).status("a plan for each number of nodes ..."):
            prepared = by_planner(followed, measured, recovery=recovery, gbit=gbit, **planned)
    check_enough(prepared.setting)
    report(prepared, names, plot=plot, as_json=as_json)


def report(prepared: Prepared, names: Sequence[str], *, plot: Path | None, as_json: bool) -> None:
    """Simulate the systems, and show, draw and print the outcomes."""
    from holdfast.pictures.outcome_table import show
    from holdfast.pictures.plan_tables import WIDE
    from holdfast.pictures.trace_plot import plot as draw
    from holdfast.screen import make_console
    from holdfast.simulate.outcome import judge

    setting = prepared.setting
    found = {}
    for name in dict.fromkeys([*names, "ideal"]):
        with make_console(aside=True).status(f"{name} along {setting.trace.name} ..."):
            found[name] = judge(name, setting)
    outcomes, ideal = [found[name] for name in names], found["ideal"]
    best = ideal.samples_per_s
    sources = {name: text for name, text in prepared.sources.items() if name in names or not name}
    console = make_console(aside=as_json, pipe=WIDE)
    show(console, setting.trace, setting.facts.model, outcomes, best=best)
    for line in [*setting.trace.notes, *in_words(sources)]:
        console.print(f"· {line}", markup=False, soft_wrap=True)
    if plot is not None:
        draw(plot, setting.trace, setting.facts.model, outcomes, ideal)
        console.print(f"plot: {plot}", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(to_json(setting, outcomes, best, sources)))


def warn_if_long(trace: Trace, *, planned: bool) -> None:
    """Print a warning if the simulation will take more than some seconds; plans take longer than tables."""
    changes, most = len(trace.changes), max(trace.counts)
    if changes * most > (LONG_PLANNED if planned else LONG):
        each = ", each with a plan" if planned else ""
        print(f"{changes:,} changes among up to {most:,} nodes{each}: this takes a while", file=sys.stderr, flush=True)


def the_profile(model: str, memory: float | None) -> Profile:
    """Return the profile in a file, or a made-up one, for devices with so many GB. Raises UsageError.

    >>> len(the_profile("uniform:96", None).layers)
    96
    """
    from holdfast.cli.plan import the_model, with_memory

    if not model.startswith(MADE_UP):
        if not Path(model).exists():
            hint = "give the path of one, uniform:96 for a made-up model, or --tables with the model's name in them"
            raise UsageError(f"there is no profile {model!r}", hint=hint)
        return with_memory(the_model(Path(model), None, False), memory)
    count = model.removeprefix(MADE_UP)
    if not count.isdecimal():
        raise UsageError(f"{model!r} names no made-up model", hint="uniform:96 has 96 equal layers")
    return with_memory(the_model(None, int(count), True), memory)


def the_recovery(milliseconds: float | None) -> Recovery:
    """Return the recovery time as given, or as measured on this machine."""
    from holdfast.simulate.recovery_time import given, measured

    if milliseconds is not None:
        return given(milliseconds)
    return measured(lambda text: print(text, file=sys.stderr, flush=True))


def in_words(sources: dict[str, str]) -> list[str]:
    """Return a line for each sentence about sources, with the systems that it is about.

    >>> in_words({"": "for all", "a": "measured", "b": "assumed", "c": "measured"})
    ['for all', 'a, c: measured', 'b: assumed']
    """
    names: dict[str, list[str]] = {}
    for name, text in sources.items():
        names.setdefault(text, []).append(name)
    return [f"{', '.join(of)}: {text}" if any(of) else text for text, of in names.items()]


def refuse(options: dict[str, Any], why: str) -> None:
    """Raise UsageError if one of the options is given: it would be ignored."""
    for name, value in options.items():
        if value is not None:
            option = "devices-per-node" if name == "devices" else name.replace("_", "-")
            raise UsageError(f"--{option} {why}")


def to_json(
    setting: Setting, outcomes: Sequence[SystemOutcome], best: float, sources: dict[str, str]
) -> dict[str, Any]:
    """Return the object that ``--json`` prints. A system without enough memory has null as its throughput."""
    trace = setting.trace
    return {
        "trace": {
            "name": trace.name,
            "seconds": trace.seconds,
            "nodes": len(trace.nodes),
            "fewest_nodes": min(trace.counts),
            "most_nodes": max(trace.counts),
            "losses": trace.losses,
            "gpu_hours": setting.devices * trace.node_hours,
            "notes": list(trace.notes),
        },
        "model": setting.facts.model,
        "ideal_samples_per_s": best,
        "over_time_seconds": trace.seconds / BINS,
        "systems": {
            outcome.system: {**outcome.to_json(best, BINS), "source": sources[outcome.system]} for outcome in outcomes
        },
    }
