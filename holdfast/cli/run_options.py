"""The options of ``holdfast run``, by what they are about. Their names are torchrun's where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Command = Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Which workers there are on this machine, and what replaces them."""

    nproc_per_node: Annotated[
        str, typer.Option("-n", "--nproc-per-node", help="Workers on this machine; or auto, cpu, gpu, xpu: each one.")
    ] = "1"
    team: Annotated[
        int,
        typer.Option(min=1, help="Processes, of the -n, that compute one replica together: FSDP2, tensor parallel."),
    ] = 1
    spares: Annotated[int, typer.Option(min=0, help="Warm workers that wait to replace a lost one.")] = 0
    hosts: Annotated[
        str,
        typer.Option(
            help="What is lost together, as a:3,b:3 for this agent's workers in order, or one name for all of them "
            "(rack7). Default: each agent is a host of its own."
        ),
    ] = ""
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Workers this agent replaces in all; without a Run, how often all start again."),
    ] = 100
    preload: Annotated[
        list[str] | None,
        typer.Option(help="Modules to import once, before workers are forked, as in transformers,peft; repeatable."),
    ] = None
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False
    role: Annotated[str, typer.Option(help="ROLE_NAME of the workers, for their own use.")] = "default"


@dataclass(frozen=True, kw_only=True)
class MeetingOptions:
    """Where the machines of a run meet."""

    nnodes: Annotated[
        str, typer.Option(help="Machines, as N or MIN:MAX. Default: 1; as a task of SLURM any number.")
    ] = ""
    rdzv_backend: Annotated[
        str,
        typer.Option(
            help="static: the coordinator is beside the first agent. etcd: any agent can hold its role, and "
            "--rdzv-endpoint has etcd's addresses."
        ),
    ] = "static"
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            help="host:port of the coordinator, on the first machine; or those of etcd, as in a:2379,b:2379,c:2379. "
            "Default: this machine alone; as a task of SLURM the first task's machine."
        ),
    ] = ""
    local_addr: Annotated[
        str, typer.Option(help="With etcd: this machine's address for the others. Default: the one that etcd sees.")
    ] = ""
    rdzv_id: Annotated[
        str,
        typer.Option(
            help="The name of the run. Default: holdfast; as a task of SLURM, slurm- and the numbers of job and step."
        ),
    ] = ""
    rdzv_conf: Annotated[str, typer.Option(help="join_timeout=SECONDS is --patience; no other key is known.")] = ""
    master_addr: Annotated[
        str, typer.Option(help="With several machines and no --rdzv-endpoint: the first machine, as torchrun has it.")
    ] = ""
    master_port: Annotated[int, typer.Option(min=0, help="The port beside --master-addr. Default: 29500.")] = 0
    standalone: Annotated[
        bool, typer.Option("--standalone", help="This machine alone, at any free port: what is done without it, too.")
    ] = False
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for missing machines.")] = 30.0


@dataclass(frozen=True, kw_only=True)
class TimeOptions:
    """How long silence and an end may take."""

    heartbeat_timeout: Annotated[
        float, typer.Option(min=0.2, help="Seconds of silence after which a worker counts as lost.")
    ] = 5.0
    step_timeout: Annotated[
        str,
        typer.Option(
            help="Seconds without a sign of progress after which a worker counts as hung, in a step or as STEP:OTHER "
            "for everything else too; auto: a multiple of the slowest recent step; off."
        ),
    ] = "auto"
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            "--shutdown-timeout",
            min=0.5,
            max=604800.0,
            envvar=["HOLDFAST_GRACE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
            help="Seconds from a preemption notice to the end of this machine, the last checkpoint included. Default: "
            "until SLURM_JOB_END_TIME after SLURM's --signal=USR1@..., else 30.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown, and what is kept."""

    log_dir: Annotated[Path, typer.Option(help="For the workers' output and events.jsonl.")] = Path("holdfast-logs")
    redirects: Annotated[
        str, typer.Option("-r", "--redirects", help="3: output goes only into the logs; as 0:3,1:0 by local rank.")
    ] = "0"
    local_ranks_filter: Annotated[
        str, typer.Option(help="Show only the output of these local ranks, as in 0,1; all of it is in the logs.")
    ] = ""
    progress: Annotated[
        bool, typer.Option(help="Show how far the training is: a bar on a terminal, a line every 30 s elsewhere.")
    ] = True
    health: Annotated[
        str,
        typer.Option(
            envvar="HOLDFAST_HEALTH",
            help="HOST:PORT, or PORT on loopback: answer /healthz (alive) and /readyz (trains) there, by HTTP.",
        ),
    ] = ""
    watched: Annotated[
        bool, typer.Option("--watch", help="Show the live page beside the run, on loopback: holdfast watch.")
    ] = False
    watched_at: Annotated[
        str, typer.Option("--watch-at", help="HOST:PORT, or PORT on loopback, of the live page; means --watch, too.")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class SecretOptions:
    """What machines prove themselves with."""

    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the job's token, 16 characters at least; else HOLDFAST_TOKEN; else a new one."),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="This machine's certificate (PEM): TLS between agents and coordinator.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key (PEM).")] = None
    tls_ca: Annotated[Path | None, typer.Option(help="The CA that signed all machines' certificates (PEM).")] = None
    tls_tensors: Annotated[
        bool, typer.Option("--tls-tensors", help="Encrypt what workers send each other, too. Not on GPUs.")
    ] = False
