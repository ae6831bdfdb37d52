"""What a run looks like at one moment: small values that never change, and that JSON has."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from holdfast.watch.survival import Survival

SLOW = 1.5  # times the median of its peers: less is within what machines differ by anyway
LEAST_SLOW = 0.005  # seconds: what differs by less slows nobody down

State = Literal["starting", "waiting", "joining", "training", "lost", "ended"]
Phase = Literal["nothing", "starting", "recovering", "training", "finished", "stopped"]
Kind = Literal["loss", "recovery", "join", "checkpoint", "sync", "replay", "notice", "run"]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that has happened: when, of which kind, in words. ``ms``: how long a recovery took."""

    t: float
    kind: Kind
    text: str
    step: int = 0
    ms: float | None = None
    bad: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """A worker. Times are seconds of its recent steps; None: not known. ``received``: bytes for its present place."""

    name: str
    host: str
    state: State
    pids: tuple[int, ...] = ()
    since: float = 0.0
    until: float | None = None
    pipeline: int | None = None
    stage: int | None = None
    first: int = 0
    stop: int = 0
    step: int | None = None  # steps that it has committed
    seconds: float | None = None  # of a step
    computing: float | None = None  # of these, in its own code
    waiting: float | None = None  # of these, for other workers and for transfers
    sent: float | None = None  # bytes in a step
    received: int = 0
    why: str = ""
    log: str | None = None  # the file that has its stacks, if it was stuck
    slow: bool = False


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was committed: its step, bytes, and when."""

    step: int
    bytes: int
    t: float


@dataclass(frozen=True, kw_only=True)
class View:
    """A run at one moment. All times are seconds since 1970. ``counts``: how often each kind of moment has come."""

    phase: Phase
    why: str  # what has brought the phase about
    command: tuple[str, ...]
    began: float | None
    now: float | None  # of the last event
    since: float | None  # the earliest moment that can be shown again
    step: int  # steps that are committed
    loss: float | None
    lr: float | None
    grad_norm: float | None
    rate: float | None  # recent steps per second
    samples_rate: float | None  # recent samples (or weights) per second
    generation: int
    reason: str  # of the generation
    layers: int
    workers: tuple[WorkerView, ...]  # those that live
    gone: tuple[WorkerView, ...]  # the last ones that do not
    agents: tuple[int, ...]  # numbers of the machines that are there
    agent_pids: tuple[int, ...]
    survival: Survival
    logged: tuple[int, ...]  # boundaries whose tensors are logged
    saved: tuple[Saved, ...]  # the last checkpoints
    interval: int | None  # steps from a checkpoint to the next one
    lssr: float | None  # where replicas train apart: share of steps without an exchange
    distance: float | None  # and how far they were from each other at the last one
    counts: dict[str, int]
    restarts: int  # workers that were started in place of others
    recovery_ms: float | None  # median
    unread: int  # lines of the files that are not understood

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def slow_ones(computing: dict[str, float], peers: dict[str, tuple[int, int]]) -> set[str]:
    """Return the workers that compute much longer than their peers.

    ``computing``: recent seconds of each. ``peers``: the layers of each; those with the same layers are compared, or
    all with all where nobody has the same.

    >>> sorted(slow_ones({"a": 1.0, "b": 1.1, "c": 2.5}, {"a": (0, 4), "b": (0, 4), "c": (0, 4)}))
    ['c']
    >>> slow_ones({"a": 1.0, "b": 2.5}, {"a": (0, 2), "b": (2, 4)})
    set()
    """
    groups: dict[tuple[int, int], list[str]] = {}
    for name in computing:
        groups.setdefault(peers.get(name, (0, 0)), []).append(name)
    found = set()
    for names in groups.values():
        for name in names:
            usual = _median([computing[other] for other in names if other != name])
            if usual is not None and computing[name] > max(SLOW * usual, usual + LEAST_SLOW):
                found.add(name)
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
