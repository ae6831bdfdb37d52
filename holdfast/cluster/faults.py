"""Named fault injection: what happens to whom, at which step and phase. Never a sleep.

A run takes its faults from ``HOLDFAST_FAULTS``, so that a sweep needs no edit of the script:

    HOLDFAST_FAULTS="kill worker=0.1 step=3 phase=backward; stop worker=0.2 step=5 phase=vote"

Kinds: ``kill`` (SIGKILL), ``stop`` (SIGSTOP, a hang), ``raise`` (an exception in user code); and the
sabotages, which must make an exactness test fail: ``skip-gradient``, ``double-update``, ``repeat-sample``,
``skip-undo``. The phase ``eager`` comes after each bucket that is updated before the vote; where replicas train
apart, ``ballot`` when one has told the others how much its update matters, ``average`` when they exchange their
weights, ``averaged`` before they vote on that.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.errors import UsageError

Kind = Literal["kill", "stop", "raise", "skip-gradient", "double-update", "repeat-sample", "skip-undo"]
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
    "copy",
    "replay",
    "snapshot",
    "write",
    "commit",
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
    phase: Phase = "data"

    @staticmethod
    def parse(text: str) -> Fault:
        kind, *pairs = text.split()
        fields = dict(pair.split("=", 1) for pair in pairs)
        if kind not in get_args(Kind) or fields.get("phase", "data") not in get_args(Phase):
            raise UsageError(f"'{text}' is not a fault", hint="as in: kill worker=0.1 step=3 phase=vote")
        return Fault(
            kind=kind,  # type: ignore[arg-type]
            worker=fields["worker"],
            step=int(fields["step"]) if "step" in fields else None,
            phase=fields.get("phase", "data"),  # type: ignore[arg-type]
        )


def parse(text: str) -> list[Fault]:
    return [Fault.parse(part) for part in text.split(";") if part.strip()]


_planned: list[Fault] = []
_step = 0


def plan(worker: str) -> None:
    """Take this worker's faults from the environment."""
    _planned[:] = [f for f in parse(os.environ.get("HOLDFAST_FAULTS", "")) if f.worker == worker]


def at_step(step: int) -> None:
    """Training has come to this step."""
    global _step
    _step = step


def point(phase: Phase) -> None:
    """Called where a phase begins; strikes if a fault waits here. Nothing planned: costs nothing."""
    for fault in _planned:
        if fault.phase == phase and fault.step in (None, _step):
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "stop":
                _planned.remove(fault)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault.kind == "raise":
                raise RuntimeError(f"injected at step {_step}, phase {phase}")


def sabotaged(kind: Kind) -> bool:
    """Whether to do this step wrong on purpose; each sabotage happens once."""
    for fault in _planned:
        if fault.kind == kind and fault.step in (None, _step):
            _planned.remove(fault)
            return True
    return False
