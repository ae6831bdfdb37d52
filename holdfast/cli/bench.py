"""``holdfast bench``: races against peers, in one run, as ratios."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from holdfast.bench.report import Bar

app = typer.Typer(
    help="Races against peers, interleaved in one run, as ratios. Peers are installed under .bench/.",
    no_args_is_help=True,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each contestant has its turn.")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _finish(name: str, outcome: tuple[dict[str, Any], dict[str, Bar]], columns: dict[str, str], as_json: bool) -> None:
    """Shows what came out; the exit code says whether all bars hold."""
    from holdfast.bench.report import publish

    results, bars = outcome
    raise typer.Exit(0 if publish(name, results, bars, columns=columns, as_json=as_json) else 1)


@app.command()
def overhead(
    workers: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Rounds = 40,
    burst: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 5,
    json: Json = False,
) -> None:
    """Failure-free throughput against plain DDP and torchft, on the same model and batch."""
    from holdfast.bench import overhead as bench
    from holdfast.bench.race import Shape

    columns = {"samples_per_s": "samples/s: median (range)", "of_ddp": "of DDP in the same round"}
    _finish("overhead", bench.race(shape=Shape(workers=workers), rounds=rounds, burst=burst, say=_say), columns, json)


@app.command()
def recovery(
    workers: Annotated[int, typer.Option(min=2)] = 3,
    rounds: Rounds = 5,
    json: Json = False,
) -> None:
    """Time to the next step after a SIGKILL: holdfast, torchft as it comes and tuned, torchrun."""
    from holdfast.bench import recovery as bench
    from holdfast.bench.race import Shape

    shape = Shape(workers=workers, micro_batches=2, micro_batch=2, width=128)
    columns = {
        "recovery_ms": "ms to the next step: median (range)",
        "of_holdfast": "times holdfast's",
        "beyond_redone_step_ms": "ms beyond the redone step",
    }
    _finish("recovery", bench.race(shape=shape, rounds=rounds, say=_say), columns, json)


@app.command()
def zero(
    megabytes: Annotated[int, typer.Option("--mb", min=1, help="The size of the state.")] = 512,
    rounds: Rounds = 5,
    json: Json = False,
) -> None:
    """Reading a ZeRO checkpoint into another layout: DeepSpeed's ds_to_universal and load, holdfast."""
    from holdfast.bench import zero as bench

    columns = {"seconds": "s: median (range)", "convert_s": "of which converting", "times_ours": "times holdfast's"}
    _finish("zero", bench.race(megabytes=megabytes, rounds=rounds, say=_say), columns, json)


@app.command()
def checkpoint(
    megabytes: Annotated[int, typer.Option("--mb", min=1, help="The size of the state.")] = 512,
    rounds: Rounds = 7,
    seed: Annotated[int, typer.Option(help="Of the order in which contestants take turns.")] = 0,
    json: Json = False,
) -> None:
    """Durable saves, cold loads and training time lost: raw disk, torch.save, safetensors, DCP, holdfast."""
    from holdfast.bench import checkpoint as bench

    bench.threads()
    columns = {
        "save_s": "durable save, s: median (range)",
        "of_raw": "times the raw disk",
        "load_s": "cold load, s",
        "stall_s": "async: call, s",
        "lost_s": "async: training time lost, s",
    }
    _finish("checkpoint", bench.race(megabytes=megabytes, rounds=rounds, seed=seed, say=_say), columns, json)


@app.command()
def planner(rounds: Rounds = 3, json: Json = False) -> None:
    """Planning time: all templates, a new plan after a failure at 1,000 nodes; drawn over layers and nodes."""
    from holdfast.bench import planner as bench

    _finish("planner", bench.race(rounds=rounds, say=_say), bench.COLUMNS, json)


@app.command()
def undo(rounds: Rounds = 15, json: Json = False) -> None:
    """Memory and time of eager updates with undo, of two-phase commit, and of copies every 1 and 10 steps."""
    from holdfast.bench import undo as bench

    _finish("undo", bench.race(rounds=rounds, say=_say), bench.COLUMNS, json)


@app.command()
def pipeline(
    rounds: Annotated[
        int, typer.Option(min=1, help="Turns of each contestant on two cores; the longer contests have fewer.")
    ] = 12,
    json: Json = False,
) -> None:
    """Pipelines: against torch.distributed.pipelining, DDP, the planner's estimate, and restarts with other grids."""
    from holdfast.bench import pipeline as bench

    _finish("pipeline", bench.race(rounds=rounds, say=_say), bench.COLUMNS, json)


@app.command()
def log(rounds: Rounds = 20, json: Json = False) -> None:
    """What a tensor log costs while nothing happens: speed, CPU time and bytes, in memory and on disk."""
    from holdfast.bench import log as bench

    _finish("log", bench.race(rounds=rounds, say=_say), bench.COLUMNS, json)


@app.command()
def replay(
    rounds: Rounds = 3,
    steps: Annotated[str, typer.Option(help="Steps after the checkpoint at which a worker is killed.")] = "5,10,20,50",
    json: Json = False,
) -> None:
    """Back from a loss that no replica makes good: parallel replay, one alone, everyone back; budgets. Drawn."""
    from holdfast.bench import replay as bench

    sizes = bench.Sizes(steps=bench.parse_steps(steps))
    _finish("replay", bench.race(rounds=rounds, say=_say, sizes=sizes), bench.COLUMNS, json)


@app.command()
def sync(
    quick: Annotated[bool, typer.Option("--quick", help="A few minutes, to see that it works.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs that are still missing.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Look for learning rates instead, without any limit.")] = False,
    json: Json = False,
) -> None:
    """When replicas talk, at 20 to 1000 Mbit: BSP, PowerSGD, Local SGD, FedAvg, SSP, DiLoCo, SelSync. Drawn."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the namespaces are taken down
    if tune:
        from holdfast.bench import sync_tune

        sync_tune.tune(say=_say)
        return
    from holdfast.bench import sync as bench

    name = "sync-quick" if quick else "sync"
    _finish(name, bench.race(quick=quick, resume=resume, say=_say), bench.COLUMNS, json)
