"""A crowd: a thousand workers in a world, which keep the protocol and train nothing.

The roster, desks, seats, announcements and ``settle`` are the real ones, and so are the world's faults. A worker is no
fiber: what it does next is a timer. Instead of weights it has a *chain*: for each operation the generation whose vote
has succeeded. Two workers with the same chain would have the same weights; an operation that is lost, made twice, or
taken from two generations shows in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.cluster import announce
from holdfast.cluster.membership import Generation, Message, Standing, new_incarnation
from holdfast.cluster.pulse import Still, Where
from holdfast.cluster.seat import Next, Over, Seat, Stop
from holdfast.commit.settle import Account, Settlement, settle
from tests.injected import injected
from tests.world.cluster import HEARTBEAT, LOCAL, Agent
from tests.world.strikes import is_possible, strike
from tests.world.world import World

STEP = 0.02  # simulated seconds of a step, on average
BETWEEN = 6.0  # simulated seconds from one fault to the next, at most: some strike in the middle of a recovery
FAULTS = (  # what strikes; more joins than else, so that the number of workers stays about the same
    *("kill", "kill two", "hang", "deadlock", "machine", "leave", "join", "join", "join", "join"),
    *("lines", "doze", "sleep", "crash", "fail over", "isolate", "slow", "flood"),
)


class Walker:
    """One worker. ``client``: itself, as an agent talks to it."""

    def __init__(self, crowd: Crowd, name: str, agent: Agent) -> None:
        self.name, self.crowd, self._agent = name, crowd, agent
        self.dead = self.frozen = False
        self.fiber = SimpleNamespace(stuck=False)
        self.client, self.run = self, None
        self.seat = Seat(worker=name, host=str(agent.host), label={"what": "a crowd"}, incarnation=new_incarnation())
        self.chain: list[str] | None = None  # None: it has no state yet
        self.voted = ""  # the generation in which it has voted for the next operation
        self._asked = False  # its wish to leave was in the last vote
        self._since = 0.0  # when it last got on
        self._say(self.seat.hello())
        self._show(boundary=True)
        self._beat()

    @property
    def _stands(self) -> bool:
        """Whether it does nothing any more."""
        return self.dead or self.frozen or self.fiber.stuck

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self.crowd.scheduler.later(seconds, what)

    # --- its agent -------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self._later(LOCAL / 1000, lambda: None if self.dead else self._agent.worker_said(self.name, message))

    def _beat(self) -> None:
        if self.dead:
            return
        if not self.frozen:
            where: Where = "step" if self.fiber.stuck else "wait"
            still = Still(where=where, seconds=self.crowd.scheduler.now - self._since)
            self._agent.worker_said(self.name, self.seat.beat() | {"still": still.to_json()})
        self._later(HEARTBEAT / 5, self._beat)

    def tell(self, message: Message) -> None:
        self._later(LOCAL / 1000, lambda: self._hear(message))

    def _hear(self, message: Message) -> None:
        if self.dead or self.frozen:
            return
        news = self.seat.hear(message)
        if isinstance(news, Stop):
            self.end(news.code)
        elif message["type"] == "leave" and self.seat.generation is None:
            self.end(0)
        elif self.fiber.stuck:
            return
        elif isinstance(news, Next):
            self._enter(news.generation)
        elif isinstance(news, Over) and self.seat.standing is None:
            self._show(broken=True)

    def kill(self) -> None:
        self.end(-9)

    def vanish(self) -> None:
        self.end(-9)

    def thawed(self) -> None: ...

    def end(self, code: int) -> None:
        if not self.dead:
            self.dead, self.frozen = True, False
            self._later(LOCAL / 1000, lambda: self._agent.ended(self.name, code, None))

    # --- training --------------------------------------------------------------------------------

    def _show(self, **fields: bool) -> None:
        """Show its standing, as a ``Cohort`` would."""
        held = () if self.chain is None else (0,)
        account = Account(units=1, held=held, next=held if self.voted else ())
        operation = None if self.chain is None else len(self.chain)
        standing = Standing(operation=operation, voted=bool(self.voted), payload=account.to_json(), **fields)
        self._say(self.seat.show(standing))

    def _is_in(self, generation: Generation) -> bool:
        here = self.seat.generation
        return not self._stands and here is not None and here.name == generation.name and self.seat.standing is None

    def _enter(self, generation: Generation) -> None:
        """Settle with the others; whoever lacks the state gets it a little later."""
        settled = self.crowd.settle(generation)
        if self.name in settled.forward:
            assert self.chain is not None
            self.chain.append(self.voted)
        self.voted = ""
        if self.name in settled.newcomers:
            teller = self.crowd.walkers[settled.teller]
            self._later(self.crowd.latency(), lambda: self._copy(generation, settled, teller))
        else:
            self.chain = [] if settled.begins else self.chain
            self._ready(generation, settled)

    def _copy(self, generation: Generation, settled: Settlement, teller: Walker) -> None:
        """Take over the state, if its holder is still there."""
        if self._is_in(generation) and not teller._stands and teller.chain is not None:
            self.chain = teller.chain[: settled.operation]
            self._ready(generation, settled)

    def _ready(self, generation: Generation, settled: Settlement) -> None:
        assert self.chain is not None
        assert len(self.chain) == settled.operation, f"{self.name} has {len(self.chain)} of {settled.operation}"
        self.seat.formed()
        self._attempt(generation)

    def _attempt(self, generation: Generation) -> None:
        self._later(self.crowd.scheduler.chance.expovariate(1 / STEP), lambda: self._vote(generation))

    def _vote(self, generation: Generation) -> None:
        if self._is_in(generation):
            assert self.chain is not None
            self.voted, self._asked = generation.name, self.seat.leave
            self.crowd.vote(generation, len(self.chain), self, wish=any(self.seat.wishes()))

    def succeeded(self, generation: Generation, *, stop: bool) -> None:
        """All have voted."""
        if not self._is_in(generation):
            return
        assert self.chain is not None
        self.chain.append(generation.name)
        self.voted, self._since = "", self.crowd.scheduler.now
        self._say(self.seat.progressed(generation, len(self.chain)))
        if stop:
            self._show(boundary=True, leaving=self._asked)
        else:
            self._attempt(generation)


class Crowd(World):
    """Machines of eight workers each, and faults at random moments until so many have struck."""

    def __init__(self, seed: int, *, workers: int, faults: int) -> None:
        self.walkers: dict[str, Walker] = {}
        self._settled: dict[str, Settlement] = {}
        self._ballots: dict[tuple[str, int], tuple[set[str], list[bool]]] = {}
        self._left, self._at_vote = faults, False
        machines = max(2, workers // 8)
        limit = 100.0 + 20 * faults  # simulated seconds
        more: dict[str, Any] = {
            "maximum_hosts": 10 * machines + faults,
            "elected": True,
            "limit": limit,
            "minimum_hosts": 1,
        }
        super().__init__(seed, lambda process: None, lambda *_: None, hosts=[8] * machines, **more)
        self.scheduler.later(5.0, self._plan)

    def start(self, name: str, agent: Agent) -> Any:
        self.walkers[name] = Walker(self, name, agent)
        self.processes.append(self.walkers[name])  # type: ignore[arg-type]
        return self.walkers[name]

    def join(self, slots: int) -> None:
        super().join(8)

    def _plan(self) -> None:
        """Strike now, or when the next vote succeeds: some members hear of it then, others do not."""
        if self.scheduler.chance.random() < 0.5:
            self._strike()
        else:
            self._at_vote = True

    def _strike(self) -> None:
        kind, victim = self.scheduler.chance.choice(FAULTS), self.scheduler.chance.choice(self.alive)
        if is_possible(self, victim, kind):
            self.log("fault", kind=kind, phase="any", worker=victim.name)
            injected[f"simulated: {kind}"] += 1
            strike(self, victim, kind)
            self._left -= 1
        if self._left:
            self.scheduler.later(self.scheduler.chance.uniform(0.0, BETWEEN), self._plan)

    def settle(self, generation: Generation) -> Settlement:
        """As all members do, with the same result."""
        if generation.name not in self._settled:
            self._settled[generation.name] = settle({m.worker: m.standing for m in generation.members})
        return self._settled[generation.name]

    def vote(self, generation: Generation, operation: int, voter: Walker, *, wish: bool) -> None:
        """Once all members have voted, each hears of it some rounds of messages later, if it still can."""
        voters, wishes = self._ballots.setdefault((generation.name, operation), (set(), []))
        voters.add(voter.name)
        wishes.append(wish)
        if len(voters) == len(generation.members):
            stop = any(wishes)
            if self._at_vote:
                self._at_vote = False
                self.scheduler.later(self.latency(), self._strike)
            for name in sorted(voters):
                walker = self.walkers[name]
                rounds = self.scheduler.chance.randint(1, len(voters).bit_length())
                seconds = sum(self.latency() for _ in range(rounds))
                self.scheduler.later(seconds, lambda w=walker: w.succeeded(generation, stop=stop))

    # --- its end ---------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Whether all faults have struck, and all who are left have trained together after that."""
        roster = self.coordinator.roster
        if self._left or roster is None or roster.generation is None:
            return False
        working = [w for agent in self.agents if agent.code is None for w in agent.workers.values()]
        name = roster.generation.name
        expected = sum(agent.slots for agent in self.agents if agent.code is None and not agent.leaving)
        together = [w for w in working if w.chain and w.chain[-1] == name]
        return len(together) == len(working) == expected

    def judge(self) -> None:
        """All have the same operations, each from one generation, later ones from later generations.

        Of the last one some may not have heard yet that its vote has succeeded.
        """
        chains = [w.chain or [] for w in self.walkers.values() if not w._stands]
        chain = max(chains, key=len)
        assert all(chain[: len(each)] == each and len(each) + 1 >= len(chain) for each in chains)
        numbers = [int(name.partition("/")[0]) for name in chain]
        assert numbers == sorted(numbers)
        formed = [event["number"] for event in self.of("generation")]
        assert formed == sorted(set(formed)), "no number is used twice"


@contextmanager
def shared_announcements() -> Iterator[None]:
    """Every desk and seat reads the same announcements; here they are read once."""
    known: dict[tuple[str, str], Generation] = {}
    heard = announce.heard

    def read(message: Message, base: Generation | None) -> Generation:
        key = (f"{message['number']}/{message['life']}", message["base"])
        if key not in known:
            known[key] = heard(message, base)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announce, "heard", read)
        yield
