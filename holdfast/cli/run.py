"""``holdfast run``: start a script on workers that may fail. Flag names are torchrun's where it has them."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import in_kubernetes, in_slurm, torchrun, watch
from holdfast.cli.display import Display
from holdfast.cli.printer import ERASE, Printer
from holdfast.cluster import faults, slurm
from holdfast.cluster.agent import Agent
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.handshake import MINIMUM_TOKEN, new_token
from holdfast.cluster.health import parse_address
from holdfast.cluster.preload import parse as parse_preload
from holdfast.cluster.quorum.etcd import EtcdSettings
from holdfast.cluster.stuck import StepTimeout
from holdfast.cluster.tls import OPTIONS, TlsSettings
from holdfast.errors import UsageError
from holdfast.titles import set_title


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")],
    nproc_per_node: Annotated[
        str, typer.Option("-n", "--nproc-per-node", help="Workers on this machine; or auto, cpu, gpu, xpu: each one.")
    ] = "1",
    team: Annotated[
        int,
        typer.Option(min=1, help="Processes, of the -n, that compute one replica together: FSDP2, tensor parallel."),
    ] = 1,
    spares: Annotated[int, typer.Option(min=0, help="Warm workers that wait to replace a lost one.")] = 0,
    nnodes: Annotated[
        str, typer.Option(help="Machines, as N or MIN:MAX. Default: 1; as a task of SLURM any number.")
    ] = "",
    hosts: Annotated[
        str,
        typer.Option(
            help="What is lost together, as a:3,b:3 for this agent's workers in order, or one name for all of them "
            "(rack7). Default: each agent is a host of its own."
        ),
    ] = "",
    rdzv_backend: Annotated[
        str,
        typer.Option(
            help="static: the coordinator is beside the first agent. etcd: any agent can hold its role, and "
            "--rdzv-endpoint has etcd's addresses."
        ),
    ] = "static",
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            help="host:port of the coordinator, on the first machine; or those of etcd, as in a:2379,b:2379,c:2379. "
            "Default: this machine alone; as a task of SLURM the first task's machine."
        ),
    ] = "",
    local_addr: Annotated[
        str, typer.Option(help="With etcd: this machine's address for the others. Default: the one that etcd sees.")
    ] = "",
    rdzv_id: Annotated[
        str,
        typer.Option(
            help="The name of the run. Default: holdfast; as a task of SLURM, slurm- and the numbers of job and step."
        ),
    ] = "",
    rdzv_conf: Annotated[str, typer.Option(help="join_timeout=SECONDS is --patience; no other key is known.")] = "",
    master_addr: Annotated[
        str, typer.Option(help="With several machines and no --rdzv-endpoint: the first machine, as torchrun has it.")
    ] = "",
    master_port: Annotated[int, typer.Option(min=0, help="The port beside --master-addr. Default: 29500.")] = 0,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="This machine alone, at any free port: what is done without it, too.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Workers this agent replaces in all; without a Run, how often all start again."),
    ] = 100,
    preload: Annotated[
        list[str] | None,
        typer.Option(help="Modules to import once, before workers are forked, as in transformers,peft; repeatable."),
    ] = None,
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
            "--grace",
            "--shutdown-timeout",
            min=0.5,
            max=604800.0,
            envvar="HOLDFAST_GRACE",
            help="Seconds from a preemption notice to the end of this machine, the last checkpoint included. Default: "
            "until SLURM_JOB_END_TIME after SLURM's --signal=USR1@..., else 30.",
        ),
    ] = None,
    log_dir: Annotated[Path, typer.Option(help="For the workers' output and events.jsonl.")] = Path("holdfast-logs"),
    redirects: Annotated[
        str, typer.Option("-r", "--redirects", help="3: output goes only into the logs; as 0:3,1:0 by local rank.")
    ] = "0",
    local_ranks_filter: Annotated[
        str, typer.Option(help="Show only the output of these local ranks, as in 0,1; all of it is in the logs.")
    ] = "",
    role: Annotated[str, typer.Option(help="ROLE_NAME of the workers, for their own use.")] = "default",
    progress: Annotated[
        bool, typer.Option(help="Show how far the training is: a bar on a terminal, a line every 30 s elsewhere.")
    ] = True,
    health: Annotated[
        str,
        typer.Option(
            envvar="HOLDFAST_HEALTH",
            help="HOST:PORT, or PORT on loopback: answer /healthz (alive) and /readyz (trains) there, by HTTP.",
        ),
    ] = "",
    watched: Annotated[
        bool, typer.Option("--watch", help="Show the live page beside the run, on loopback: holdfast watch.")
    ] = False,
    watched_at: Annotated[
        str, typer.Option("--watch-at", help="HOST:PORT, or PORT on loopback, of the live page; means --watch, too.")
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the job's token, 16 characters at least; else HOLDFAST_TOKEN; else a new one."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="This machine's certificate (PEM): TLS between agents and coordinator.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key (PEM).")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="The CA that signed all machines' certificates (PEM).")] = None,
    tls_tensors: Annotated[
        bool, typer.Option("--tls-tensors", help="Encrypt what workers send each other, too. Not on GPUs.")
    ] = False,
) -> None:
    """Start a training script on workers that may fail.

    A lost worker takes nobody along: the survivors go on, a replacement joins by itself. SIGTERM is a
    preemption notice: this machine's workers leave at the next step boundary. If all workers of the run are
    asked to leave, they save a checkpoint first.
    """
    faults.parse(os.environ.get("HOLDFAST_FAULTS", ""))  # a misspelt fault must not pass for a survived one
    if not module and not Path(command[0]).is_file():
        raise UsageError(f"there is no script '{command[0]}'", hint="or -m for a module")
    StepTimeout.parse(step_timeout)  # refuse a bad one here, where the user sees it
    torchrun.check_python(os.environ)
    workers, patience = torchrun.parse_workers(nproc_per_node), torchrun.parse_patience(rdzv_conf, patience)
    workers, spares = in_teams(workers, team, "-n"), in_teams(spares, team, "--spares")
    given = read_token(token_file)
    if grace is None:
        in_slurm.mind_the_end(slurm.notice_of(os.environ))
    if not rdzv_endpoint and not standalone and rdzv_backend != "etcd" and parse_nnodes(nnodes or "1")[1] > 1:
        rdzv_endpoint = torchrun.master_endpoint(master_addr, master_port)
        rdzv_endpoint = rdzv_endpoint or in_kubernetes.endpoint_of(os.environ, socket.getfqdn())
    first = 0
    if not standalone and (not rdzv_endpoint or rdzv_backend == "etcd"):
        facts = in_slurm.options_of(os.environ, rdzv_id=rdzv_id, log_dir=log_dir, patience=patience, token=given)
        if facts is not None:
            rdzv_id, given = facts.rdzv_id, facts.token
            rdzv_endpoint = rdzv_endpoint or facts.rdzv_endpoint
            first = 0 if nnodes else facts.tasks
            nnodes, hosts = nnodes or facts.nnodes, hosts or facts.hosts
    minimum, maximum = parse_nnodes(nnodes or "1")
    if standalone:
        rdzv_endpoint, rdzv_id = alone(maximum), ""
    etcd = parse_backend(rdzv_backend, rdzv_endpoint, local_addr)
    if etcd is None:
        in_kubernetes.wait_for_name(os.environ, rdzv_endpoint, patience)
    tls = TlsSettings.given(tls_cert, tls_key, tls_ca, endpoint=None if etcd else rdzv_endpoint)
    if tls_tensors and tls is None:
        raise UsageError("--tls-tensors needs certificates", hint=f"give {OPTIONS}")
    settings = AgentSettings(
        command=command,
        module=module,
        preload=parse_preload(preload or []),
        workers=workers,
        team=team,
        spares=spares,
        hosts=parse_hosts(hosts, workers),
        minimum_hosts=minimum,
        maximum_hosts=maximum,
        first_hosts=first,
        endpoint="" if etcd else rdzv_endpoint,
        etcd=etcd,
        address=local_addr,
        job=rdzv_id or "holdfast",
        token=given or made_up_token(alone=not rdzv_endpoint),
        tls=tls,
        tls_tensors=tls_tensors,
        max_restarts=max_restarts,
        heartbeat_timeout=heartbeat_timeout,
        step_timeout=step_timeout,
        patience=patience,
        grace=grace,
        log_dir=log_dir,
        hidden=torchrun.parse_hidden(redirects, local_ranks_filter, workers + spares),
        role=role,
        health=parse_address(health) if health else None,
    )
    page = watch.beside_run(log_dir, watched_at) if watched or watched_at else None
    code = asyncio.run(start(settings, progress=progress))
    if page is not None:
        page.close()
    raise typer.Exit(code)


async def start(settings: AgentSettings, *, progress: bool) -> int:
    with Printer(sys.stdout) as say, Printer(sys.stderr) as complain:
        set_title("agent", settings.command[0])
        display = Display(say)
        erase = ERASE if say.columns and complain.columns else ""  # the bar is in the line that the error goes to
        agent = Agent(
            settings,
            say=say,
            complain=lambda text: complain(erase + text),
            show=display.show if progress else lambda facts: None,
        )
        return await agent.run()


def in_teams(processes: int, team: int, option: str) -> int:
    """Return how many teams a number of processes makes, which the option has given.

    >>> in_teams(8, 4, "-n")
    2
    """
    if processes % team:
        nearest = -(-processes // team) * team
        raise UsageError(f"{option} {processes} is not a multiple of --team {team}", hint=f"{option} {nearest}")
    return processes // team


def alone(machines: int) -> str:
    """Return the endpoint of ``--standalone``, which takes the place of one that is given, as torchrun has it.

    >>> alone(1)
    ''
    """
    if machines > 1:
        raise UsageError(f"--standalone is for one machine, and --nnodes allows {machines}", hint="leave one out")
    return ""


def parse_backend(backend: str, endpoint: str, address: str) -> EtcdSettings | None:
    """Where etcd is, if it elects the coordinator.

    >>> parse_backend("static", "head:29700", "") is None
    True
    """
    if backend == "etcd":
        return EtcdSettings.given(endpoint)
    if backend not in ("static", "c10d"):  # torchrun's default too: a script that names it means no etcd
        raise UsageError(f"--rdzv-backend {backend} is not known", hint="static or etcd")
    if address:
        raise UsageError("--local-addr is for --rdzv-backend etcd", hint="leave it out")
    return None


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


def read_token(path: Path | None) -> str:
    """The job's token, of a file or of HOLDFAST_TOKEN; "" if neither has one."""
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
    if token and len(token) < MINIMUM_TOKEN:
        raise UsageError(
            f"the job's token has {len(token)} characters, and needs at least {MINIMUM_TOKEN}",
            hint="as from: openssl rand -hex 32",
        )
    return token


def made_up_token(*, alone: bool) -> str:
    """Return a new token. Only a run on this machine alone may make up its own."""
    if not alone:
        raise UsageError(
            "several machines need the job's token",
            hint="set HOLDFAST_TOKEN to the same secret on each, or --token-file",
        )
    return new_token()
