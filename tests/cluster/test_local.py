"""An agent's workers that hang: one whose end nobody reports, and what it says on its lifeline."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from holdfast.cluster import local, wire, zygote_keeper
from holdfast.cluster.events import Events, read_events
from holdfast.cluster.lines import Lines
from holdfast.cluster.local import LocalWorker, LocalWorkers
from holdfast.cluster.wire import Message
from holdfast.cluster.zygote_keeper import ZygoteKeeper
from holdfast.errors import UsageError


class Machine:
    """An agent's workers, with a zygote that takes orders and does nothing."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.ended: list[tuple[str, int, str]] = []
        self.reports: list[Message] = []
        self.passed_on: list[Message] = []
        self.done = asyncio.Event()
        zygote, self.hung = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.events = folder / "events.jsonl"
        events = Events(self.events)
        self.workers = LocalWorkers(
            log_dir=folder,
            zygote=ZygoteKeeper(zygote, preload=(), folder="", events=events, say=self.said.append),
            events=events,
            say=self.said.append,
            ended=self._note,
            reported=lambda worker, report: self.reports.append(report),
            said=lambda worker, message: self.passed_on.append(message),
        )

    def _note(self, worker: LocalWorker, code: int, cause: str) -> None:
        self.ended.append((worker.name, code, cause))
        self.done.set()

    def start(self, name: str) -> tuple[LocalWorker, socket.socket]:
        """Order a worker; return it, and its end of the lifeline."""
        self.workers.start(name, 0, command=["train.py"], module=False, environment={"HOLDFAST_INCARNATION": "a-test"})
        _, descriptors, _, _ = socket.recv_fds(self.hung, 2**20, 1)
        return self.workers.alive[name], socket.socket(fileno=descriptors[0])


def test_a_worker_that_does_not_end_when_it_is_killed_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "UNKILLABLE_SECONDS", 0.05)

    async def run() -> None:
        machine = Machine(tmp_path)
        worker, lifeline = machine.start("0.0")
        assert machine.workers.starting.keys() == {"0.0"}
        machine.workers.kill_hung(worker, "stuck: a test", {"kind": "start"})
        machine.workers.kill_hung(worker, "stuck: told twice", {})
        assert machine.workers.starting == {}, "it is judged once"
        await asyncio.wait_for(machine.done.wait(), 60)
        assert machine.ended == [("0.0", -9, "killed, but its process does not end")]
        assert machine.said == ["holdfast: worker 0.0 is killed: stuck: a test"]
        (event,) = read_events(machine.events)
        assert event.items() >= {"event": "stuck", "worker": "0.0", "kind": "start", "log": None, "at": None}.items()
        lifeline.close()

    asyncio.run(run())


def test_words_on_a_lifeline_may_come_in_any_order_and_in_parts(tmp_path: Path) -> None:
    """A signal may reach a worker before it takes part, and a long error is read in parts."""

    async def run() -> None:
        machine = Machine(tmp_path)
        worker, lifeline = machine.start("0.0")
        signalled, error = {"report": "signal", "name": "SIGTERM"}, {"text": "x" * 2000, "final": True}
        came = {"type": "came", "worker": "0.0"}
        words = b"".join(map(wire.encode, (signalled, came, {"error": error}, {"error": {"text": "told twice"}})))
        for begin in range(0, len(words), 700):
            lifeline.send(words[begin : begin + 700])
            await asyncio.sleep(0)
        while worker.error is None:
            await asyncio.sleep(0.001)
        assert machine.reports == [signalled]
        assert machine.passed_on == [came]
        assert worker.connected
        assert machine.workers.starting == {}
        assert worker.error == error, "the first counts"
        worker.hang_up()
        lifeline.close()

    asyncio.run(run())


def test_a_worker_that_does_not_read_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It is stopped: it hears everything when it runs again."""

    async def run() -> None:
        machine = Machine(tmp_path)
        worker, lifeline = machine.start("0.0")
        for number in range(500):
            worker.tell({"type": "pause", "number": number, "text": "x" * 2000})
        found, lines = [], Lines(lifeline)
        while len(found) < 500:
            found += [message["number"] for message in lines.receive()]
            await asyncio.sleep(0)
        assert found == list(range(500))
        worker.hang_up()
        lifeline.close()

    asyncio.run(run())


def test_a_zygote_is_heard_to_its_last_report_even_if_it_ends_with_orders_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of unread orders first, as an error. What the zygote has said comes after it."""

    def another(*_: object) -> socket.socket:
        raise AssertionError("no other zygote is needed")

    monkeypatch.setattr(zygote_keeper, "start_zygote", another)

    async def run() -> None:
        machine = Machine(tmp_path)
        machine.workers.start("0.0", 0, command=["train.py"], module=False, environment={"HOLDFAST_INCARNATION": "a"})
        machine.hung.send(json.dumps({"unfit": "nonsense", "error": "ModuleNotFoundError"}).encode())
        machine.hung.close()
        await machine.workers.hear_zygote()

    with pytest.raises(UsageError, match="--preload nonsense cannot be imported"):
        asyncio.run(run())
