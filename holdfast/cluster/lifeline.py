"""A worker's line to its agent, on the socket that the agent has given it. Through it the worker speaks to everybody.

A worker has no connection to the coordinator: its agent passes on what the two have to say to each other
(``desk.Desk``). So the coordinator has one connection for each machine.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from holdfast.cluster.lines import Lines

LAST_SECONDS = 5.0  # for the agent to read the last words of a worker

_lines: Lines | None = None


def lines() -> Lines | None:
    """Return this process's line to its agent; None without an agent."""
    global _lines
    number = os.environ.get("HOLDFAST_LIFELINE")
    if _lines is None and number is not None:
        try:
            _lines = Lines(socket.socket(fileno=os.dup(int(number))))
        except OSError:
            return None  # a process that the script has started, without its descriptors
    return _lines


def forget() -> None:
    """Forget the line: this process is a new worker, or none any more."""
    global _lines
    _lines = None


os.register_at_fork(after_in_child=forget)  # a lock that another thread of the parent holds would never be free


def report(kind: str, **fields: Any) -> None:
    """Tell the agent how training or leaving goes. Without an agent, do nothing.

    ``kind``: "run" (the script has made a ``Run``), "signal" (``name``), "over" (all have voted for the end, in this
    ``generation``), "finished" (the script is over), "idle" (it
    has waited to join, and ends), "saving" (``step``, ``done`` and ``size`` in bytes), "saved" (``step``), "unsaved"
    (``step``, ``reason``, and ``wanted``: whether the run has a checkpoint folder), or "progress" (the facts that
    ``holdfast.bar`` shows).

    >>> report("saved", step=3)
    """
    if (line := lines()) is not None:
        line.send({"report": kind, **fields})


def fail(**error: Any) -> None:
    """Tell the agent the error that ends this worker: ``text``, ``code``, and whether it is ``final`` for the run.

    ``shown_from``: where it begins in the worker's log, as the agent shows it by itself; None: it is not there.
    """
    if (line := lines()) is not None:
        line.send({"error": error})
        line.drain(LAST_SECONDS)
