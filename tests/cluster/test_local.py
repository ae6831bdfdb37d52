"""An agent's workers that hang: one whose end nobody reports, and what it says on its lifeline."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster import local
from holdfast.cluster.client import CONNECTED
from holdfast.cluster.events import Events, read_events
from holdfast.cluster.local import LocalWorker, LocalWorkers
from holdfast.cluster.wire import Message


class Machine:
    """An agent's workers, with a zygote that takes orders and does nothing."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.ended: list[tuple[str, int, str]] = []
        self.reports: list[Message] = []
        self.done = asyncio.Event()
        zygote, self.hung = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.events = folder / "events.jsonl"
        self.workers = LocalWorkers(
            log_dir=folder,
            zygote=zygote,
            events=Events(self.events),
            say=self.said.append,
            ended=self._note,
            reported=lambda worker, report: self.reports.append(report),
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


@pytest.mark.parametrize("more", [b"", b'{"text": "refused", "final": true}'])
def test_a_worker_says_that_it_has_connected(tmp_path: Path, more: bytes) -> None:
    """Its error may come with the same read."""

    async def run() -> None:
        machine = Machine(tmp_path)
        worker, lifeline = machine.start("0.0")
        lifeline.send(CONNECTED + more)
        while not worker.connected:
            await asyncio.sleep(0.001)
        assert machine.workers.starting == {}
        expected: dict[str, Any] | None = {"text": "refused", "final": True} if more else None
        assert worker.error == expected
        asyncio.get_running_loop().remove_reader(worker.lifeline.fileno())
        lifeline.close()

    asyncio.run(run())


def test_words_on_a_lifeline_may_come_in_any_order_and_in_parts(tmp_path: Path) -> None:
    """A signal may reach a worker before it has connected, and a long error is read in parts."""

    async def run() -> None:
        machine = Machine(tmp_path)
        worker, lifeline = machine.start("0.0")
        signalled, error = {"report": "signal", "name": "SIGTERM"}, {"text": "x" * 2000, "final": True}
        words = json.dumps(signalled).encode() + CONNECTED + json.dumps(error).encode() + b'{"text": "told twice"}'
        for begin in range(0, len(words), 700):
            lifeline.send(words[begin : begin + 700])
            await asyncio.sleep(0)
        while worker.error is None:
            await asyncio.sleep(0.001)
        assert machine.reports == [signalled]
        assert worker.connected
        assert worker.error == error, "the first counts"
        asyncio.get_running_loop().remove_reader(worker.lifeline.fileno())
        lifeline.close()

    asyncio.run(run())
