"""The narrow contract between training and whoever knows which workers are alive.

Training needs four things and no more: show a *standing*, get the next *generation*, hear that the
current one is over, leave. The embedded coordinator provides them (``client.Client``); one process
without an agent needs nobody (``Solo``); an installation with etcd can put its own in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

GIVEN_UP = 75  # exit code of a worker that can no longer take part as it is; its agent starts a new one


def worker_order(worker: str) -> tuple[int, ...]:
    """Sorts worker names ``host.ordinal`` as numbers, so that 0.10 comes after 0.9.

    >>> sorted(["0.10", "1.0", "0.9"], key=worker_order)
    ['0.9', '0.10', '1.0']
    """
    return tuple(int(part) for part in worker.split("."))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a worker is: what it shows when a generation ends.

    ``operation`` counts the operations it has committed (None: it holds no state yet), ``voted``
    says that it voted for the next one and still holds that one's complete result, ``doing`` what that one is
    ("step" …; "" if it has not begun any). ``boundary``: it is
    between two steps, where joiners may come in; ``broken``: the generation failed it. ``result`` is
    the value of the last committed operation, for those that have to roll forward to it. ``resumable``:
    if nobody holds the state any more, a checkpoint may. ``held`` are the units of state that it holds as they are
    after ``operation``, ``next`` those that it would hold after the operation it has voted for (it updates only the
    layers of its place), ``units`` how many there are in all. ``profiled``: it knows what the layers cost.
    ``everybody_leaves``: as its last vote said. ``logged``: it has kept what it takes to compute others' layers again.
    ``undone``: units that were updated before the vote for the operation in hand and taken back since, or will be if
    it is dropped. They are as they were but for rounding; copies that nobody has touched are better.
    ``step``: how many steps it has made, where replicas train apart and need not have made the same number.
    """

    operation: int | None = None
    voted: bool = False
    doing: str = ""
    boundary: bool = False
    broken: bool = False
    leaving: bool = False
    result: float | None = None
    resumable: bool = False
    held: tuple[int, ...] = ()
    next: tuple[int, ...] = ()
    units: int = 0
    profiled: bool = False
    everybody_leaves: bool = False
    logged: bool = False
    undone: tuple[int, ...] = ()
    step: int = 0


def newest_of(standings: Iterable[Standing]) -> int | None:
    """The newest operation that somebody has committed."""
    return max((s.operation for s in standings if s.operation is not None), default=None)


def still_held(standing: Standing, newest: int) -> tuple[int, ...]:
    """The units that a worker holds as they are after ``newest``, or will when it has rolled forward.

    >>> still_held(Standing(operation=4, voted=True, held=(0, 1), next=(1,)), 5)
    (1,)
    >>> still_held(Standing(operation=4, held=(0, 1)), 5)
    ()
    """
    if standing.operation == newest:
        return standing.held
    return standing.next if standing.operation == newest - 1 and standing.voted else ()


def lost_units(standings: Collection[Standing]) -> list[int]:
    """Units of a state that somebody has trained, and nobody holds any more.

    >>> lost_units([Standing(operation=3, held=(0,), units=2), Standing()])
    [1]
    """
    newest = newest_of(standings)
    if not newest:
        return []
    held = {unit for standing in standings for unit in still_held(standing, newest)}
    return [unit for unit in range(max(s.units for s in standings)) if unit not in held]


def may_be_replayed(standings: Collection[Standing]) -> bool:
    """Whether units that nobody holds may come back from records: those who have trained know best.

    >>> may_be_replayed([Standing(operation=3, logged=True), Standing()]), may_be_replayed([Standing(operation=3)])
    (True, False)
    """
    trained = [standing for standing in standings if standing.operation is not None]
    return bool(trained) and all(standing.logged for standing in trained)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker in a generation, with the standing it came with. ``host`` names what may be lost with it at once."""

    worker: str
    address: str
    standing: Standing = field(default_factory=Standing)
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An agreed, numbered list of workers. Position in ``members`` is the rank."""

    number: int
    members: tuple[Member, ...]
    reason: str = ""

    def rank_of(self, worker: str) -> int:
        return [member.worker for member in self.members].index(worker)

    @property
    def workers(self) -> list[str]:
        return [member.worker for member in self.members]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Generation:
        members = tuple(
            Member(worker=m["worker"], address=m["address"], standing=Standing(**m["standing"]), host=m["host"])
            for m in data["members"]
        )
        return Generation(number=data["number"], members=members, reason=data["reason"])


class Store(Protocol):
    """Where the members of one generation leave their addresses for each other."""

    closed: bool  # the generation is over: nothing will arrive any more

    def put(self, key: str, value: bytes) -> None: ...

    def take(self, key: str) -> bytes: ...


class Membership(Protocol):
    """What training asks of the cluster."""

    worker: str

    def regroup(self, standing: Standing) -> Generation:
        """Show a standing, wait for the next generation that includes this worker."""

    def store(self, generation: Generation) -> Store:
        """The store of that generation, empty at its begin."""

    def on_break(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(generation number)`` from any thread once that generation is over."""

    def wishes(self) -> tuple[bool, bool]:
        """(somebody waits to join, this worker is asked to leave), for the next vote."""

    def doing(self, operation: int, kind: str) -> None:
        """What this worker is about to do, so that a disagreement can be noticed. Must cost nothing."""

    def formed(self) -> None:
        """The generation's group is connected: the store is no longer needed."""

    def progressed(self, generation: Generation, operation: int) -> None:
        """The first operation of a generation is committed: recovery is over."""

    def finished(self) -> None:
        """The last step is committed: nobody needs to be replaced any more."""


class Solo:
    """Membership of one process that runs without an agent.

    >>> Solo().regroup(Standing(operation=3)).workers
    ['0.0']
    """

    worker = "0.0"

    def __init__(self) -> None:
        self._number = 0

    def regroup(self, standing: Standing) -> Generation:
        self._number += 1
        member = Member(worker=self.worker, address="127.0.0.1", standing=standing)
        return Generation(number=self._number, members=(member,), reason="one process, no agent")

    def store(self, generation: Generation) -> Store:
        raise AssertionError("a generation of one needs no store")

    def on_break(self, callback: Callable[[int], None]) -> None: ...

    def wishes(self) -> tuple[bool, bool]:
        return (False, False)

    def doing(self, operation: int, kind: str) -> None: ...

    def formed(self) -> None: ...

    def progressed(self, generation: Generation, operation: int) -> None: ...

    def finished(self) -> None: ...
