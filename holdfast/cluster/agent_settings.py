"""Settings of an agent, and what follows from them: its workers' environment, and its coordinator's options."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.cluster import tls, wire
from holdfast.cluster.local_round import Lineup
from holdfast.cluster.membership import new_incarnation
from holdfast.cluster.quorum.etcd import EtcdSettings
from holdfast.cluster.signals import NOTICES
from holdfast.cluster.tls import TlsSettings


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings of an agent: the options of ``holdfast run``.

    >>> AgentSettings(command=["train.py"], workers=4).workers
    4
    """

    command: list[str]  # the script, or with ``module`` the module's name, and its arguments
    module: bool = False  # run the command as ``python -m`` does
    preload: tuple[str, ...] = ()  # modules that the zygote imports before it forks workers
    workers: int = 1  # workers of this agent that train
    team: int = 1  # ranks of each worker: processes that compute one replica together
    spares: int = 0  # further workers that wait to take the place of lost ones
    hosts: tuple[str, ...] = ()  # the failure domain of each slot; spares take them in turn. Empty: this agent
    judge: str = "holdfast.commit.settle:judge"  # the ``membership.Judge`` of the coordinator, by name
    minimum_hosts: int = 1  # agents that the run needs to begin and to go on
    maximum_hosts: int = 1  # agents that may take part; more are refused
    first_hosts: int = 0  # agents that a script without a ``Run`` begins with; 0: the minimum
    endpoint: str = ""  # the coordinator's host:port; empty: this machine alone, any free port
    etcd: EtcdSettings | None = None  # through which the coordinator is elected; None: it is at the endpoint
    address: str = ""  # this machine's, where an elected coordinator listens; empty: the one that etcd sees
    job: str = "holdfast"  # name of the job, for scripts that read TORCHELASTIC_RUN_ID
    token: str = field(default_factory=wire.new_token, repr=False)  # secret that all machines of a run share
    tls: TlsSettings | None = None  # certificates for the control connections; None: no TLS
    tls_tensors: bool = False  # they are for the workers' connections to each other, too
    max_restarts: int = 100  # workers that this agent replaces in all; of a script without a ``Run``, starts of all
    heartbeat_timeout: float = 5.0  # seconds of silence after which a worker or an agent counts as lost
    step_timeout: str = "auto"  # how long a worker may show no sign of progress: see ``stuck.StepTimeout``
    patience: float = 30.0  # seconds to wait for missing hosts, and for a coordinator that does not answer
    grace: float | None = None  # seconds from a preemption notice to its end; None: as ``grace.seconds_of`` says
    log_dir: Path = Path("holdfast-logs")  # folder of the workers' output and of events.jsonl
    environment: dict[str, str] = field(default_factory=dict)  # further environment variables of the workers
    health: tuple[str, int] | None = None  # where probes are answered (``health``); None: nowhere
    quiet: bool = False  # show nothing of what workers print
    hidden: frozenset[int] = frozenset()  # slots whose output is in their logs alone
    role: str = "default"  # ROLE_NAME of the workers

    @property
    def folder(self) -> str:
        """The folder in which the script finds its own modules."""
        return os.getcwd() if self.module else os.path.dirname(os.path.abspath(self.command[0]))

    @property
    def events(self) -> Path:
        """The file that agent, coordinator and workers write events to."""
        return self.log_dir / "events.jsonl"

    def coordinator_options(self, *, run: str, master_port: int) -> list[str]:
        """Return the words on the command line of the coordinator (``coordinator.CoordinatorSettings``).

        ``run``: the name of this start of the run, which is also the agent's. ``master_port``: a free port for scripts.
        """
        options = {
            "events": self.events,
            "minimum-hosts": self.minimum_hosts,
            "maximum-hosts": self.maximum_hosts,
            "first-hosts": self.first_hosts,
            "heartbeat-timeout": self.heartbeat_timeout,
            "step-timeout": self.step_timeout,
            "patience": self.patience,
            "judge": self.judge,
            "master-port": master_port,
            "run": run,
            "head": run,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        if self.tls is not None:
            words += ["--tls", self.tls.cert, self.tls.key, self.tls.ca, self.tls.name]
        return words

    def team_environment(self, *, slot: int, rank: int, port: int) -> dict[str, str]:
        """Return what the environment of one rank of a team has instead of its worker's: RANK and so on of the team.

        ``slot``: of the team. ``port``: a free one, for the process group that the script makes. LOCAL_RANK numbers
        the processes of this machine, so that each can have a device of its own.
        """
        place, size = str(rank), str(self.team)
        return {
            **{"RANK": place, "ROLE_RANK": place, "WORLD_SIZE": size, "ROLE_WORLD_SIZE": size},
            **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
            "LOCAL_RANK": str(slot * self.team + rank),
            "LOCAL_WORLD_SIZE": str(self.workers * self.team),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "HOLDFAST_TEAM": size,
            "HOLDFAST_TEAM_RANK": place,
        }

    def worker_environment(
        self,
        *,
        name: str,
        slot: int,
        host: int,
        address: str,
        lineup: Lineup,
        restarts: int,
    ) -> dict[str, str]:
        """Return a worker's environment: the variables of torchrun, and those that ``client.Place`` reads.

        ``name`` and ``slot``: the worker's. ``host``: the agent's number. ``address``: this machine's, for other
        workers. ``restarts``: workers replaced so far.

        MASTER_ADDR and MASTER_PORT are for a script's own use, and the same for all workers of the run.
        """
        rank, size = str(lineup.group_rank * self.workers + slot), str(lineup.groups * self.workers)
        return {
            **self.environment,
            **tls.environment(self.tls if self.tls_tensors else None),
            "RANK": rank,
            "ROLE_RANK": rank,
            "ROLE_NAME": self.role,
            "LOCAL_RANK": str(slot),
            "GROUP_RANK": str(lineup.group_rank),
            "WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": str(lineup.groups),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": lineup.master[0],
            "MASTER_PORT": str(lineup.master[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_RUN_ID": self.job,
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_ERROR_FILE": str((self.log_dir / f"worker-{name}.error.json").absolute()),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in NOTICES),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "HOLDFAST_AGENT": str(os.getpid()),
            "HOLDFAST_WORKER": name,
            "HOLDFAST_INCARNATION": new_incarnation(),
            "HOLDFAST_HOST": self.hosts[slot % len(self.hosts)] if self.hosts else str(host),
            "HOLDFAST_TOKEN": self.token,
            "HOLDFAST_ADDRESS": address,
            "HOLDFAST_HEARTBEAT": str(self.heartbeat_timeout),
            "HOLDFAST_PATIENCE": str(self.patience),
            "HOLDFAST_EVENTS": str(self.events.absolute()),
        }
