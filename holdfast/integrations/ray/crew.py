"""The crew of a run: which agents Ray is to start, and when to give up. A state machine without Ray or a clock.

Ray keeps an actor that does not fit waiting until it does, and its autoscaler takes that for demand. So the crew asks
for the maximum at once, and for another one in place of each that is lost or told to leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.cluster.watch import Shortage
from holdfast.words import count

REPLACE_SECONDS = 0.5  # after a loss: the survivors that recover may need the cores
TRIES = 5  # agents in a row that end within SHORT_SECONDS: another one would not fare better
SHORT_SECONDS = 5.0
NO_DEADLINE_SECONDS = 30.0  # of grace on a node that Ray drains without a deadline


@dataclass(frozen=True, kw_only=True)
class Start:
    """Order: have Ray start an agent."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Order: tell an agent that its machine goes in so many seconds."""

    number: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Order: end the run."""

    text: str


CrewOrder = Start | Leave | GiveUp


@dataclass(kw_only=True)
class CrewMember:
    """An agent that Ray was asked for."""

    node: str = ""  # empty until Ray has placed it
    since: float = 0.0  # when it was placed
    leaving: bool = False


@dataclass(kw_only=True)
class AgentCrew:
    """Keeps ``maximum`` agents asked for, and gives up after ``patience`` seconds with fewer than ``minimum`` of them.

    ``needs`` says in words what each of them needs. Times are in seconds, of any clock.

    >>> crew = AgentCrew(minimum=1, maximum=2, patience=60.0, needs="1 CPU")
    >>> crew.orders(now=0.0)
    [Start(number=0), Start(number=1)]
    >>> crew.placed(0, node="a", now=1.0)
    >>> crew.lost(0, cause="its node has died", now=9.0)
    >>> crew.orders(now=9.1), crew.orders(now=9.6)
    ([], [Start(number=2)])
    """

    minimum: int
    maximum: int
    patience: float
    needs: str
    members: dict[int, CrewMember] = field(default_factory=dict)
    has: str = ""  # what the cluster has, in words
    finishing: bool = False  # the training is over: nobody is started any more
    _next: int = 0
    _not_before: float = 0.0
    _short: int = 0
    _cause: str = ""

    def __post_init__(self) -> None:
        self._shortage = Shortage(patience=self.patience)

    @property
    def present(self) -> int:
        """Number of agents that Ray has placed."""
        return sum(bool(member.node) for member in self.members.values())

    def placed(self, number: int, *, node: str, now: float) -> None:
        """Take in where Ray has placed an agent."""
        self.members[number].node, self.members[number].since = node, now

    def ended(self, number: int) -> None:
        """Take in that an agent has ended as it should: it has left, or the training is over."""
        if not self.members.pop(number).leaving:
            self.finishing = True

    def lost(self, number: int, *, cause: str, now: float) -> None:
        """Take in that an agent has ended otherwise."""
        member = self.members.pop(number)
        brief = not member.leaving and (not member.node or now - member.since < SHORT_SECONDS)
        self._short = self._short + 1 if brief else 0
        self._cause, self._not_before = cause, now + REPLACE_SECONDS

    def orders(self, now: float, draining: Mapping[str, float] | None = None) -> list[CrewOrder]:
        """Return what is to be done now. ``draining``: nodes that will be taken away, and in how many seconds.

        0 seconds: Ray does not know.
        """
        if self.finishing:
            return []
        if (reason := self._hopeless(now)) is not None:
            return [GiveUp(text=reason)]
        orders: list[CrewOrder] = []
        gone = draining or {}
        for number, member in self.members.items():
            if member.node in gone and not member.leaving:
                member.leaving = True
                orders.append(Leave(number=number, seconds=gone[member.node] or NO_DEADLINE_SECONDS))
        if now >= self._not_before:
            for _ in range(self.maximum - sum(not member.leaving for member in self.members.values())):
                self.members[self._next] = CrewMember()
                orders.append(Start(number=self._next))
                self._next += 1
        return orders

    def _hopeless(self, now: float) -> str | None:
        """Return why the run cannot go on; None if it can."""
        if self._short >= TRIES:
            return f"{TRIES} workers in a row ended as soon as they were started: {self._cause}"
        if not self._shortage.lasts(self.present, self.minimum, now):
            return None
        here = f"Ray has placed {self.present} of at least {count(self.minimum, 'worker')} in {self.patience:g} s"
        return f"{here}: each needs {self.needs}, and the cluster has {self.has or 'nothing'}"
