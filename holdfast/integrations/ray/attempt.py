"""One attempt of a run: a coordinator beside the driver, and a crew of agents that Ray places.

An attempt survives what holdfast survives. It is over when the training is, when a script has failed, or when too few
agents are left for too long; then all of its processes have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.cluster.agent import TOO_FEW
from holdfast.cluster.grace import NOT_SAVED
from holdfast.cluster.keeper import CoordinatorKeeper, free_port
from holdfast.cluster.membership import new_incarnation
from holdfast.integrations.ray import native
from holdfast.integrations.ray.agent_actor import AgentActor, AgentEnd, Job
from holdfast.integrations.ray.crew import AgentCrew, CrewOrder, GiveUp, Leave, Start

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.train import RunConfig, ScalingConfig

LOOK_SECONDS = 0.25  # between two looks at the crew
DRAIN_SECONDS = 1.0  # between two questions which nodes will be taken away
LAST_SECONDS = 20.0  # for agents to end by themselves when the run is over
OUT_OF_SIGHT_SECONDS = 3.0  # that an agent may be: a connection of Ray's that breaks is no reason to end its worker
SLACK_SECONDS = 15.0  # of the coordinator's patience: the crew gives up before it, as it knows what is missing
PREEMPTED = 128  # exit codes above it: an agent was asked to leave

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome:
    """How an attempt has ended: 0, or an exit code of ``holdfast run`` and a sentence."""

    code: int
    text: str = ""

    @property
    def preempted(self) -> bool:
        """Whether all were asked to leave: no failure of the run."""
        return self.code > PREEMPTED


def outcome_of(ends: list[AgentEnd]) -> AttemptOutcome:
    """Return the outcome that agents tell of by their ends: of errors the first one, and of notices a loss.

    >>> outcome_of([AgentEnd(code=1, text="ValueError"), AgentEnd(code=0, text="")]).code
    0
    """
    if not ends:
        return AttemptOutcome(code=1, text="all workers were lost before one of them had ended")
    if any(end.code == 0 for end in ends):
        return AttemptOutcome(code=0)
    errors = [end for end in ends if 0 < end.code < PREEMPTED and end.code != NOT_SAVED]
    notices = [end for end in ends if end.code >= PREEMPTED]
    end = (errors or notices or ends)[0]
    return AttemptOutcome(code=end.code, text=end.text or f"a worker's agent has ended with code {end.code}")


class RayAttempt:
    """Runs a crew to its end. ``look`` is called now and then, to take in what workers have reported."""

    def __init__(self, job: Job, scaling: ScalingConfig, run: RunConfig, *, look: Callable[[], None]) -> None:
        self._scaling, self._run, self._look = scaling, run, look
        address = native.own_address()
        self._keeper = CoordinatorKeeper(f"{address}:{free_port(address)}")
        self._job = replace(job, endpoint="{}:{}".format(*(self._keeper.address or ("", 0))))
        needs = native.needs(scaling)
        self._crew = AgentCrew(
            minimum=scaling.min_workers, maximum=scaling.max_workers, patience=job.patience, needs=needs
        )
        self._actors: dict[int, ActorHandle] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._ends: list[AgentEnd] = []
        self._given_up: AttemptOutcome | None = None

    async def run(self) -> AttemptOutcome:
        """Run until the training is over, or cannot go on."""
        settings = self._job.settings()
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        options = settings.coordinator_options(run=new_incarnation(), master_port=self._keeper.master_port)
        options += ["--head", ""]  # no agent is the first
        options += ["--patience", str(self._job.patience + SLACK_SECONDS)]
        keeping = asyncio.create_task(self._keeper.keep(options, settings.token, self._coordinator_restarted))
        draining = asyncio.create_task(self._look_for_draining())
        try:
            while not keeping.done() and self._given_up is None:
                for order in self._crew.orders(time.monotonic()):
                    self._carry_out(order)
                await asyncio.to_thread(self._look)
                await asyncio.wait([keeping], timeout=LOOK_SECONDS)
            await self._last_words()
            return self._given_up or outcome_of(self._ends)
        finally:
            draining.cancel()
            for life in self._lives.values():
                life.cancel()  # which ends its actor
            await asyncio.gather(*self._lives.values(), return_exceptions=True)
            for actor in self._actors.values():  # whose life had not begun
                native.kill(actor)
            self._keeper.stop()
            await keeping
            self._keeper.close()

    def _coordinator_restarted(self) -> None:
        logger.warning("the coordinator has ended, and is started again")

    async def _last_words(self) -> None:
        """Wait for agents that end by themselves, as the coordinator has told them."""
        ending = [self._lives[number] for number, member in self._crew.members.items() if member.node]
        if ending and self._given_up is None:
            await asyncio.wait(ending, timeout=LAST_SECONDS)

    async def _look_for_draining(self) -> None:
        """Tell agents to leave whose nodes Ray will take away, for ever."""
        while True:
            gone = await asyncio.to_thread(native.draining_nodes)
            self._crew.has = await asyncio.to_thread(native.cluster_has)
            for order in self._crew.orders(time.monotonic(), gone):
                self._carry_out(order)
            await asyncio.sleep(DRAIN_SECONDS)

    def _carry_out(self, order: CrewOrder) -> None:
        if isinstance(order, Start):
            actor = native.start(AgentActor, self._job, scaling=self._scaling, run=self._run)
            self._actors[order.number] = actor
            self._lives[order.number] = asyncio.create_task(self._live(order.number, actor))
        elif isinstance(order, Leave):
            self._actors[order.number].leave.remote(order.seconds)
        elif isinstance(order, GiveUp):
            self._given_up = self._given_up or AttemptOutcome(code=TOO_FEW, text=order.text)

    async def _live(self, number: int, actor: ActorHandle) -> None:
        """Follow an agent to its end."""
        try:
            node, _ = await native.ask(actor.place.remote())
            self._crew.placed(number, node=node, now=time.monotonic())
            end = await self._end_of(actor)
        except native.Lost as e:
            logger.warning("a worker of Ray is lost: %s", e)
            self._crew.lost(number, cause=str(e), now=time.monotonic())
            return
        finally:  # its place is free for another; Ray may only have lost sight of it
            native.kill(self._actors.pop(number))
        self._ends.append(end)
        if end.code == 0 or self._crew.members[number].leaving:
            self._crew.ended(number)
        else:
            self._crew.lost(number, cause=end.text or f"exit code {end.code}", now=time.monotonic())

    async def _end_of(self, actor: ActorHandle) -> AgentEnd:
        """Run an agent, and return its end. It is asked again if Ray has lost sight of it: it may train on."""
        since = time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                end: AgentEnd = await native.ask(actor.run.remote())
                return end
            except native.OutOfSight:
                now = time.monotonic()
                since = now if now - asked > OUT_OF_SIGHT_SECONDS else since  # it was seen meanwhile
                if now - since > OUT_OF_SIGHT_SECONDS:
                    raise
                await asyncio.sleep(LOOK_SECONDS)
