"""A worker's place in the cluster: ``Membership`` for workers of ``holdfast run``.

A separate thread listens to the agent, who passes on what the coordinator says. So a worker that is deep in a
computation, or blocked on a peer that has vanished, still learns at once that its generation is over. Losing the
coordinator does not stop training.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.cluster import lifeline
from holdfast.cluster.group import Group
from holdfast.cluster.labels import Label
from holdfast.cluster.links.hub import Hub
from holdfast.cluster.links.member_links import LinkSettings
from holdfast.cluster.membership import ENDING_SECONDS, Generation, Message, Standing
from holdfast.cluster.nccl import NcclGroup
from holdfast.cluster.pulse import PULSE, Observer
from holdfast.cluster.seat import Next, Over, Seat, Stop
from holdfast.cluster.team import ALONE, Team, column_of, merge
from holdfast.cluster.tls import TlsSettings
from holdfast.errors import HoldfastError, UsageError

CHECK_SECONDS = 0.05  # between two checks whether to give up, while there is no coordinator
ALONE_SECONDS = 86_400.0  # without a coordinator and without a sign of progress, longer than any step
BEATS = 5  # heartbeats within one timeout, so that a few late ones do no harm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's place in the cluster, which the agent hands over in environment variables."""

    worker: str  # its name
    token: str  # secret of the run
    address: str  # this machine's, for the other workers
    heartbeat: float  # seconds of silence after which a worker counts as lost
    incarnation: str = ""  # tells this process from another of the same name
    host: str = ""  # its failure domain
    rank: int = 0  # in its team
    patience: float = 60.0  # seconds to wait for a coordinator whose machine may be gone for good
    tls: TlsSettings | None = None  # for tensors; None: they are not encrypted

    @staticmethod
    def from_environment() -> Place | None:
        """Read the place from the environment; None if ``holdfast run`` did not start this process."""
        environment = os.environ
        if "HOLDFAST_WORKER" not in environment:
            return None
        return Place(
            worker=environment["HOLDFAST_WORKER"],
            token=environment["HOLDFAST_TOKEN"],
            address=environment["HOLDFAST_ADDRESS"],
            heartbeat=float(environment["HOLDFAST_HEARTBEAT"]),
            incarnation=environment["HOLDFAST_INCARNATION"],
            host=environment.get("HOLDFAST_HOST") or environment["HOLDFAST_WORKER"].partition(".")[0],
            rank=int(environment.get("HOLDFAST_TEAM_RANK", "0")),
            patience=float(environment.get("HOLDFAST_PATIENCE", "60")),
            tls=TlsSettings.from_environment(),
        )


class Stopped(SystemExit):
    """Exit of this worker because the coordinator ended it."""


class Client:
    """``Membership`` through the agent: a ``Seat`` (the state machine), and a thread that listens.

    ``label``: facts about the training, by name; the coordinator refuses a worker whose facts differ from the others'.
    Whether tensors are encrypted is added to them: two that differ in it could never connect. ``team``: this rank's
    mates, where workers are teams. The leader alone speaks with the coordinator, and tells its mates the generations.
    """

    def __init__(self, place: Place, *, label: Label, team: Team = ALONE) -> None:
        self.worker = place.worker
        self.team = team
        self._place = place
        line = lifeline.lines()
        assert line is not None, "the agent has given this worker a lifeline"
        self._line = line
        self._hub = Hub(place.address, LinkSettings(token=place.token, heartbeat=place.heartbeat, tls=place.tls))
        self._seat = Seat(
            worker=place.worker,
            address=place.address,
            port=self._hub.port,
            host=place.host,
            label=label | {"--tls-tensors": "not given" if place.tls is None else "given"},
            incarnation=place.incarnation,
        )
        self._changed = threading.Condition()  # guards the seat, and what follows
        self._alone_since = 0.0  # when the coordinator was lost
        self._last_sign = (-1, 0.0)  # signs of progress that were seen last without a coordinator, and when
        self._on_break: Callable[[int], None] = lambda number: None
        self._observer = Observer(PULSE, every=place.heartbeat / BEATS, now=time.monotonic())
        lifeline.report("run")  # at once: how the agent takes this worker's end depends on it
        self._tell(self._seat.hello())
        threading.Thread(target=self._listen, name="holdfast-client", daemon=True).start()

    # --- the methods of Membership, documented there ---------------------------------------------

    def regroup(self, standing: Standing) -> Generation:
        """Show a standing, and wait for the next generation.

        Raises ``Stopped`` if the coordinator ends this worker, ``HoldfastError`` if there is no coordinator for
        longer than the patience.
        """
        PULSE.follow()
        if self.team.size == 1:
            return self._regroup(standing)
        with self._changed:
            self._seat.show(standing)  # from here on a stop is raised, below: checkpoints may still be written
        said = self.team.exchange("the regroup", standing.to_json() | {"ports": [self._hub.port]})
        together = merge([Standing(**each) for each in said])
        told = self.team.exchange("the generation", self._told(together) if self.team.leads else None)[0]
        if "stop" in told:  # the seat keeps its standing, so a stop that this rank hears later does not end it
            raise Stopped(told["stop"])
        generation = Generation.from_json(told)
        if not self.team.leads:
            with self._changed:
                self._seat.follow(generation)
        return generation

    def _told(self, standing: Standing) -> Message:
        """Return what the leader is told: a generation, or that the worker is to end."""
        try:
            return self._regroup(standing).to_json()
        except Stopped as e:
            return {"stop": e.code}

    def _regroup(self, standing: Standing) -> Generation:
        with self._changed, PULSE.at("wait"):
            before = self._seat.number
            self._tell(self._seat.show(standing))
            while not self._changed.wait_for(lambda: self._seat.stopped or self._seat.number > before, CHECK_SECONDS):
                self._give_up_without_coordinator()
            if self._seat.stopped is not None:
                raise Stopped(self._seat.stopped.code)
            assert self._seat.generation is not None
            return self._seat.generation

    def _give_up_without_coordinator(self) -> None:
        lost = self._seat.coordinator
        if lost and time.monotonic() - self._alone_since > self._place.patience:
            raise HoldfastError(
                f"the coordinator at {lost} is gone for {self._place.patience:g} s, and without it the "
                "survivors cannot regroup",
                hint="start the run again",
            )

    def connect(self, generation: Generation, device: torch.device) -> Group:
        rank = generation.rank_of(self.worker)
        if len(generation.members) == 1:
            return Group(generation, rank, team=self.team)
        if device.type == "cuda" and self._place.tls is not None:
            raise UsageError("--tls-tensors cannot encrypt what GPUs send each other: NCCL has no TLS")
        kind = NcclGroup if device.type == "cuda" else Group
        column = generation if self.team.size == 1 else column_of(generation, self.team.rank)
        return kind(generation, rank, self._hub.links(column, self.worker), team=self.team)

    def on_break(self, callback: Callable[[int], None]) -> None:
        self._on_break = callback

    def wishes(self) -> tuple[bool, bool]:
        return self._seat.wishes()

    def doing(self, operation: int, kind: str) -> None:
        self._seat.doing = (operation, kind)

    def formed(self) -> None:
        self._seat.formed()

    def progressed(self, generation: Generation, operation: int) -> None:
        self._tell(self._seat.progressed(generation, operation))

    def finished(self) -> None:
        self._tell(self._seat.finished())
        lifeline.report("over", generation=self._seat.number)  # in case that there is no coordinator at the moment

    def bye(self) -> None:
        """Tell the coordinator that this worker's end is no failure."""
        self._tell({"type": "bye"})

    # --- the thread ------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        self._line.send(message)

    def _listen(self) -> None:
        """Run the thread: hear what the agent passes on, and send heartbeats, for ever."""
        beat = self._place.heartbeat / BEATS
        next_beat = time.monotonic() + beat
        poll = select.poll()
        poll.register(self._line.socket, select.POLLIN)
        while True:
            if poll.poll(1000 * max(0.0, next_beat - time.monotonic())):
                self._hear()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + beat
                still = self._observer.look(time.monotonic())
                self._tell(self._seat.beat() | {"still": still.to_json()})
                self._end_if_stuck()

    def _hear(self) -> None:
        try:
            messages = self._line.receive()
        except EOFError:  # without its agent nobody could stop this process, or show its output
            self._hub.close_before_exit()
            logger.error("the agent is gone; this worker ends")
            os._exit(1)
        for message in messages:
            with self._changed:
                self._take(message)

    def _take(self, message: Message) -> None:
        """Give a message to the seat, and act on its news."""
        was_lost = self._seat.coordinator
        news = self._seat.hear(message)
        if self._seat.coordinator and not was_lost:
            self._alone_since = time.monotonic()
        if isinstance(news, Next):
            self._changed.notify_all()
        elif isinstance(news, Over):  # frees everybody in this process who waits in that generation
            self._on_break(news.number)
        elif isinstance(news, Stop):
            self._end(news)
        elif message["type"] == "leave" and self._seat.generation is None:  # it waits to join
            lifeline.report("idle")
            os._exit(0)

    def _end_if_stuck(self) -> None:
        """End this worker if it hangs while there is no coordinator, which would notice it."""
        now = time.monotonic()
        if self._last_sign[0] != PULSE.signs or not self._seat.coordinator:
            self._last_sign = (PULSE.signs, now)
        if now - self._last_sign[1] > ALONE_SECONDS:
            logger.error("no coordinator and no sign of progress for %g s; this worker ends", ALONE_SECONDS)
            os._exit(1)

    def _end(self, news: Stop) -> None:
        """End this worker: from inside ``regroup`` if it waits there, else at once."""
        if news.refused:
            logger.error(news.message)
            lifeline.fail(text=f"holdfast: {news.message}", code=news.code, final=True, refused=True)
        if not news.waits:
            os._exit(news.code)
        last = threading.Timer(ENDING_SECONDS, os._exit, [news.code])  # the script may hang in a ``finally``
        last.daemon = True
        last.start()
        self._changed.notify_all()
