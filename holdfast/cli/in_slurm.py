"""What ``holdfast run`` need not be told as a task of SLURM: where the agents meet, their secret, and their hosts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.cluster.handshake import new_token
from holdfast.cluster.meeting_file import Meeting, begin_or_join, follow
from holdfast.cluster.slurm import JobStep, address_of, is_running

MOST = 10_000  # agents of one run; other jobs may join it


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``holdfast run`` that SLURM gives if the user does not."""

    nnodes: str
    tasks: int  # agents of this step, which begin together
    rdzv_id: str
    rdzv_endpoint: str
    hosts: str
    token: str


def options_of(
    environment: Mapping[str, str], *, rdzv_id: str, log_dir: Path, patience: float, token: str
) -> Options | None:
    """Return the options of this task of a step; None outside of one.

    ``rdzv_id``: as given. With one, the step joins a run of that name if another job of the same ``log_dir`` has begun
    it. ``patience``: seconds to wait for the first task. ``token``: a secret that the user gives, or "".
    """
    step = JobStep.of(environment)
    if step is None or (step.tasks == 1 and not rdzv_id):
        return None  # it needs nobody, and then nothing listens to the network
    name = rdzv_id or f"slurm-{step.job}.{step.step}"  # two steps of a job are two runs, unless they share a name
    path = log_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.meeting"

    def begin() -> Meeting:
        endpoint = f"{address_of(step.node)}:{_free_port()}"
        return Meeting(steps=(step.name,), endpoint=endpoint, token=token or new_token())

    if step.task == 0:
        meeting = begin_or_join(path, step.name, begin, is_running=lambda other: is_running(other, step.name))
    else:
        meeting = follow(path, step.name, patience=patience)
    return Options(
        nnodes=f"1:{MOST}",
        tasks=step.tasks,
        rdzv_id=name,
        rdzv_endpoint=meeting.endpoint,
        hosts=step.host,
        token=token or meeting.token,
    )


def _free_port() -> int:
    """Return a port of this node that nobody listens on, at any of its addresses."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def mind_the_end(notice: Mapping[str, str]) -> None:
    """Note in this process's environment what ``slurm.notice_of`` has found, where ``grace.seconds_of`` looks."""
    for name, value in notice.items():
        os.environ.setdefault(name, value)
