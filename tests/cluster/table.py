"""A roster at a table: agents with real desks around it, and workers that say what a test lets them say."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from holdfast.cluster.desk import COORDINATOR, Desk
from holdfast.cluster.generations import RosterSettings
from holdfast.cluster.membership import Standing, machine_of
from holdfast.cluster.pulse import Still
from holdfast.cluster.register import EVENTS, HANG_UP, Sent
from holdfast.cluster.roster import Connected, Disconnected, Heard, Roster, Tick
from holdfast.cluster.watch import LOOKS
from holdfast.commit.settle import judge
from tests.standings import standing

Message = dict[str, Any]


class Table:
    """A roster, and what it has said so far. The agent of machine n has the connection 100 + n, if a test says nothing.

    ``told``: what each worker has heard, by name.
    """

    def __init__(self, workers: int | None, **settings: Any) -> None:
        """``workers``: of machine 0, whose agent is there; None: nobody is."""
        self.now = 0.0
        self.sent: list[Sent] = []
        self.told: defaultdict[str, list[Message]] = defaultdict(list)
        self.desks: dict[int, Desk] = {}  # by connection
        self.at: dict[int, int] = {}  # the connection of each machine
        self.stills: dict[str, Still] = {}  # of workers that hang
        self.silent: set[str] = set()  # workers that give no sign of life
        self.starting: dict[int, dict[str, float]] = {}
        self.roster = Roster(RosterSettings(**settings), judge=judge, now=0.0)
        if workers is not None:
            self.agent(0, slots=workers)
            for number in range(workers):
                self.worker(f"0.{number}")

    # --- events ----------------------------------------------------------------------------------

    def _step(self, event: Any) -> list[Sent]:
        sent = list(self.roster.step(event, self.now))
        self.sent += sent
        for recipient, message in list(sent):
            if recipient in self.desks and message is not HANG_UP:
                sent += self._pass_on(recipient, self.desks[recipient].take(message))
        return sent

    def _pass_on(self, connection: int, out: list[tuple[str, Message]]) -> list[Sent]:
        sent: list[Sent] = []
        for recipient, message in out:
            if recipient == COORDINATOR:
                sent += self._step(Heard(connection=connection, message=message))
            else:
                self.told[recipient].append(message)
        return sent

    def agent(
        self, machine: int, *, connection: int | None = None, desk: Desk | None = None, **hello: Any
    ) -> list[Sent]:
        """An agent connects: with a new desk, or that of an earlier connection."""
        number = 100 + machine if connection is None else connection
        desk = desk or Desk(beat=self.roster.settings.heartbeat_timeout / LOOKS)
        self.desks[number], self.at[machine] = desk, number
        words = {"host": None, "agent": f"agent {machine}", "begun": False, "finished": False, "over": 0, "slots": 1}
        words |= {"run": False, "stays": False} | desk.hello(self.now) | hello
        return self._step(Connected(connection=number, hello=words))

    def back(self, machine: int, *, connection: int, **hello: Any) -> list[Sent]:
        """An agent whose connection was lost connects again, with its workers."""
        desk = self.desks[self.at[machine]]
        return self.agent(machine, connection=connection, desk=desk, **{"host": machine, "begun": True} | hello)

    def worker(self, name: str, *, shown: Standing | None = None, **who: Any) -> list[Sent]:
        """A worker comes, and shows the standing of one that begins."""
        words = {"worker": name, "address": "", "port": 0, "host": name[0], "incarnation": f"process {name}"}
        sent = self.say(name, "came", **words | {"label": {"what": "a test"}} | who)
        shown = shown or standing(boundary=True, units=1)
        return sent + self.say(name, "standing", generation="", standing=shown.to_json())

    def say(self, name: str, kind: str, **message: Any) -> list[Sent]:
        """A worker says something."""
        connection = self.at[machine_of(name)]
        return self._pass_on(connection, self.desks[connection].hear(name, {"type": kind, **message}, self.now))

    def show(self, name: str, **fields: Any) -> list[Sent]:
        assert self.roster.generation is not None
        shown = standing(**{"units": 1, "held": (0,)} | fields).to_json()
        return self.say(name, "standing", generation=self.roster.generation.name, standing=shown)

    def commit(self, name: str, operation: int = 1) -> list[Sent]:
        assert self.roster.generation is not None
        return self.say(name, "progress", generation=self.roster.generation.name, operation=operation)

    def hear(self, machine: int, kind: str, **message: Any) -> list[Sent]:
        """An agent says something of its own."""
        return self._step(Heard(connection=self.at[machine], message={"type": kind, **message}))

    def close(self, machine: int) -> list[Sent]:
        """The connection of an agent closes."""
        return self._step(Disconnected(connection=self.at[machine]))

    def die(self, name: str, code: int = -9, **more: Any) -> list[Sent]:
        """A worker ends, and its agent says so."""
        return self.hear(machine_of(name), "exit", **self.end(name, code, **more))

    def end(self, name: str, code: int = -9, **more: Any) -> Message:
        """A worker ends; return its agent's report."""
        words = {"worker": name, "code": code, "cause": f"exited with code {code}", "error": None}
        words |= {"incarnation": f"process {name}", "finished": code == 0} | more
        self.desks[self.at[machine_of(name)]].ended(name, words)
        return words

    def wait(self, seconds: float, *away: int) -> list[Sent]:
        """Let time pass, deadline by deadline, while all machines but these give signs of life."""
        until, sent = self.now + seconds, []
        while self.roster.deadline <= until and not self.roster.stopped:
            self.now = self.roster.deadline
            for machine, connection in self.at.items():
                if machine not in away:
                    sent += self._beat(machine, self.desks[connection])
            sent += self._step(Tick())
        self.now = until
        return sent

    def _beat(self, machine: int, desk: Desk) -> list[Sent]:
        for name in [name for name in desk._customers if name not in self.silent]:
            still = self.stills.get(name)
            said = {
                "doing": None if still is None else (7, "step"),
                "still": None if still is None else still.to_json(),
            }
            self.say(name, "beat", **said)
        return self.hear(machine, "beat", starting=self.starting.get(machine, {}), workers=desk.beat(self.now))

    # --- what was said ---------------------------------------------------------------------------

    def news(self, name: str) -> list[str]:
        """The kinds of what a worker has heard since this was asked the last time."""
        kinds = [message["type"] for message in self.told[name]]
        self.told[name].clear()
        return kinds

    def code(self, name: str) -> int | None:
        """The code with which a worker was sent away; None if it was not."""
        return next((message["code"] for message in self.told[name] if message["type"] == "stop"), None)

    def refusal(self, name: str) -> str:
        """The text with which a worker was refused, if it was."""
        return "".join(message["message"] for message in self.told[name] if message.get("refused"))


def to(sent: list[Sent], connection: int) -> list[str]:
    return [message["type"] for recipient, message in sent if recipient == connection]


def logged(sent: list[Sent]) -> list[str]:
    return [message["event"] for recipient, message in sent if recipient == EVENTS]
