"""``holdfast run``: start a script on workers that may fail. Flag names are torchrun's where it has them."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.printer import Printer
from holdfast.cluster import faults
from holdfast.cluster.agent import Agent
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.handshake import MINIMUM_TOKEN, new_token
from holdfast.cluster.stuck import StepTimeout
from holdfast.cluster.tensor_tls import encrypted_tensors
from holdfast.cluster.tls import TlsSettings
from holdfast.errors import UsageError


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")],
    workers: Annotated[int, typer.Option("-n", "--nproc-per-node", min=1, help="Workers on this machine.")] = 1,
    spares: Annotated[int, typer.Option(min=0, help="Warm workers that wait to replace a lost one.")] = 0,
    nnodes: Annotated[str, typer.Option(help="Machines, as N or MIN:MAX.")] = "1",
    hosts: Annotated[
        str,
        typer.Option(
            help="What is lost together, as a:3,b:3 for this agent's workers in order, or one name for all of them "
            "(rack7). Default: each agent is a host of its own."
        ),
    ] = "",
    rdzv_endpoint: Annotated[
        str, typer.Option(help="host:port of the coordinator, on the first machine. Default: this machine alone.")
    ] = "",
    rdzv_id: Annotated[str, typer.Option(help="The name of the run.")] = "holdfast",
    max_restarts: Annotated[int, typer.Option(min=0, help="Workers this agent replaces in all.")] = 100,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=0.2, help="Seconds of silence after which a worker counts as lost.")
    ] = 5.0,
    step_timeout: Annotated[
        str,
        typer.Option(
            help="Seconds without a sign of progress after which a worker counts as hung, in a step or as STEP:OTHER "
            "for everything else too; auto: a multiple of the slowest recent step; off."
        ),
    ] = "auto",
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for missing machines.")] = 30.0,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0.5,
            max=604800.0,
            envvar="HOLDFAST_GRACE",
            help="Seconds from a preemption notice to the end of this machine, the last checkpoint included. Default: "
            "until SLURM_JOB_END_TIME after SLURM's --signal=USR1@..., else 30.",
        ),
    ] = None,
    log_dir: Annotated[Path, typer.Option(help="For the workers' output and events.jsonl.")] = Path("holdfast-logs"),
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the job's token, 16 characters at least; else HOLDFAST_TOKEN; else a new one."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="This machine's certificate (PEM): TLS between agents, workers, coordinator.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key (PEM).")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="The CA that signed all machines' certificates (PEM).")] = None,
    tls_tensors: Annotated[
        bool, typer.Option("--tls-tensors", help="Encrypt tensors too, or refuse to start if this torch cannot.")
    ] = False,
) -> None:
    """Start a training script on workers that may fail.

    A lost worker takes nobody along: the survivors go on, a replacement joins by itself. SIGTERM is a
    preemption notice: this machine's workers leave at the next step boundary. If all workers of the run are
    asked to leave, they save a checkpoint first.
    """
    minimum, maximum = parse_nnodes(nnodes)
    faults.parse(os.environ.get("HOLDFAST_FAULTS", ""))  # a misspelt fault must not pass for a survived one
    if not module and not Path(command[0]).is_file():
        raise UsageError(f"there is no script '{command[0]}'", hint="or -m for a module")
    StepTimeout.parse(step_timeout)  # refuse a bad one here, where the user sees it
    tls = TlsSettings.given(tls_cert, tls_key, tls_ca, endpoint=rdzv_endpoint)
    settings = AgentSettings(
        command=command,
        module=module,
        workers=workers,
        spares=spares,
        hosts=parse_hosts(hosts, workers),
        minimum_hosts=minimum,
        maximum_hosts=maximum,
        endpoint=rdzv_endpoint,
        job=rdzv_id,
        token=read_token(token_file, alone=not rdzv_endpoint),
        tls=tls,
        environment=encrypted_tensors(tls, asked=tls_tensors),
        max_restarts=max_restarts,
        heartbeat_timeout=heartbeat_timeout,
        step_timeout=step_timeout,
        patience=patience,
        grace=grace,
        log_dir=log_dir,
    )
    raise typer.Exit(asyncio.run(start(settings)))


async def start(settings: AgentSettings) -> int:
    with Printer(sys.stdout) as say, Printer(sys.stderr) as complain:
        return await Agent(settings, say=say, complain=complain).run()


def parse_nnodes(text: str) -> tuple[int, int]:
    """MIN and MAX.

    >>> parse_nnodes("1:8"), parse_nnodes("2")
    ((1, 8), (2, 2))
    """
    low, _, high = text.partition(":")
    if not low.isdigit() or (high and not high.isdigit()) or not 1 <= int(low) <= int(high or low):
        raise UsageError(f"--nnodes {text} is not N or MIN:MAX", hint="as in 1:8")
    return int(low), int(high or low)


def parse_hosts(text: str, workers: int) -> tuple[str, ...]:
    """The host of each of this agent's workers; nothing if the agent is its own host.

    >>> parse_hosts("a:2,b:1", 3), parse_hosts("rack7", 2)
    (('a', 'a', 'b'), ('rack7', 'rack7'))
    """
    named: list[str] = []
    parts = text.split(",") if text else []
    for part in parts:
        found = re.fullmatch(r"([A-Za-z][\w.-]*)(?::([1-9]\d{0,5}))?", part.strip(), re.ASCII)
        if found is None or (found[2] is None and len(parts) > 1):
            hint = "as in a:3,b:3; names begin with a letter"  # plain numbers are agents that have no --hosts
            raise UsageError(f"--hosts {text} is not NAME or NAME:COUNT,NAME:COUNT at '{part}'", hint=hint)
        named += [found[1]] * int(found[2] or workers)
    if text and len(named) != workers:
        hint = f"-n {len(named)}, or other counts"
        raise UsageError(f"--hosts {text} has places for {len(named)} workers, but -n is {workers}", hint=hint)
    return tuple(named)


def read_token(path: Path | None, *, alone: bool) -> str:
    """The job's token. Only a run on this machine alone may make up its own."""
    if path is not None:
        try:
            token = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            hint = "one line of text, as from: openssl rand -hex 32"
            raise UsageError(f"cannot read the token file: {e}", hint=hint) from e
    else:
        token = os.environ.get("HOLDFAST_TOKEN", "").strip()
        if not token.isprintable():  # bytes that are no text come as lone surrogates
            raise UsageError("HOLDFAST_TOKEN is not text", hint="as from: openssl rand -hex 32")
    if not token and not alone:
        raise UsageError(
            "several machines need the job's token",
            hint="set HOLDFAST_TOKEN to the same secret on each, or --token-file",
        )
    if token and len(token) < MINIMUM_TOKEN:
        raise UsageError(
            f"the job's token has {len(token)} characters, and needs at least {MINIMUM_TOKEN}",
            hint="as from: openssl rand -hex 32",
        )
    return token or new_token()
