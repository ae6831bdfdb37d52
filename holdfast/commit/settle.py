"""What a new generation has to do before it can train: a pure function of its members' standings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.cluster.membership import Standing, newest_of, still_held, worker_order


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """Where everybody will stand: who rolls forward, who holds which units then, who begins, and why."""

    operation: int
    forward: tuple[str, ...]
    held: Mapping[str, frozenset[int]]  # the units that each worker holds, as they are after ``operation``
    newcomers: tuple[str, ...]  # those who do not know yet where the run is
    begins: str | None  # the worker whose initial state, or checkpoint, is everybody's: nothing was committed yet
    reason: str
    undone: tuple[int, ...] = ()  # units that somebody has updated too early, and taken back
    inexact: tuple[int, ...] = ()  # those of which nobody has an untouched copy: they are as before but for rounding

    @property
    def teller(self) -> str:
        """Who tells the newcomers where the run is."""
        return self.begins or next(worker for worker in self.held if worker not in self.newcomers)


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
    newest = newest_of(standings.values())
    if not newest:  # nothing was committed: the first worker's model is everybody's, unless another's is untouched
        begins = min(order, key=lambda worker: bool(standings[worker].undone))
        return Settlement(
            operation=0,
            forward=(),
            held={worker: frozenset() for worker in order},
            newcomers=tuple(worker for worker in order if worker != begins),
            begins=begins,
            reason=f"worker {begins} has the initial state",
            undone=tuple(standings[begins].undone),
            inexact=tuple(standings[begins].undone),
        )
    forward = [w for w in order if standings[w].operation == newest - 1 and standings[w].voted]
    held = {w: frozenset(still_held(standings[w], newest)) for w in order}
    undone = {w: held[w] & set(standings[w].undone) if w not in forward else frozenset() for w in order}
    held, inexact = trusted(held, undone)
    newcomers = [w for w in order if standings[w].operation != newest and w not in forward]
    return Settlement(
        operation=newest,
        forward=tuple(forward),
        held=held,
        newcomers=tuple(newcomers),
        begins=None,
        reason=_reason(standings, newest, forward, newcomers, sorted(inexact)),
        undone=tuple(sorted(frozenset().union(*undone.values()))),
        inexact=tuple(sorted(inexact)),
    )


def trusted(
    held: Mapping[str, frozenset[int]], undone: Mapping[str, frozenset[int]]
) -> tuple[dict[str, frozenset[int]], frozenset[int]]:
    """Whose copies count, and the units of which no untouched copy is left.

    Rounding differs from worker to worker, so of a unit that somebody has undone the untouched copies count; if
    there are none, the first holder's, and all others take theirs from it. Holders come in the workers' order.

    >>> held = {"0.0": frozenset({1, 2}), "0.1": frozenset({1, 2}), "0.2": frozenset({2})}
    >>> counts, inexact = trusted(held, {"0.0": frozenset({1, 2}), "0.1": frozenset({1, 2})})
    >>> [sorted(units) for units in counts.values()], sorted(inexact)
    ([[1], [], [2]], [1])
    """
    untouched = {worker: units - undone.get(worker, frozenset()) for worker, units in held.items()}
    given = exact = frozenset().union(*untouched.values())
    found = {}
    for worker, units in held.items():
        found[worker] = untouched[worker] | (units - given)
        given |= units
    return found, given - exact


def _reason(
    standings: Mapping[str, Standing], newest: int, forward: list[str], newcomers: list[str], inexact: list[int]
) -> str:
    parts = []
    if forward:
        parts.append(f"operation {newest - 1} is committed: {', '.join(forward)} roll forward")
    if any(s.operation == newest and s.voted for s in standings.values()):
        parts.append(f"nobody has committed operation {newest}: it is done again")
    if newcomers:
        parts.append(f"{', '.join(newcomers)} get the state")
    if inexact:
        parts.append(
            f"all copies of units {', '.join(map(str, inexact))} were updated and taken back, one is everybody's"
        )
    return "; ".join(parts) or "everybody stands at the same operation"
