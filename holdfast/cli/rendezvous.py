"""Where the agents of ``holdfast run`` meet: as the user says, or as SLURM, Kubernetes or torchrun's variables do."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli import in_kubernetes, in_slurm, torchrun
from holdfast.cli.run_options import MeetingOptions
from holdfast.cluster.quorum.etcd import EtcdSettings
from holdfast.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where agents meet, and what they have to know for it."""

    endpoint: str  # of the coordinator, or of etcd; empty: this machine alone
    etcd: EtcdSettings | None  # through which the coordinator is elected
    job: str  # the run's name; empty: the usual one
    machines: tuple[int, int]  # least and most
    first: int  # machines that begin together; 0: the least
    hosts: str  # as ``--hosts`` has them
    token: str  # the job's secret; empty: none is known

    @property
    def coordinator(self) -> str:
        """The coordinator's endpoint, where it is known beforehand; else empty."""
        return "" if self.etcd else self.endpoint


def where_to_meet(given: MeetingOptions, *, hosts: str, log_dir: Path, patience: float, token: str) -> Rendezvous:
    """Return where the agents meet. A task of SLURM may wait here for the first one, a pod for its name.

    ``hosts`` and ``token``: as the user has given them, or empty. ``patience``: seconds to wait at most.
    """
    endpoint, job, nnodes, first = given.rdzv_endpoint or _of_the_first(given), given.rdzv_id, given.nnodes, 0
    if not given.standalone and (not endpoint or given.rdzv_backend == "etcd"):
        facts = in_slurm.options_of(os.environ, rdzv_id=job, log_dir=log_dir, patience=patience, token=token)
        if facts is not None:
            endpoint, job, token = endpoint or facts.rdzv_endpoint, facts.rdzv_id, facts.token
            first = 0 if nnodes else facts.tasks
            nnodes, hosts = nnodes or facts.nnodes, hosts or facts.hosts
    machines = parse_nnodes(nnodes or "1")
    if given.standalone:
        endpoint, job = alone(machines[1]), ""
    etcd = parse_backend(given.rdzv_backend, endpoint, given.local_addr)
    if etcd is None:
        in_kubernetes.wait_for_name(os.environ, endpoint, patience)
    return Rendezvous(endpoint=endpoint, etcd=etcd, job=job, machines=machines, first=first, hosts=hosts, token=token)


def _of_the_first(given: MeetingOptions) -> str:
    """Return the endpoint on the first machine, where several are wanted and something else than SLURM names it."""
    if given.standalone or given.rdzv_backend == "etcd" or parse_nnodes(given.nnodes or "1")[1] == 1:
        return ""
    master = torchrun.master_endpoint(given.master_addr, given.master_port)
    return master or in_kubernetes.endpoint_of(os.environ, socket.getfqdn())


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
