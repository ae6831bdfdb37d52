"""An agent's part in a round: which ends of workers are their own, and which its doing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.cluster import local_round
from holdfast.cluster.lines import Lines
from holdfast.cluster.local import LocalWorker
from holdfast.cluster.local_round import LocalRound
from holdfast.cluster.wire import Message
from holdfast.processes import EXITING, KernelFacts


def worker(name: str) -> LocalWorker:
    lifeline = Lines(socket.socketpair()[0])
    return LocalWorker(name=name, incarnation="a", slot=0, host="0", lifeline=lifeline, log=Path("no.log"), pid=1)


@pytest.mark.parametrize(
    ("state", "flags", "cleared", "killed"),
    [("S", 0, True, True), ("D", EXITING, False, True), ("R", EXITING | 0x400000, False, True), ("Z", 0, False, False)],
)
def test_a_worker_that_the_kernel_takes_down_was_not_killed_by_its_agent(
    monkeypatch: pytest.MonkeyPatch, state: str, flags: int, cleared: bool, killed: bool
) -> None:
    """Its peers may fail of its loss, and be heard, before it is gone."""
    facts = KernelFacts(state=state, start="0", flags=flags)
    monkeypatch.setattr(local_round, "facts_of", lambda pid: facts)
    lost, told, ended = worker("0.1"), list[Message](), list[str]()
    part = LocalRound(
        workers={"0.1": lost}, tell=told.append, end=lambda worker: ended.append(worker.name), describe=dict
    )
    part.clear(0)
    part.workers.clear()
    part.ended(lost, -9, {"type": "ended", "code": -9})
    assert ended == (["0.1"] if killed else [])
    assert told[0]["cleared"] is cleared
    assert told[1]["type"] == "cleared"
