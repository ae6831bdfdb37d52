"""Disturbances that a page may ask for: signals to a run's own processes on this machine, and to no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.watch.local_facts import is_worker, title_of
from holdfast.watch.view import View

SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
ACTIONS = (*SIGNALS, "preempt")
ANCESTORS = 4  # from a worker to its agent at most: the zygote, and an interpreter between


def disturb(view: View, action: str, worker: str) -> str:
    """Kill or stop a worker, or ask the machine's agent to leave; return a sentence. Raises ``UsageError``.

    The processes are those of the view, looked at once more: a number may have become somebody else's.
    """
    found = next((each for each in view.workers if each.name == worker), None)
    if found is None or action not in ACTIONS:
        raise UsageError(f"there is no worker {worker!r} to {action!r}", hint="it may be gone already")
    pids = [pid for pid in found.pids if is_worker(pid, worker)]
    if not pids:
        raise UsageError(f"worker {worker} does not run on this machine", hint="open the page of its own machine")
    if action == "preempt":
        agent = _agent_of(pids[0], view.agent_pids)
        _send(agent, "holdfast: agent", signal.SIGTERM)
        return f"the agent of worker {worker} (process {agent}) is asked to leave"
    for pid in pids:
        _send(pid, f"holdfast: worker {worker}", SIGNALS[action])
    return f"worker {worker} (process {pids[0]}) was sent {SIGNALS[action].name}"


def _send(pid: int, title: str, number: signal.Signals) -> None:
    """Send a signal to a process if it has this title. Between the look and the signal nobody can take its number."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as e:
        raise UsageError(f"process {pid} is gone", hint="look again") from e
    try:
        if not f"{title_of(pid)} ".startswith(f"{title} "):
            raise UsageError(f"process {pid} is another one by now", hint="look again")
        signal.pidfd_send_signal(descriptor, number)
    except OSError as e:
        raise UsageError(f"process {pid} cannot be sent {number.name}: {e.strerror}", hint="as whose user?") from e
    finally:
        os.close(descriptor)


def _agent_of(pid: int, agents: Collection[int]) -> int:
    """Return the agent of a worker, of those that the run's events name. Raises ``UsageError``.

    Of several on one machine, it is the one that the worker descends from.
    """
    here = [agent for agent in agents if title_of(agent).startswith("holdfast: agent")]
    if len(here) == 1:
        return here[0]
    for _ in range(ANCESTORS):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        if pid in here:
            return pid
    raise UsageError("the agent of this machine cannot be told from other processes", hint="send it SIGTERM yourself")
