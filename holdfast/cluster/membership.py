"""Membership: the narrow contract between training and the part that knows which workers are alive.

Training needs four things: show a *standing*, get the next *generation*, hear that the current one is over, leave.
``client.Client`` provides them with the coordinator, and ``Solo`` for one process without an agent. Another
implementation, with etcd for example, can take their place.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from holdfast.cluster.group import Group

Message = dict[str, Any]  # one JSON object, as workers, agents and the coordinator send it
ENDING_SECONDS = 3600.0  # for a worker that is sent away to end: longer than it may wait for its last checkpoint
GIVEN_UP = 75  # exit code of a worker that can no longer take part as it is; its agent starts a new one


def new_incarnation() -> str:
    """Return a new random name for a run, a coordinator, an agent or a worker's process: 64 bits."""
    return secrets.token_hex(8)


def worker_order(worker: str) -> tuple[int, ...]:
    """Sort key for worker names ``host.ordinal``: as numbers, so that 0.10 comes after 0.9.

    >>> sorted(["0.10", "1.0", "0.9"], key=worker_order)
    ['0.9', '0.10', '1.0']
    """
    return tuple(int(part) for part in worker.split("."))


def machine_of(worker: str) -> int:
    """Return the number of the agent that started a worker.

    >>> machine_of("2.17")
    2
    """
    return worker_order(worker)[0]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A worker's progress, which it shows when a generation ends.

    The cluster layer reads all fields but the last. ``payload`` is opaque to it: JSON values that the workers
    themselves, and the ``Judge``, understand.
    """

    operation: int | None = None  # number of operations it has committed; None: it holds no state yet
    voted: bool = False  # it has voted for the next operation and still holds its complete result
    boundary: bool = False  # it is between two steps, where joiners may come in
    leaving: bool = False  # it was asked to leave, and the others have voted on that
    broken: bool = False  # the generation failed it
    unreached: tuple[str, ...] = ()  # members whose machines did not answer it in that generation
    refused: tuple[str, ...] = ()  # members whose machines refused it: they may only have given the generation up
    ports: tuple[int, ...] = ()  # of a team: at which the same ranks of other teams reach each of its ranks
    payload: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the standing as JSON values; ``Standing(**values)`` reads them."""
        return dict(vars(self))


def newest_of(standings: Iterable[Standing]) -> int | None:
    """Return the newest operation that one of these workers has committed, None if nobody holds state.

    >>> newest_of([Standing(operation=3), Standing(operation=4), Standing()])
    4
    """
    return max((s.operation for s in standings if s.operation is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Whether some workers can carry the run on, and why."""

    whole: bool  # together they hold all of the state
    recoverable: bool  # what they lack can be computed again by themselves
    resumable: bool  # a checkpoint may have what they lack
    reason: str

    @property
    def goes_on(self) -> bool:
        """Whether training can go on without a return to a checkpoint."""
        return self.whole or self.recoverable


class Judge(Protocol):
    """A function that reads the payloads of standings: the only thing the cluster layer asks about state."""

    def __call__(self, standings: Mapping[str, Standing], *, trained: bool) -> Judgement:
        """Judge the survivors. ``trained``: somebody is known to have committed something before."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker in a generation, with the standing that it has shown. ``host``: its failure domain."""

    worker: str
    address: str
    port: int = 0  # at which the other workers reach it
    standing: Standing = field(default_factory=Standing)
    host: str = ""
    incarnation: str = ""  # random; tells this process from another one of the same name


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An agreed, numbered list of workers. Position in ``members`` is the rank.

    Numbers alone can repeat: a coordinator that was killed may have told a number to workers that its successor never
    hears of. ``run`` and ``life`` tell such generations apart.

    >>> Generation(number=3, members=(), life="5e1f").name
    '3/5e1f'
    """

    number: int  # grows from one generation of a run to the next
    members: tuple[Member, ...]
    reason: str = ""
    run: str = ""  # random; the start of the run that it belongs to
    life: str = ""  # random; the coordinator process that formed it

    @property
    def name(self) -> str:
        """The name of this generation in messages, which no other one has."""
        return f"{self.number}/{self.life}"

    def rank_of(self, worker: str) -> int:
        """Return the rank of a member. Raises ``ValueError`` for a worker that is none."""
        if worker not in self._ranks:
            raise ValueError(f"{worker} is no member of generation {self.name}")
        return self._ranks[worker]

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """The rank of each member: looked up for all members at once, at the begin of a run."""
        return {member.worker: rank for rank, member in enumerate(self.members)}

    @property
    def workers(self) -> list[str]:
        """The members' names, by rank."""
        return [member.worker for member in self.members]

    @property
    def standings(self) -> dict[str, Standing]:
        """The standing that each member has shown to get in."""
        return {member.worker: member.standing for member in self.members}

    def to_json(self) -> dict[str, Any]:
        """Return the generation as JSON values, for ``from_json``."""
        members = [vars(member) | {"standing": member.standing.to_json()} for member in self.members]
        facts = {"number": self.number, "reason": self.reason, "run": self.run, "life": self.life}
        return {**facts, "members": members}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Generation:
        """Read what ``to_json`` gave. Raises ``KeyError`` or ``TypeError`` on anything else."""
        members = tuple(Member(**m | {"standing": Standing(**m["standing"])}) for m in data["members"])
        return Generation(**data | {"members": members})


class Membership(Protocol):
    """The methods of the cluster that training calls."""

    worker: str

    def regroup(self, standing: Standing) -> Generation:
        """Show a standing, wait for the next generation that includes this worker."""

    def connect(self, generation: Generation, device: torch.device) -> Group:
        """Return the group of that generation. It does not wait: ``Group.gather`` does."""

    def on_break(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(generation number)`` from any thread once that generation is over."""

    def wishes(self) -> tuple[bool, bool]:
        """Return (somebody waits to join, this worker is asked to leave), for the next vote."""

    def doing(self, operation: int, kind: str) -> None:
        """Note what this worker is about to do, so that a disagreement can be noticed. Must cost nothing."""

    def formed(self) -> None:
        """Note that all members have met: from here on they can do without the coordinator."""

    def progressed(self, generation: Generation, operation: int) -> None:
        """Tell that the first operation of a generation is committed: recovery is over."""

    def finished(self) -> None:
        """Tell that the last step is committed: nobody needs to be replaced any more."""


class Solo:
    """Membership of one process that runs without an agent.

    >>> Solo().regroup(Standing(operation=3)).workers
    ['0.0']
    """

    worker = "0.0"

    def __init__(self) -> None:
        self._number = 0
        self._run = new_incarnation()

    def regroup(self, standing: Standing) -> Generation:
        self._number += 1
        member = Member(worker=self.worker, address="127.0.0.1", standing=standing, incarnation=self._run)
        reason = "one process, no agent"
        return Generation(number=self._number, members=(member,), reason=reason, run=self._run, life=self._run)

    def connect(self, generation: Generation, device: torch.device) -> Group:
        from holdfast.cluster.group import Group  # imports this module, and torch

        return Group(generation, 0)

    def on_break(self, callback: Callable[[int], None]) -> None: ...

    def wishes(self) -> tuple[bool, bool]:
        return (False, False)

    def doing(self, operation: int, kind: str) -> None: ...

    def formed(self) -> None: ...

    def progressed(self, generation: Generation, operation: int) -> None: ...

    def finished(self) -> None: ...
