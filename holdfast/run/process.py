"""The runs of this process: how they find their place in the cluster, and how they end with the process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint.places import Remote
from holdfast.cluster.client import Client, Place
from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Membership, Solo
from holdfast.cluster.team import ALONE, Team
from holdfast.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from holdfast.run.training import Training

logger = logging.getLogger(__name__)

clients: list[Client] = []  # at most one: the connection of this worker
runs: list[Training] = []  # one under an agent; without one, as in a notebook, there may be several


def membership(label: Label, team: Team = ALONE) -> Membership:
    """Return the place of this process in the cluster: that which its agent has given it, or one by itself.

    Raises ``UsageError`` for a second ``Run`` under an agent, and for several workers without an agent.
    """
    place = Place.from_environment()
    if place is not None:
        if clients:
            raise UsageError("a script can have one Run", hint="a second one has to be another script")
        clients.append(Client(place, label=label, team=team))
        return clients[0]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "several workers without a holdfast agent", hint="start the script with: holdfast run -n 4 train.py"
        )
    return Solo()


def add(run: Training) -> None:
    """Note a run, which ends with this process."""
    runs.append(run)
    if not run.has_agent:
        atexit.register(_at_exit, run, os.getpid())


def give_way(run: Training) -> None:
    """End earlier runs of this process, as in a notebook: they may have the same model, or the same folder.

    An exception, such as Ctrl-C, may have ended one of them in the middle of a step.
    """
    for other in runs:
        if other is run or other.has_agent:
            continue
        other.engine.abandon()
        if other.folder == run.folder:
            other.leave()  # what it still writes is the checkpoint that this run looks for
            other.release()


def complete(folder: Path | Remote) -> None:
    """Complete what earlier runs of this process still write into a folder: a checkpoint that is asked for there."""
    for other in runs:
        if not other.has_agent and other.folder == folder.absolute():
            other.leave()


def _at_exit(run: Training, process: int) -> None:
    """End a process that has no agent: its folder is given back, and an unsaved last checkpoint is an error.

    Python calls it at its exit, after the threads that write have ended. A function that is called there cannot change
    the exit code, except by ending the process.
    """
    if os.getpid() != process:
        return  # a fork of it ends
    run.release()
    try:
        run.fail_if_unsaved()
    except CheckpointError as e:
        if not hasattr(sys, "last_value"):  # else an exception ends the script: it has been shown, and its code is 1
            logger.error(e)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(e.exit_code)


def release() -> None:
    """Give the leases of all folders back that this worker holds, because its run ends, or may end with it."""
    for run in runs:
        run.release()


def leave(*, dismissed: bool = False) -> None:
    """Complete what this worker has begun to write, because it is sent away. ``dismissed``: it was asked to leave."""
    for run in runs:
        run.leave(dismissed=dismissed)


def farewell() -> None:
    """End all runs, because the script is over, and tell the coordinator that this worker's end is no failure."""
    for run in runs:
        run.finish()
    for client in clients:
        client.bye()
