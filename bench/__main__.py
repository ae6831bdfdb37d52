"""``python -m bench``: races against peers and of holdfast's ways against each other, in one run, as ratios.

A race prints a table and its bars. With ``--json`` the last line is one object:
``{"bench", "results": {…}, "bars": {name: {"value", "bar", "ok"}}}``. The exit code is 0 if all bars hold, else 1.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from bench.race_report import Bar

app = typer.Typer(
    help="Races against peers, interleaved in one run, as ratios. Peers are installed under .bench/.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each contestant has its turn.")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _finish(name: str, race: Any, as_json: bool, **settings: Any) -> None:
    """Run a race, show its results, and end with the exit code that says whether all bars hold."""
    from bench.race_report import publish

    outcome: tuple[dict[str, Any], dict[str, Bar]] = race.race(say=_say, **settings)
    results, bars = outcome
    raise typer.Exit(0 if publish(name, results, bars, columns=race.COLUMNS, as_json=as_json) else 1)


@app.command()
def overhead(
    workers: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Rounds = 40,
    burst: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 5,
    json: Json = False,
) -> None:
    """Failure-free throughput against plain DDP and torchft, on the same model and batch."""
    from bench.races import overhead as race

    _finish("overhead", race, json, workers=workers, rounds=rounds, burst=burst)


@app.command()
def recovery(workers: Annotated[int, typer.Option(min=2)] = 3, rounds: Rounds = 5, json: Json = False) -> None:
    """Time to the next step after a SIGKILL: holdfast, torchft as it comes and tuned, torchrun."""
    from bench.races import recovery as race

    _finish("recovery", race, json, workers=workers, rounds=rounds)


@app.command()
def teams(
    rounds: Rounds = 20,
    kills: Annotated[int, typer.Option(min=1, help="How often each contestant loses a rank.")] = 5,
    burst: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 5,
    json: Json = False,
) -> None:
    """Two teams of two ranks with FSDP2: throughput, and time to the next step after a SIGKILL, against torchft."""
    from bench.races import teams as race

    _finish("teams", race, json, rounds=rounds, kills=kills, burst=burst)


@app.command()
def failover(rounds: Rounds = 5, json: Json = False) -> None:
    """Time to the next commit after the machine of an elected coordinator, or another one, is killed or vanishes."""
    from bench.races import failover as race

    _finish("failover", race, json, rounds=rounds)


@app.command()
def ray(rounds: Rounds = 5, json: Json = False) -> None:
    """Time to the survivors' next commit after a kill: workers and agents that Ray has placed, and holdfast run's."""
    from bench.races import ray as race

    _finish("ray", race, json, rounds=rounds)


@app.command()
def scale(
    workers: Annotated[str, typer.Option(help="Numbers of real workers.")] = "4,8,16,32,64,96",
    rounds: Rounds = 3,
    exchanges: Annotated[bool, typer.Option(help="Compare both ways to sum a layer's gradients, too.")] = True,
    json: Json = False,
) -> None:
    """Votes, regroups and losses with more and more workers, real ones and 10,000 simulated ones. Drawn."""
    from bench.races import scale as race

    _finish("scale", race, json, workers=race.parse_sizes(workers), rounds=rounds, exchanges=exchanges)


@app.command()
def zero(
    megabytes: Annotated[int, typer.Option("--mb", min=1, help="The size of the state.")] = 512,
    rounds: Rounds = 5,
    json: Json = False,
) -> None:
    """Reading a ZeRO checkpoint into another layout: DeepSpeed's ds_to_universal and load, holdfast."""
    from bench.races import zero as race

    _finish("zero", race, json, megabytes=megabytes, rounds=rounds)


@app.command()
def checkpoint(
    megabytes: Annotated[int, typer.Option("--mb", min=1, help="The size of the state.")] = 512,
    rounds: Rounds = 7,
    seed: Annotated[int, typer.Option(help="Of the order in which contestants take turns.")] = 0,
    json: Json = False,
) -> None:
    """Durable saves, cold loads and training time lost: raw disk, torch.save, safetensors, DCP, holdfast."""
    from bench.races import checkpoint as race

    _finish("checkpoint", race, json, megabytes=megabytes, rounds=rounds, seed=seed)


@app.command()
def store(
    megabytes: Annotated[int, typer.Option("--mb", min=1, help="The size of the state.")] = 512,
    rounds: Rounds = 5,
    seed: Annotated[int, typer.Option(help="Of the order in which contestants take turns.")] = 0,
    json: Json = False,
) -> None:
    """Saves to and loads from an S3 server: holdfast, DCP with s3fs, s3torchconnector, boto3, the server's limit."""
    from bench.races import store as race

    _finish("store", race, json, megabytes=megabytes, rounds=rounds, seed=seed)


@app.command()
def planner(rounds: Rounds = 3, json: Json = False) -> None:
    """Planning time: all templates, a new plan after a failure at 1,000 nodes; drawn over layers and nodes."""
    from bench.races import planner as race

    _finish("planner", race, json, rounds=rounds)


@app.command()
def data(rounds: Rounds = 9, json: Json = False) -> None:
    """Steps on a data set of 5 ms a sample: a plain loop over DataLoader, and holdfast, with 2, 4 and 0 loaders."""
    from bench.races import data as race

    _finish("data", race, json, rounds=rounds)


@app.command()
def undo(rounds: Rounds = 15, json: Json = False) -> None:
    """Memory and time of eager updates with undo, of two-phase commit, and of copies every 1 and 10 steps."""
    from bench.races import undo as race

    _finish("undo", race, json, rounds=rounds)


@app.command()
def pipeline(
    rounds: Annotated[
        int, typer.Option(min=1, help="Turns of each contestant on two cores; the longer contests have fewer.")
    ] = 12,
    json: Json = False,
) -> None:
    """Pipelines: against torch.distributed.pipelining, DDP, the planner's estimate, and restarts with other grids."""
    from bench.races import pipeline as race

    _finish("pipeline", race, json, rounds=rounds)


@app.command()
def log(rounds: Rounds = 20, json: Json = False) -> None:
    """The cost of a tensor log while nothing happens: speed, CPU time and bytes, in memory and on disk."""
    from bench.races import log as race

    _finish("log", race, json, rounds=rounds)


@app.command()
def replay(
    rounds: Rounds = 3,
    steps: Annotated[str, typer.Option(help="Steps after the checkpoint at which a worker is killed.")] = "5,10,20,50",
    json: Json = False,
) -> None:
    """Back from a loss that no replica makes good: parallel replay, one alone, everyone back; budgets. Drawn."""
    from bench.races import replay as race

    _finish("replay", race, json, rounds=rounds, sizes=race.ReplaySizes(steps=race.parse_steps(steps)))


@app.command()
def sync(
    quick: Annotated[bool, typer.Option("--quick", help="A few minutes, to see that it works.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs that are still missing.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Look for learning rates instead, without any limit.")] = False,
    json: Json = False,
) -> None:
    """Policies on when replicas talk, 20-1000 Mbit: BSP, PowerSGD, Local SGD, FedAvg, SSP, DiLoCo, SelSync. Drawn."""
    if tune:
        from bench.replicas.tuning import tune as tune_rates

        tune_rates(say=_say)
        return
    from bench.races import sync as race

    _finish("sync-quick" if quick else "sync", race, json, quick=quick, resume=resume)


def main() -> None:
    """Run a race; an error of ours ends in one sentence on standard error and its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: contestants and namespaces are taken down
    try:
        app()
    except HoldfastError as e:
        print(f"bench: {e}", file=sys.stderr)
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
