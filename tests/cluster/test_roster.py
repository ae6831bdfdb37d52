"""A worker's farewell and its agent's word that it ended come on two lines, in either order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.events import Events
from holdfast.cluster.membership import Generation, Member
from holdfast.cluster.roster import Roster


class Line:
    """What the roster does to a connection."""

    def __init__(self) -> None:
        self.transport = self
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return self.aborted


class Peer:
    def __init__(self) -> None:
        self.writer = Line()

    def send(self, message: Any) -> None: ...


def report(code: int, error: Any = None) -> dict[str, Any]:
    return {"type": "exit", "worker": "0.1", "code": code, "cause": f"exited with code {code}", "error": error}


async def told(path: Path, *, code: int, farewell: bool) -> tuple[str, bool]:
    """The agent's word comes first."""
    roster = Roster(minimum_hosts=1, events=Events(str(path)))
    worker: Any = Peer()
    roster.workers["0.1"] = worker
    members = tuple(Member(worker=name, address="") for name in ("0.0", "0.1"))
    roster.generation = Generation(number=1, members=members)
    roster.workers["0.0"] = Peer()  # type: ignore[assignment]
    roster.advance = lambda: None  # type: ignore[method-assign]
    roster.worker_ended(report(code))
    if farewell:
        roster.worker_left("0.1")
    return path.read_text(), worker.writer.aborted


def test_a_farewell_behind_the_agents_word_is_no_failure(tmp_path: Path) -> None:
    events, aborted = asyncio.run(told(tmp_path / "events", code=0, farewell=True))
    assert '"failure"' not in events
    assert not aborted, "the farewell would be lost with the line"


@pytest.mark.parametrize("code", [-9, 1])
def test_a_worker_that_died_is_a_failure_at_once(tmp_path: Path, code: int) -> None:
    events, aborted = asyncio.run(told(tmp_path / "events", code=code, farewell=False))
    assert '"failure"' in events
    assert aborted
