"""A worker's connections to the coordinator and to its agent: ``Membership`` for workers of ``holdfast run``.

A separate thread listens to both. So a worker that is deep in a computation, or blocked on a peer that has vanished,
still learns at once that its generation is over. Losing the coordinator does not stop training: the thread connects
again and shows the worker's standing.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.cluster import lifeline as to_agent
from holdfast.cluster.labels import Label
from holdfast.cluster.membership import Generation, Standing
from holdfast.cluster.pulse import PULSE, Observer
from holdfast.cluster.seat import Next, Over, Seat, Stop, Value
from holdfast.cluster.store import GenerationStore
from holdfast.cluster.tls import TlsSettings
from holdfast.cluster.wire import Line, Message, Refused
from holdfast.errors import HoldfastError

RETRY_SECONDS = 0.05  # between two tries to connect, and between two checks whether to give up
ENDING_SECONDS = 3600.0  # for a worker that is sent away to end: longer than it may wait for its last checkpoint
ALONE_SECONDS = 86_400.0  # without a coordinator and without a sign of progress, as long as Gloo waits for a receive
CONNECTED = b'{"connected": true}'  # a worker's first word to its agent, on the lifeline
BEATS = 5  # heartbeats within one timeout, so that a few late ones do no harm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's place in the cluster, which the agent hands over in environment variables."""

    worker: str  # its name
    coordinator: tuple[str, int]  # address and port
    token: str  # secret of the run
    address: str  # this machine's, for the other workers
    heartbeat: float  # seconds of silence after which the coordinator counts as lost
    lifeline: int  # descriptor of the socket to the agent
    incarnation: str = ""  # tells this process from another of the same name
    host: str = ""  # its failure domain
    patience: float = 60.0  # seconds to wait for a coordinator whose machine may be gone for good
    tls: TlsSettings | None = None  # None: no TLS

    @staticmethod
    def from_environment() -> Place | None:
        """Read the place from the environment; None if ``holdfast run`` did not start this process."""
        environment = os.environ
        if "HOLDFAST_WORKER" not in environment:
            return None
        host, _, port = environment["HOLDFAST_COORDINATOR"].rpartition(":")
        return Place(
            worker=environment["HOLDFAST_WORKER"],
            coordinator=(host, int(port)),
            token=environment["HOLDFAST_TOKEN"],
            address=environment["HOLDFAST_ADDRESS"],
            heartbeat=float(environment["HOLDFAST_HEARTBEAT"]),
            lifeline=int(environment["HOLDFAST_LIFELINE"]),
            incarnation=environment["HOLDFAST_INCARNATION"],
            host=environment.get("HOLDFAST_HOST") or environment["HOLDFAST_WORKER"].partition(".")[0],
            patience=float(environment.get("HOLDFAST_PATIENCE", "60")),
            tls=TlsSettings.from_environment(),
        )


class Stopped(SystemExit):
    """Exit of this worker because the coordinator ended it."""


class Client:
    """``Membership`` through the coordinator: a ``Seat`` (the state machine), with sockets and a thread that listens.

    ``label``: facts about the training, by name; the coordinator refuses a worker whose facts differ from the others'.
    """

    def __init__(self, place: Place, *, label: Label) -> None:
        self.worker = place.worker
        self._place = place
        self._seat = Seat(
            worker=place.worker,
            address=place.address,
            host=place.host,
            label=label,
            incarnation=place.incarnation,
        )
        self._changed = threading.Condition()  # guards everything below, and the seat
        self._line: Line | None = None  # to the coordinator; None while there is no connection
        self._alone_since = time.monotonic()  # when the connection was lost
        self._last_sign = (-1, 0.0)  # signs of progress that were seen last without a coordinator, and when
        self._stores: dict[int, GenerationStore] = {}
        self._on_break: Callable[[int], None] = lambda number: None
        self._observer = Observer(PULSE, every=place.heartbeat / BEATS, now=time.monotonic())
        threading.Thread(target=self._listen, name="holdfast-client", daemon=True).start()

    # --- the methods of Membership, documented there ---------------------------------------------

    def regroup(self, standing: Standing) -> Generation:
        """Show a standing, and wait for the next generation.

        Raises ``Stopped`` if the coordinator ends this worker, ``HoldfastError`` if there is no coordinator for
        longer than the patience.
        """
        PULSE.follow()
        with self._changed, PULSE.at("wait"):
            before = self._seat.number
            self._send(self._seat.show(standing))
            while not self._changed.wait_for(lambda: self._seat.stopped or self._seat.number > before, RETRY_SECONDS):
                self._give_up_without_coordinator()
            if self._seat.stopped is not None:
                raise Stopped(self._seat.stopped.code)
            assert self._seat.generation is not None
            return self._seat.generation

    def _give_up_without_coordinator(self) -> None:
        if self._line is None and time.monotonic() - self._alone_since > self._place.patience:
            host, port = self._place.coordinator
            raise HoldfastError(
                f"the coordinator at {host}:{port} is gone for {self._place.patience:g} s, and without it the "
                "survivors cannot regroup",
                hint="start the run again",
            )

    def store(self, generation: Generation) -> GenerationStore:
        with self._changed:
            return self._store(generation)

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

    def bye(self) -> None:
        """Tell the coordinator that this worker's end is no failure."""
        self._tell({"type": "bye"})

    # --- the thread ------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        with self._changed:
            self._send(message)

    def _send(self, message: Message) -> None:
        """Send a message if there is a connection. A lost one does no harm: the next hello repeats all that matters."""
        if self._line is not None:
            try:
                self._line.send(message)
            except OSError:
                pass

    def _store(self, generation: Generation) -> GenerationStore:
        """Return the store of a generation, and forget those of older ones."""
        number = generation.number
        if number not in self._stores:

            def push(key: str, value: bytes) -> None:
                self._tell(self._seat.put(generation, key, value))

            self._stores = {n: s for n, s in self._stores.items() if n >= number}
            self._stores[number] = GenerationStore(push)
        return self._stores[number]

    def _listen(self) -> None:
        """Run the thread: connect to the coordinator, stay connected, and begin again, for ever."""
        selector = selectors.DefaultSelector()
        lifeline = socket.socket(fileno=os.dup(self._place.lifeline))
        selector.register(lifeline, selectors.EVENT_READ)
        known = False  # the agent knows that this worker has come so far
        while True:
            line = self._connect()
            if line is None:
                self._wait_for_agent(lifeline)
                self._end_if_stuck()
                continue
            if not known:
                known = self._tell_agent(lifeline)
            selector.register(line.socket, selectors.EVENT_READ)
            self._stay_connected(line, lifeline, selector)
            selector.unregister(line.socket)
            line.close()
            with self._changed:
                self._line = None
                self._alone_since = time.monotonic()
                self._over(self._seat.disconnected())

    def _connect(self) -> Line | None:
        """Connect to the coordinator; return None if that fails.

        The lock is not held meanwhile: a hung coordinator must not make the training thread wait.
        """
        with self._changed:
            standing, hello = self._seat.standing, self._seat.hello()
        try:
            line = Line(self._place.coordinator, self._place.token, hello, self._place.tls)
        except (OSError, Refused):
            return None
        with self._changed:
            self._line = line
            if self._seat.standing is not standing and self._seat.standing is not None:  # newer than the hello's
                self._send(self._seat.show(self._seat.standing))
        return line

    def _stay_connected(self, line: Line, lifeline: socket.socket, selector: selectors.BaseSelector) -> None:
        """Hear coordinator and agent, and send heartbeats, until the coordinator is lost or silent for too long."""
        beat = self._place.heartbeat / BEATS
        heard = time.monotonic()
        next_beat = heard + beat
        try:
            self._take(line.waiting())
            while time.monotonic() - heard < self._place.heartbeat:
                for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                    if key.fileobj is lifeline:
                        self._from_agent(lifeline)
                    else:
                        heard = time.monotonic()
                        self._take(line.receive())
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + beat
                    still = self._observer.look(time.monotonic())
                    self._tell(self._seat.beat() | {"still": still.to_json()})
        except (OSError, ValueError):
            return

    def _tell_agent(self, lifeline: socket.socket) -> bool:
        """Tell the agent that this worker has connected, so that it does not count as hung in its start."""
        try:
            return lifeline.send(CONNECTED) == len(CONNECTED)
        except OSError:
            return False  # the agent is gone, which the next read of the lifeline tells

    def _end_if_stuck(self) -> None:
        """End this worker if it hangs while there is no coordinator, which would notice it."""
        now = time.monotonic()
        if self._last_sign[0] != PULSE.signs:
            self._last_sign = (PULSE.signs, now)
        if now - max(self._last_sign[1], self._alone_since) > ALONE_SECONDS:
            logger.error("no coordinator and no sign of progress for %g s; this worker ends", ALONE_SECONDS)
            os._exit(1)

    def _wait_for_agent(self, lifeline: socket.socket) -> None:
        """Hear the agent for a moment, while there is no coordinator."""
        lifeline.settimeout(RETRY_SECONDS)
        try:
            self._from_agent(lifeline)
        except TimeoutError:
            pass
        finally:
            lifeline.settimeout(None)

    def _from_agent(self, lifeline: socket.socket) -> None:
        """Take in what the agent says on the lifeline: leave, or by closing it that the agent is gone."""
        word = lifeline.recv(64)
        if not word:  # without its agent nobody could stop this process, or show its output
            logger.error("the agent is gone; this worker ends")
            os._exit(1)
        if b"leave" in word:
            self._seat.leave = True
            if self._seat.generation is None:  # it waits to join
                to_agent.report("idle")
                os._exit(0)

    def _take(self, messages: list[Message]) -> None:
        """Give the coordinator's messages to the seat, and act on its news."""
        for message in messages:
            with self._changed:
                news = self._seat.hear(message)
                if isinstance(news, Next):
                    self._store(news.generation)
                    self._changed.notify_all()
                elif isinstance(news, Value):
                    self._stores[news.generation].arrived(news.key, news.value)
                elif isinstance(news, Over):
                    self._over(news)
                elif isinstance(news, Stop):
                    self._end(news)

    def _over(self, news: Over | None) -> None:
        """Free everybody in this process who waits for a generation that is over."""
        if news is not None:
            if news.number in self._stores:
                self._stores[news.number].close()
            self._on_break(news.number)

    def _end(self, news: Stop) -> None:
        """End this worker: from inside ``regroup`` if it waits there, else at once."""
        if news.refused:
            logger.error(news.message)
            error = {"text": f"holdfast: {news.message}", "code": news.code, "final": True, "refused": True}
            with socket.socket(fileno=os.dup(self._place.lifeline)) as line:
                line.sendall(json.dumps(error).encode())
        if not news.waits:
            os._exit(news.code)
        last = threading.Timer(ENDING_SECONDS, os._exit, [news.code])  # the script may hang in a ``finally``
        last.daemon = True
        last.start()
        self._changed.notify_all()
