"""Settings of an agent, and what follows from them: its workers' environment, and its coordinator's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.cluster import tls, wire
from holdfast.cluster.membership import new_incarnation
from holdfast.cluster.tls import TlsSettings


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings of an agent: the options of ``holdfast run``.

    >>> AgentSettings(command=["train.py"], workers=4).workers
    4
    """

    command: list[str]  # the script, or with ``module`` the module's name, and its arguments
    module: bool = False  # run the command as ``python -m`` does
    workers: int = 1  # workers of this agent that train
    spares: int = 0  # further workers that wait to take the place of lost ones
    hosts: tuple[str, ...] = ()  # the failure domain of each slot; spares take them in turn. Empty: this agent
    judge: str = "holdfast.commit.settle:judge"  # the ``membership.Judge`` of the coordinator, by name
    minimum_hosts: int = 1  # agents that the run needs to begin and to go on
    maximum_hosts: int = 1  # agents that may take part; more are refused
    endpoint: str = ""  # the coordinator's host:port; empty: this machine alone, any free port
    job: str = "holdfast"  # name of the job, for scripts that read TORCHELASTIC_RUN_ID
    token: str = field(default_factory=wire.new_token, repr=False)  # secret that all machines of a run share
    tls: TlsSettings | None = None  # certificates for the control connections; None: no TLS
    max_restarts: int = 100  # workers that this agent replaces in all
    heartbeat_timeout: float = 5.0  # seconds of silence after which a worker or an agent counts as lost
    step_timeout: str = "auto"  # how long a worker may show no sign of progress: see ``stuck.StepTimeout``
    patience: float = 30.0  # seconds to wait for missing hosts, and for a coordinator that does not answer
    grace: float | None = None  # seconds from a preemption notice to its end; None: as ``grace.seconds_of`` says
    log_dir: Path = Path("holdfast-logs")  # folder of the workers' output and of events.jsonl
    environment: dict[str, str] = field(default_factory=dict)  # further environment variables of the workers
    quiet: bool = False  # show nothing of what workers print

    @property
    def events(self) -> Path:
        """The file that agent, coordinator and workers write events to."""
        return self.log_dir / "events.jsonl"

    def coordinator_options(self, *, run: str, master_port: int) -> list[str]:
        """Return the words on the command line of the coordinator (``coordinator.CoordinatorSettings``).

        ``run``: the name of this start of the run. ``master_port``: a free port for the scripts.
        """
        options = {
            "events": self.events,
            "minimum-hosts": self.minimum_hosts,
            "maximum-hosts": self.maximum_hosts,
            "heartbeat-timeout": self.heartbeat_timeout,
            "step-timeout": self.step_timeout,
            "patience": self.patience,
            "judge": self.judge,
            "master-port": master_port,
            "run": run,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        if self.tls is not None:
            words += ["--tls", self.tls.cert, self.tls.key, self.tls.ca, self.tls.name]
        return words

    def worker_environment(
        self,
        *,
        name: str,
        slot: int,
        host: int,
        address: str,
        coordinator: tuple[str, int],
        master_port: int,
        restarts: int,
    ) -> dict[str, str]:
        """Return a worker's environment: the variables of torchrun, and those that ``client.Place`` reads.

        ``name`` and ``slot``: the worker's. ``host``: the agent's number. ``address``: this machine's, for other
        workers. ``restarts``: workers replaced so far.

        MASTER_ADDR and MASTER_PORT are for a script's own use, and the same for all workers of the run. The agent
        beside the coordinator chose the port, which was free on its machine then; the coordinator's own is taken.
        """
        rank = str(host * self.workers + slot)
        return {
            **self.environment,
            **tls.environment(self.tls),
            "RANK": rank,
            "ROLE_RANK": rank,
            "LOCAL_RANK": str(slot),
            "GROUP_RANK": str(host),
            "WORLD_SIZE": str(self.workers * self.minimum_hosts),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": coordinator[0],
            "MASTER_PORT": str(master_port),
            "TORCHELASTIC_RUN_ID": self.job,
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "HOLDFAST_WORKER": name,
            "HOLDFAST_INCARNATION": new_incarnation(),
            "HOLDFAST_HOST": self.hosts[slot % len(self.hosts)] if self.hosts else str(host),
            "HOLDFAST_COORDINATOR": f"{coordinator[0]}:{coordinator[1]}",
            "HOLDFAST_TOKEN": self.token,
            "HOLDFAST_ADDRESS": address,
            "HOLDFAST_HEARTBEAT": str(self.heartbeat_timeout),
            "HOLDFAST_PATIENCE": str(self.patience),
            "HOLDFAST_EVENTS": str(self.events.absolute()),
        }
