"""The election of the coordinator, as an agent sees it: a state machine that returns what to do. No sockets, no clock.

Whoever creates the key ``coordinator`` in etcd holds the role, as long as its lease lives. All others follow. If the
holder's port refuses connections, its agent has ended: the agent owns the listening socket. Then its lease is revoked,
so that nobody waits for it to run out. A machine that vanishes refuses nothing; its lease runs out by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.cluster.quorum.records import Address, Holder

DEPOSED = 76  # exit code of a coordinator that finds another one in its place
RESIGNED = 77  # exit code of a coordinator that leaves its role to a machine that may reach more: ``why_resign``
# For which an agent that has resigned does not want the role; twice as long each further time. Longer than the next
# coordinator needs to find out whether it reaches more; shorter than the patience with which workers wait for one.
REST_SECONDS = 12.0
LONGEST_REST_SECONDS = 24.0
REVOKE_AGAIN_SECONDS = 30.0  # a firewall may refuse, too: so an agent that is elected again is left alone for a while


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The key ``coordinator`` has changed. None: nobody holds the role."""

    holder: Holder | None


@dataclass(frozen=True, kw_only=True)
class LeaseGone:
    """This agent's lease has run out, or was revoked, and a new one is there."""

    lease: int


@dataclass(frozen=True, kw_only=True)
class PortRefused:
    """A coordinator's address refuses connections."""

    address: Address


@dataclass(frozen=True, kw_only=True)
class CoordinatorEnded:
    """This agent's coordinator process has ended."""

    code: int


@dataclass(frozen=True, kw_only=True)
class EtcdSilent:
    """Etcd has not answered this agent for its patience: its lease is gone, or as good as gone."""


@dataclass(frozen=True, kw_only=True)
class Rested:
    """The time has passed for which this agent leaves the role to others."""


Event = Seen | LeaseGone | PortRefused | CoordinatorEnded | EtcdSilent | Rested


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Try to create the key ``coordinator``; then look who holds the role."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Start the coordinator's process: this agent holds the role."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class StepDown:
    """Kill the coordinator's process: this agent does not hold the role any more."""


@dataclass(frozen=True, kw_only=True)
class Follow:
    """Connect agent and workers to the coordinator at this address."""

    address: Address


@dataclass(frozen=True, kw_only=True)
class Revoke:
    """Revoke the lease of an agent that has ended."""

    lease: int


@dataclass(frozen=True, kw_only=True)
class Resign:
    """Give up the lease, and the role with it, and get another. ``rest`` seconds later, say that it is ``Rested``."""

    rest: float


Action = Campaign | Serve | StepDown | Follow | Revoke | Resign


class Election:
    """One agent's part in the election.

    >>> election = Election(agent="a", lease=7)
    >>> election.step(Seen(holder=None), 0.0)
    [Campaign()]
    >>> election.step(Seen(holder=Holder(agent="a", lease=7, address=("::1", 1), epoch=5)), 0.1)
    [Serve(epoch=5), Follow(address=('::1', 1))]
    """

    def __init__(self, *, agent: str, lease: int) -> None:
        self.holder: Holder | None = None
        self.serves = False  # its coordinator's process runs
        self.over = False  # the run is over, or this agent leaves: it does not want the role any more
        self._agent, self._lease = agent, lease
        self._revoked: dict[str, float] = {}  # agents whose lease this one has revoked, and when
        self._rests = False  # it has resigned, and leaves the role to others for a while
        self._rest = REST_SECONDS  # for how long, the next time

    def step(self, event: Event, now: float) -> list[Action]:
        """Take in an event at the time ``now`` (seconds); return what to do, in order."""
        if isinstance(event, LeaseGone):
            self._lease = event.lease
            return self._judge()
        if isinstance(event, PortRefused):
            return self._refused(event.address, now)
        if isinstance(event, CoordinatorEnded):
            return self._ended(event.code)
        if isinstance(event, EtcdSilent):
            self._lease = 0  # whoever has the role now: it is not this agent, until it has a new lease
            return self._stop_serving()
        if isinstance(event, Rested):
            self._rests = False
            return self._judge()
        self.holder = event.holder
        return self._judge()

    def _judge(self) -> list[Action]:
        """Serve, follow or campaign, as the holder and this agent's lease are now."""
        holder = self.holder
        mine = holder is not None and (holder.agent, holder.lease) == (self._agent, self._lease)
        actions = [] if mine else self._stop_serving()
        if holder is None:
            return actions if self.over or self._rests else [*actions, Campaign()]
        if mine and not self.serves and not self.over:
            self.serves = True
            actions.append(Serve(epoch=holder.epoch))
        return [*actions, Follow(address=holder.address)]

    def _stop_serving(self) -> list[Action]:
        served, self.serves = self.serves, False
        return [StepDown()] if served else []

    def _refused(self, address: Address, now: float) -> list[Action]:
        holder = self.holder
        if holder is None or holder.agent == self._agent or holder.address != address:
            return []
        if now - self._revoked.get(holder.agent, -REVOKE_AGAIN_SECONDS) < REVOKE_AGAIN_SECONDS:
            return []
        self._revoked[holder.agent] = now
        return [Revoke(lease=holder.lease)]

    def _ended(self, code: int) -> list[Action]:
        """A coordinator ends with 0 when the run is over. One that was killed is started again, in the same epoch."""
        if not self.serves:
            return []
        self.serves = False
        if code == 0:
            self.over = True
        if self.over or code == DEPOSED:
            return []
        if code == RESIGNED:
            return self._resign()
        return self._judge()

    def _resign(self) -> list[Action]:
        rest, self._rest = self._rest, min(2 * self._rest, LONGEST_REST_SECONDS)
        self._rests, self._lease = True, 0  # until it has a new lease, nobody's role is its own
        return [StepDown(), Resign(rest=rest)]
