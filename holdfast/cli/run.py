"""``holdfast run``: start a script on workers that may fail."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import typer

from holdfast.cli import in_slurm, torchrun, watch
from holdfast.cli.display import Display
from holdfast.cli.options import spread
from holdfast.cli.printer import ERASE, Printer
from holdfast.cli.rendezvous import where_to_meet
from holdfast.cli.run_options import (
    Command,
    MeetingOptions,
    OutputOptions,
    SecretOptions,
    TimeOptions,
    WorkerOptions,
)
from holdfast.cluster import faults, signals, slurm
from holdfast.cluster.agent import Agent
from holdfast.cluster.agent_settings import AgentSettings
from holdfast.cluster.handshake import MINIMUM_TOKEN, new_token
from holdfast.cluster.health import parse_address
from holdfast.cluster.preload import parse as parse_preload
from holdfast.cluster.stuck import StepTimeout
from holdfast.cluster.tls import OPTIONS, TlsSettings
from holdfast.errors import UsageError
from holdfast.titles import set_title


@spread
def run(
    command: Command,
    workers: WorkerOptions,
    meeting: MeetingOptions,
    times: TimeOptions,
    output: OutputOptions,
    secrets: SecretOptions,
) -> None:
    """Start a training script on workers that may fail.

    A lost worker takes nobody along: the survivors go on, a replacement joins by itself. SIGTERM is a
    preemption notice: this machine's workers leave at the next step boundary. If all workers of the run are
    asked to leave, they save a checkpoint first.
    """
    signals.end_by_sigterm_if_first()
    faults.parse(os.environ.get("HOLDFAST_FAULTS", ""))  # a misspelt fault must not pass for a survived one
    if not workers.module and not Path(command[0]).is_file():
        raise UsageError(f"there is no script '{command[0]}'", hint="or -m for a module")
    StepTimeout.parse(times.step_timeout)  # refuse a bad one here, where the user sees it
    torchrun.check_variables(os.environ)
    settings = settings_of(command, workers, meeting, times, output, secrets)
    page = watch.beside_run(output.log_dir, output.watched_at) if output.watched or output.watched_at else None
    try:
        code = asyncio.run(start(settings, progress=output.progress))
    finally:
        if page is not None:
            page.close()
    raise typer.Exit(code)


def settings_of(
    command: list[str],
    workers: WorkerOptions,
    meeting: MeetingOptions,
    times: TimeOptions,
    output: OutputOptions,
    secrets: SecretOptions,
) -> AgentSettings:
    """Return the settings of this machine's agent. It may wait for other machines to be there."""
    processes = torchrun.parse_workers(workers.nproc_per_node)
    patience = torchrun.parse_patience(meeting.rdzv_conf, meeting.patience)
    size, spares = in_teams(processes, workers.team, "-n"), in_teams(workers.spares, workers.team, "--spares")
    token = read_token(secrets.token_file)
    if times.grace is None:
        in_slurm.mind_the_end(slurm.notice_of(os.environ))
    place = where_to_meet(meeting, hosts=workers.hosts, log_dir=output.log_dir, patience=patience, token=token)
    tls = read_certificates(secrets, place.coordinator if place.etcd is None else None)
    return AgentSettings(
        command=command,
        module=workers.module,
        preload=parse_preload(workers.preload or []),
        workers=size,
        team=workers.team,
        spares=spares,
        hosts=parse_hosts(place.hosts, size),
        minimum_hosts=place.machines[0],
        maximum_hosts=place.machines[1],
        first_hosts=place.first,
        endpoint=place.coordinator,
        etcd=place.etcd,
        address=meeting.local_addr,
        job=place.job or "holdfast",
        token=place.token or made_up_token(alone=not place.endpoint),
        tls=tls,
        tls_tensors=secrets.tls_tensors,
        max_restarts=workers.max_restarts,
        heartbeat_timeout=times.heartbeat_timeout,
        step_timeout=times.step_timeout,
        patience=patience,
        grace=times.grace,
        log_dir=output.log_dir,
        hidden=torchrun.parse_hidden(output.redirects, output.local_ranks_filter, size + spares),
        role=workers.role,
        health=parse_address(output.health) if output.health else None,
    )


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


def read_certificates(secrets: SecretOptions, endpoint: str | None) -> TlsSettings | None:
    """Return the certificates for the control connections; None: no TLS. ``endpoint``: None if any agent can be it."""
    tls = TlsSettings.given(secrets.tls_cert, secrets.tls_key, secrets.tls_ca, endpoint=endpoint)
    if secrets.tls_tensors and tls is None:
        raise UsageError("--tls-tensors needs certificates", hint=f"give {OPTIONS}")
    return tls


def made_up_token(*, alone: bool) -> str:
    """Return a new token. Only a run on this machine alone may make up its own."""
    if not alone:
        raise UsageError(
            "several machines need the job's token",
            hint="set HOLDFAST_TOKEN to the same secret on each, or --token-file",
        )
    return new_token()
