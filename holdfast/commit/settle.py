"""Settling: pure functions that decide, from the members' standings, where a new generation goes on.

Which state survives is decided here and nowhere else. Every member of a new generation calls ``settle`` with the same
standings and so gets the same answer. The coordinator, which knows nothing of state, asks ``judge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.cluster.membership import Judgement, Standing, newest_of, worker_order
from holdfast.words import some_of


@dataclass(frozen=True, kw_only=True)
class Account:
    """A worker's description of its state, in the payload of its standing. State is made of numbered units."""

    doing: str = ""  # kind of the operation it is in ("step" …); "" if it has not begun one
    result: float | None = None  # value of its last committed operation, for workers that roll forward to it
    everybody_leaves: bool = False  # result of its last vote
    resumable: bool = False  # it has a checkpoint folder, to begin again from if the state is lost
    units: int = 0  # number of units of the whole model
    held: tuple[int, ...] = ()  # units that it holds, as they are after its last committed operation
    next: tuple[int, ...] = ()  # units that it will hold if the operation it has voted for is applied
    undone: tuple[int, ...] = ()  # units that were updated before the vote and undone: equal up to rounding
    logged: bool = False  # its log is complete, so that others' layers can be computed again
    profiled: bool = False  # it knows the costs of the layers
    step: int = 0  # its number of steps: replicas that train apart may have made different numbers

    def to_json(self) -> dict[str, Any]:
        """Return the payload of a standing; fields at their defaults are left out."""
        return {name: value for name, value in vars(self).items() if value != getattr(Account, name)}


def account_of(standing: Standing) -> Account:
    """Return what a standing's payload says.

    >>> account_of(Standing(payload=Account(held=(0, 1), units=2).to_json())).held
    (0, 1)
    """
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in standing.payload.items()
    }
    return Account(**known)


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The decision where a generation goes on: from which operation, with whose state, and why."""

    operation: int  # number of operations that are committed
    forward: tuple[str, ...]  # workers that roll forward: they apply the operation that they have voted for
    held: Mapping[str, frozenset[int]]  # by worker: the units it holds as they are after ``operation``
    newcomers: tuple[str, ...]  # workers that do not know yet where the run is
    begins: str | None  # before the first commit: the worker whose initial state, or checkpoint, all take over
    reason: str
    lost: tuple[int, ...] = ()  # units of a trained state that nobody holds any more
    replayable: bool = False  # whether lost units may be computed again: all who have trained have complete logs
    undone: tuple[int, ...] = ()  # units that some worker has updated before the vote, and undone
    inexact: tuple[int, ...] = ()  # units without an untouched copy: their values are equal up to rounding

    @property
    def teller(self) -> str:
        """The worker that tells the newcomers where the run is."""
        return self.begins or next(worker for worker in self.held if worker not in self.newcomers)


def settle(standings: Mapping[str, Standing]) -> Settlement:
    """Settle on the newest committed operation.

    A vote succeeds only if everybody has voted yes, and a worker votes only when it holds the operation's result. So
    if anybody has committed operation t, everybody holds its result, and those who have not applied it yet roll
    forward. If nobody has committed it, nobody ever will, since its generation is over: all drop it and do it again.

    >>> settle({"0.0": Standing(operation=5), "0.1": Standing(operation=4, voted=True)}).forward
    ('0.1',)
    >>> settle({"0.0": Standing(operation=4, voted=True), "0.1": Standing(operation=4)}).reason
    'nobody has committed operation 4: it is done again'
    """
    order = sorted(standings, key=worker_order)
    accounts = {worker: account_of(standings[worker]) for worker in order}
    newest = newest_of(standings.values())
    if not newest:
        return _begin(order, accounts)
    forward = {w: None for w in order if standings[w].operation == newest - 1 and standings[w].voted}  # in order
    held = {w: frozenset(_still_held(standings[w], accounts[w], newest)) for w in order}
    undone = {w: held[w] & set(accounts[w].undone) if w not in forward else frozenset() for w in order}
    held, inexact = trusted(held, undone)
    newcomers = [w for w in order if standings[w].operation != newest and w not in forward]
    there = frozenset().union(*held.values())
    trained = [accounts[w] for w in order if standings[w].operation is not None]
    return Settlement(
        operation=newest,
        forward=tuple(forward),
        held=held,
        newcomers=tuple(newcomers),
        begins=None,
        reason=_reason(standings, newest, [*forward], newcomers, sorted(inexact)),
        lost=tuple(unit for unit in range(max(account.units for account in accounts.values())) if unit not in there),
        replayable=all(account.logged for account in trained),
        undone=tuple(sorted(frozenset().union(*undone.values()))),
        inexact=tuple(sorted(inexact)),
    )


def judge(standings: Mapping[str, Standing], *, trained: bool) -> Judgement:
    """Judge for the coordinator whether survivors can carry the run on: a ``Judge``.

    >>> part = Account(held=(0,), units=2).to_json()
    >>> judge({"0.0": Standing(operation=3, payload=part)}, trained=True).reason
    'nobody holds units 1'
    """
    resumable = any(account_of(standing).resumable for standing in standings.values())
    if newest_of(standings.values()) is None and (trained or not standings):
        return Judgement(
            whole=not trained, recoverable=False, resumable=resumable, reason="nobody holds the trained state"
        )
    settlement = settle(standings)
    lost = ", ".join(map(str, settlement.lost))
    reason = f"nobody holds units {lost}" if lost else "the survivors hold everything"
    recoverable = settlement.replayable and bool(settlement.lost)
    return Judgement(whole=not settlement.lost, recoverable=recoverable, resumable=resumable, reason=reason)


def _begin(order: list[str], accounts: Mapping[str, Account]) -> Settlement:
    """Settle before the first commit: all take the first worker's state, or the first one's that was never updated."""
    begins = min(order, key=lambda worker: bool(accounts[worker].undone))
    return Settlement(
        operation=0,
        forward=(),
        held={worker: frozenset() for worker in order},
        newcomers=tuple(worker for worker in order if worker != begins),
        begins=begins,
        reason=f"worker {begins} has the initial state",
        undone=accounts[begins].undone,
        inexact=accounts[begins].undone,
    )


def _still_held(standing: Standing, account: Account, newest: int) -> tuple[int, ...]:
    """Return the units that a worker holds as they are after ``newest``, or will hold when it has rolled forward."""
    if standing.operation == newest:
        return account.held
    return account.next if standing.operation == newest - 1 and standing.voted else ()


def trusted(
    held: Mapping[str, frozenset[int]], undone: Mapping[str, frozenset[int]]
) -> tuple[dict[str, frozenset[int]], frozenset[int]]:
    """Return the copies that count, by worker, and the units without an untouched copy.

    An undone copy may differ from worker to worker by rounding, and all copies of a unit must be alike. So if some
    copies of a unit are untouched, only these count. If none is, only the first holder's copy counts, and the others
    get theirs from it. Holders come in the workers' order.

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
        parts.append(f"operation {newest - 1} is committed: {some_of(forward)} roll forward")
    if any(s.operation == newest and s.voted for s in standings.values()):
        parts.append(f"nobody has committed operation {newest}: it is done again")
    if newcomers:
        parts.append(f"{some_of(newcomers)} get the state")
    if inexact:
        parts.append(
            f"all copies of units {', '.join(map(str, inexact))} were updated and taken back, one is everybody's"
        )
    return "; ".join(parts) or "everybody stands at the same operation"
