"""A worker's line to the coordinator and to its agent: the embedded implementation of ``Membership``.

A thread of its own hears both, so that a worker deep in a computation, or blocked on a peer that has
vanished, still learns at once that its generation is over. Losing the coordinator stops nothing: the
thread connects again and says where the worker stands.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from holdfast.cluster.membership import Generation, Standing
from holdfast.cluster.store import GenerationStore
from holdfast.cluster.wire import Line, Message, Refused
from holdfast.errors import HoldfastError

RETRY_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker belongs; the agent hands it over in the environment."""

    worker: str
    coordinator: tuple[str, int]
    token: str
    address: str
    heartbeat: float
    lifeline: int
    host: str = ""  # its failure domain
    patience: float = 60.0  # for a coordinator whose machine may be gone for good

    @staticmethod
    def from_environment() -> Place | None:
        """None when this process was not started by ``holdfast run``."""
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
            host=environment.get("HOLDFAST_HOST") or environment["HOLDFAST_WORKER"].partition(".")[0],
            patience=float(environment.get("HOLDFAST_PATIENCE", "60")),
        )


class Stopped(SystemExit):
    """The coordinator ended this worker; not the script's own doing."""


class Client:
    """``Membership`` by way of the coordinator."""

    def __init__(self, place: Place, *, label: str) -> None:
        self.worker = place.worker
        self._place = place
        self._label = label
        self._changed = threading.Condition()
        self._line: Line | None = None
        self._alone_since = time.monotonic()
        self._standing: Standing | None = None  # shown and not yet answered by a generation
        self._generation: Generation | None = None
        self._stores: dict[int, GenerationStore] = {}
        self._ended = 0  # the newest generation known to be over
        self._forming = False
        self._finished = False
        self._committed = False
        self._doing: tuple[int, str] | None = None
        self._joiners = 0  # the generation that somebody waits to join
        self._leave = False
        self._stop: Message | None = None
        self._on_break: Callable[[int], None] = lambda number: None
        threading.Thread(target=self._listen, name="holdfast-client", daemon=True).start()

    # --- the contract ----------------------------------------------------------------------------

    def regroup(self, standing: Standing) -> Generation:
        with self._changed:
            before = 0 if self._generation is None else self._generation.number
            self._standing = standing
            self._show(standing)
            while not self._changed.wait_for(lambda: self._stop or self._is_after(before), RETRY_SECONDS):
                self._give_up_without_coordinator()
            if self._stop:
                raise Stopped(self._stop["code"])
            assert self._generation is not None
            return self._generation

    def _is_after(self, number: int) -> bool:
        return self._generation is not None and self._generation.number > number

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
            return self._store(generation.number)

    def on_break(self, callback: Callable[[int], None]) -> None:
        self._on_break = callback

    def wishes(self) -> tuple[bool, bool]:
        current = 0 if self._generation is None else self._generation.number
        return (self._joiners == current, self._leave)

    def doing(self, operation: int, kind: str) -> None:
        self._doing = (operation, kind)

    def formed(self) -> None:
        """The generation's group stands: from here on training can do without the coordinator."""
        self._forming = False

    def progressed(self, generation: Generation, operation: int) -> None:
        self._committed = True
        self._tell({"type": "progress", "generation": generation.number, "operation": operation})

    def finished(self) -> None:
        self._finished = True
        self._tell({"type": "finished"})

    def bye(self) -> None:
        self._tell({"type": "bye"})

    # --- the thread ------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        with self._changed:
            self._send(message)

    def _send(self, message: Message) -> None:
        """Best effort: what counts is told again in the hello of the next connection."""
        if self._line is not None:
            try:
                self._line.send(message)
            except OSError:
                pass

    def _show(self, standing: Standing) -> None:
        number = 0 if self._generation is None else self._generation.number
        self._send({"type": "standing", "generation": number, "standing": asdict(standing)})

    def _store(self, number: int) -> GenerationStore:
        if number not in self._stores:

            def push(key: str, value: bytes) -> None:
                text = base64.b64encode(value).decode()
                self._tell({"type": "store", "generation": number, "key": key, "value": text})

            self._stores = {n: s for n, s in self._stores.items() if n >= number}
            self._stores[number] = GenerationStore(push)
        return self._stores[number]

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        lifeline = socket.socket(fileno=os.dup(self._place.lifeline))
        selector.register(lifeline, selectors.EVENT_READ)
        while True:
            line = self._connect()
            if line is None:
                self._wait_for_agent(lifeline)
                continue
            selector.register(line.socket, selectors.EVENT_READ)
            self._stay_connected(line, lifeline, selector)
            selector.unregister(line.socket)
            line.close()
            with self._changed:
                self._line = None
                self._alone_since = time.monotonic()
                if self._forming:  # addresses pushed through the lost coordinator may be missing
                    assert self._generation is not None
                    self._over(self._generation.number)

    def _connect(self) -> Line | None:
        """Not under the lock: a coordinator that hangs must not make the training thread wait."""
        with self._changed:
            standing = self._standing
            hello = {
                "role": "worker",
                "worker": self.worker,
                "address": self._place.address,
                "label": self._label,
                "host": self._place.host,
                "generation": self._generation.to_json() if self._generation else None,
                "standing": asdict(standing) if standing else None,
                "finished": self._finished,
                "committed": self._committed,
            }
        try:
            line = Line(self._place.coordinator, self._place.token, hello)
        except (OSError, Refused):
            return None
        with self._changed:
            self._line = line
            if self._standing is not standing and self._standing is not None:
                self._show(self._standing)
        return line

    def _stay_connected(self, line: Line, lifeline: socket.socket, selector: selectors.BaseSelector) -> None:
        beat = self._place.heartbeat / 5
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
                    self._tell({"type": "beat", "doing": self._doing})
        except (OSError, ValueError):
            return

    def _wait_for_agent(self, lifeline: socket.socket) -> None:
        lifeline.settimeout(RETRY_SECONDS)
        try:
            self._from_agent(lifeline)
        except TimeoutError:
            pass
        finally:
            lifeline.settimeout(None)

    def _from_agent(self, lifeline: socket.socket) -> None:
        word = lifeline.recv(64)
        if not word:  # nobody is left who could stop us, or would read what we print
            print("holdfast: the agent is gone; this worker ends", file=sys.stderr, flush=True)
            os._exit(1)
        if b"leave" in word:
            self._leave = True
            with self._changed:
                waits_to_join = self._generation is None
            if waits_to_join:
                os._exit(0)

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            kind = message["type"]
            with self._changed:
                if kind == "generation":
                    self._generation = Generation.from_json(message["generation"])
                    self._standing = None
                    self._forming = True
                    self._store(self._generation.number)
                    self._changed.notify_all()
                elif kind == "store":
                    value = base64.b64decode(message["value"])
                    self._store(message["generation"]).arrived(message["key"], value)
                elif kind == "regroup":
                    self._over(message["number"])
                elif kind == "pause":
                    self._joiners = message["number"]
                elif kind == "stop":
                    self._stopped(message)

    def _over(self, number: int) -> None:
        if number > self._ended:
            self._ended = number
            if number in self._stores:
                self._stores[number].close()
            self._on_break(number)

    def _stopped(self, message: Message) -> None:
        """Ends this worker: from inside ``regroup`` if it waits there, else at once."""
        self._stop = message
        if message.get("refused"):
            print(f"holdfast: {message['message']}", file=sys.stderr, flush=True)
            error = {"text": f"holdfast: {message['message']}", "code": message["code"], "final": True, "refused": True}
            with socket.socket(fileno=os.dup(self._place.lifeline)) as line:
                line.sendall(json.dumps(error).encode())
        if self._standing is None:
            os._exit(message["code"])
        self._changed.notify_all()
