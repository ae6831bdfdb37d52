"""Fault injection by name: a kind of fault, a worker, a step and a phase. Nothing depends on time.

A run takes its faults from the environment variable ``HOLDFAST_FAULTS``, so that a test needs no edit of the script:

    HOLDFAST_FAULTS="kill worker=0.1 step=3 phase=backward; stop worker=0.2 step=5 phase=vote"

The kinds are ``kill`` (SIGKILL), ``lose`` (the same for the agent and its process group: the machine is lost), ``stop``
(SIGSTOP: the whole process hangs), ``lock`` (a deadlock) and ``spin`` (an endless loop), which hang one thread while
others run on, ``raise`` (an exception in user code), and the sabotages ``skip-gradient``, ``double-update``,
``repeat-sample``, ``skip-undo`` and ``flip-bit`` (of a weight), which must make an exactness test fail.

Most phases are named after the code they are in. The phase ``eager`` comes after each bucket that is updated before
the vote; ``predict`` when a worker has computed its share of predictions, and nobody else has it. Three belong to
replicas that train apart: ``ballot`` comes when one has told the others how much its update matters, ``average`` when
they exchange their weights, ``averaged`` before they vote on that.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.errors import UsageError

Kind = Literal[
    "kill",
    "lose",
    "stop",
    "lock",
    "spin",
    "raise",
    "skip-gradient",
    "double-update",
    "repeat-sample",
    "skip-undo",
    "flip-bit",
]
Phase = Literal[
    "data",
    "forward",
    "backward",
    "eager",
    "reduce",
    "ballot",
    "average",
    "averaged",
    "vote",
    "voted",
    "update",
    "regroup",
    "enter",
    "copy",
    "replay",
    "snapshot",
    "write",
    "commit",
    "predict",
]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One injected fault.

    >>> Fault.parse("kill worker=0.1 step=3 phase=vote").phase
    'vote'
    """

    kind: Kind
    worker: str
    step: int | None = None  # None: whenever the phase comes
    part: int = 0  # of a ``Loop``'s step with several updates: how many were made before
    phase: Phase = "data"

    @staticmethod
    def parse(text: str) -> Fault:
        """Read a fault as in the example above. Raises ``UsageError`` for an unknown kind or phase."""
        kind, *pairs = text.split()
        fields = dict(pair.split("=", 1) for pair in pairs)
        if kind not in get_args(Kind) or fields.get("phase", "data") not in get_args(Phase):
            raise UsageError(f"'{text}' is not a fault", hint="as in: kill worker=0.1 step=3 phase=vote")
        return Fault(
            kind=kind,  # type: ignore[arg-type]
            worker=fields["worker"],
            step=int(fields["step"]) if "step" in fields else None,
            part=int(fields.get("part", "0")),
            phase=fields.get("phase", "data"),  # type: ignore[arg-type]
        )


def parse(text: str) -> list[Fault]:
    """Read faults that are separated by semicolons."""
    return [Fault.parse(part) for part in text.split(";") if part.strip()]


_planned: list[Fault] = []  # faults of this worker that have not struck
_step = 0  # the step that training has come to
_part = 0  # updates of it that are made


def plan(worker: str) -> None:
    """Take the faults of ``worker``, which is this process, from the environment."""
    _planned[:] = [f for f in parse(os.environ.get("HOLDFAST_FAULTS", "")) if f.worker == worker]


def at_step(step: int, *, part: int = 0) -> None:
    """Note that training has come to this step. ``part``: updates of it that are made already."""
    global _step, _part
    _step, _part = step, part


def point(phase: Phase, *, step: int | None = None) -> None:
    """Mark the begin of a phase, where a planned fault strikes. Without faults this costs nothing.

    ``step`` is given where a thread works for another step than the one that training has come to.
    """
    for fault in _planned:
        here = fault.step in (None, _step if step is None else step) and fault.part == _part
        if fault.phase == phase and here:
            if fault.kind in ("kill", "lose"):
                if fault.kind == "lose":
                    os.killpg(os.getpgid(int(os.environ["HOLDFAST_AGENT"])), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "stop":
                _planned.remove(fault)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault.kind == "lock":
                lock = threading.Lock()
                with lock:
                    lock.acquire()
            elif fault.kind == "spin":
                while True:
                    pass
            elif fault.kind == "raise":
                raise RuntimeError(f"injected at step {_step}, phase {phase}")


def sabotaged(kind: Kind) -> bool:
    """Whether to do this step wrong on purpose. Each sabotage happens once."""
    for fault in _planned:
        if fault.kind == kind and fault.step in (None, _step):
            _planned.remove(fault)
            return True
    return False
