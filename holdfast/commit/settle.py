"""What a new generation has to do before it can train: pure functions of its members' standings.

Which state survives is decided here and nowhere else. Members of a new generation call ``settle``; the coordinator,
which knows nothing of state, asks ``judge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.cluster.membership import Judgement, Standing, newest_of, worker_order


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a worker says of its state in the payload of its standing. Units are the parts that state is made of."""

    doing: str = ""  # what the operation in hand is ("step" …); "" if it has not begun any
    result: float | None = None  # value of the last committed operation, for those that roll forward to it
    everybody_leaves: bool = False  # as its last vote said
    resumable: bool = False  # if nobody holds the state any more, a checkpoint may
    units: int = 0  # how many there are in all
    held: tuple[int, ...] = ()  # units that it holds as they are after the last committed operation
    next: tuple[int, ...] = ()  # units that it would hold after the operation it has voted for
    undone: tuple[int, ...] = ()  # units updated before the vote in hand and taken back: right but for rounding
    logged: bool = False  # it has kept what it takes to compute others' layers again
    profiled: bool = False  # it knows what the layers cost
    step: int = 0  # how many steps it has made, where replicas train apart and may have made different numbers

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
    """Where everybody will stand: who rolls forward, who holds which units then, who begins, and why."""

    operation: int
    forward: tuple[str, ...]
    held: Mapping[str, frozenset[int]]  # the units that each worker holds, as they are after ``operation``
    newcomers: tuple[str, ...]  # those who do not know yet where the run is
    begins: str | None  # the worker whose initial state, or checkpoint, is everybody's: nothing was committed yet
    reason: str
    lost: tuple[int, ...] = ()  # units of a trained state that nobody holds any more
    replayable: bool = False  # whether they may come back from records: those who have trained know best
    undone: tuple[int, ...] = ()  # units that somebody has updated too early, and taken back
    inexact: tuple[int, ...] = ()  # those of which nobody has an untouched copy: they are as before but for rounding

    @property
    def teller(self) -> str:
        """The worker that tells the newcomers where the run is."""
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
    accounts = {worker: account_of(standings[worker]) for worker in order}
    newest = newest_of(standings.values())
    if not newest:
        return _begin(order, accounts)
    forward = [w for w in order if standings[w].operation == newest - 1 and standings[w].voted]
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
        reason=_reason(standings, newest, forward, newcomers, sorted(inexact)),
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
    """Nothing was committed: the first worker's model is everybody's, unless another's is untouched."""
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
    """The units that a worker holds as they are after ``newest``, or will when it has rolled forward."""
    if standing.operation == newest:
        return account.held
    return account.next if standing.operation == newest - 1 and standing.voted else ()


def trusted(
    held: Mapping[str, frozenset[int]], undone: Mapping[str, frozenset[int]]
) -> tuple[dict[str, frozenset[int]], frozenset[int]]:
    """Return whose copies count, and the units of which no untouched copy is left.

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
