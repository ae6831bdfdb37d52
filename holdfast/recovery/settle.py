"""What a new generation has to do before it can train: a pure function of its members' standings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.cluster.membership import Standing, worker_order


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """Where everybody will stand: who rolls forward, who gets the state, who can send it, and why."""

    operation: int
    forward: tuple[str, ...]
    receivers: tuple[str, ...]
    holders: tuple[str, ...]
    reason: str


def settle(standings: Mapping[str, Standing]) -> Settlement:
    """Settle on the newest committed operation.

    If anybody has committed operation t, everybody had voted for it and holds its result: those who
    have not committed it roll forward. If nobody has, nobody ever will: all drop it and do it again.

    >>> settle({"0.0": Standing(operation=5), "0.1": Standing(operation=4, voted=True)}).forward
    ('0.1',)
    >>> settle({"0.0": Standing(operation=4, voted=True), "0.1": Standing(operation=4)}).reason
    'nobody has committed operation 4: it is done again'
    """
    order = sorted(standings, key=worker_order)
    known = [s.operation for s in standings.values() if s.operation is not None]
    if not known:  # the begin: the first worker's model is everybody's
        first = next((w for w in order if not standings[w].spoilt), order[0])
        return Settlement(
            operation=0,
            forward=(),
            receivers=tuple(w for w in order if w != first),
            holders=(first,),
            reason=f"worker {first} has the initial state",
        )
    newest = max(known)
    forward = [w for w in order if standings[w].operation == newest - 1 and standings[w].voted]
    holders = [w for w in order if standings[w].operation == newest or w in forward]
    receivers = [w for w in order if w not in holders]
    return Settlement(
        operation=newest,
        forward=tuple(forward),
        receivers=tuple(receivers),
        holders=tuple(holders),
        reason=_reason(standings, newest, forward, receivers),
    )


def _reason(standings: Mapping[str, Standing], newest: int, forward: list[str], receivers: list[str]) -> str:
    parts = []
    if forward:
        parts.append(f"operation {newest - 1} is committed: {', '.join(forward)} roll forward")
    if any(s.operation == newest and s.voted for s in standings.values()):
        parts.append(f"nobody has committed operation {newest}: it is done again")
    if receivers:
        parts.append(f"{', '.join(receivers)} get the state")
    return "; ".join(parts) or "everybody stands at the same operation"
