"""A worker's words to its agent, on the socket that the agent has given it: JSON objects, one after the other."""

from __future__ import annotations

import json
import os
import socket
from typing import Any


def report(kind: str, **fields: Any) -> None:
    """Tell the agent how leaving goes. Without an agent, or if it does not listen, do nothing.

    ``kind``: "signal" (``name``), "finished" (the script is over), "idle" (it has waited to join, and ends), "saving"
    (``step``, ``done`` and ``size`` in bytes), "saved" (``step``), or "unsaved" (``step``, ``reason``, and ``wanted``:
    whether the run has a checkpoint folder).

    >>> report("saved", step=3)
    """
    lifeline = os.environ.get("HOLDFAST_LIFELINE")
    if lifeline is None:
        return
    try:
        with socket.socket(fileno=os.dup(int(lifeline))) as line:
            line.send(json.dumps({"report": kind, **fields}).encode(), socket.MSG_DONTWAIT)
    except OSError:
        pass  # the agent has ended, or is so busy that one more line is of no use
