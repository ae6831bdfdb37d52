"""The lease of a folder: who may take it, its files, and processes that are known to be dead."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import lease
from holdfast.checkpoint.lease import KEEP, Chain, Claim, Note, Process, Superseded, Taken, decide, superseded

MINE = Claim(run="mine", epoch=5, worker="0.0")
OTHER = Claim(run="other", epoch=9, worker="0.0")
FOREIGN = Process(machine="node7", boot="another", space="pid:[1]", pid=1, start="1")


def note(claim: Claim, number: int = 7, **more: Any) -> Note:
    return Note(number=number, claim=claim, **{"term": number, "process": FOREIGN, "since": 1.0, **more})


def asked(found: Note | None, **more: Any) -> lease.Decision:
    return decide(found, MINE, **{"unchanged": 0.0, "renewed": False, "dead": False, **more})


@pytest.mark.parametrize(
    ("found", "more"),
    [
        (None, {}),
        (note(OTHER, released=True), {}),
        (note(OTHER), {"dead": True}),
        (note(OTHER), {"unchanged": 90.0}),
        (note(OTHER, seconds=3.0), {"unchanged": 3.0}),
        (note(dataclasses.replace(MINE, epoch=4, worker="0.3")), {}),
        (note(dataclasses.replace(MINE, worker="0.3")), {}),
        (note(dataclasses.replace(MINE, epoch=4), released=True), {}),
    ],
)
def test_taken_at_once(found: Note | None, more: dict[str, Any]) -> None:
    decision = asked(found, **more)
    assert decision.take
    assert decision.reason
    assert decision.refusal is None


@pytest.mark.parametrize("since", [0.0, 1.0, 4e9])
def test_waited_for_whatever_the_clocks_say(since: float) -> None:
    """The wall clock of another machine, or one that was set back, has no part in it."""
    decision = asked(note(OTHER, since=since), unchanged=89.0)
    assert (decision.take, decision.refusal, decision.seconds) == (False, None, 1.0)
    assert "worker 0.0 of run other on node7" in decision.reason


def test_a_holder_that_lives_is_not_replaced() -> None:
    refusal = asked(note(OTHER), unchanged=1000.0, renewed=True).refusal
    assert isinstance(refusal, Taken)
    assert refusal.exit_code == 4
    assert not refusal.refused, "it ends the whole run"
    assert "worker 0.0 of run other on node7 (process 1, since " in str(refusal)
    assert "give this run another folder" in str(refusal)


@pytest.mark.parametrize("more", [{}, {"dead": True}, {"unchanged": 1000.0}])
@pytest.mark.parametrize("released", [True, False])
def test_an_old_half_is_refused_even_if_the_new_one_is_gone(more: dict[str, Any], released: bool) -> None:
    refusal = asked(note(dataclasses.replace(MINE, epoch=6), released=released), **more).refusal
    assert isinstance(refusal, Superseded)
    assert refusal.refused, "it ends the old half alone"
    assert "generation 5" in str(refusal)
    assert "generation 6" in str(refusal)


def test_checkpoints_of_who_had_lost_the_lease() -> None:
    assert superseded([(10, 3), (20, 3), (30, 7)]) == set()
    assert superseded([(10, 3), (20, 3), (30, 3), (12, 7)]) == {20, 30}
    assert superseded([(10, None), (20, None), (12, 7)]) == set(), "those of yesterday have no term"
    assert superseded([(9, 3), (6, 3)]) == set(), "one holder may commit in any order"


# --- processes ------------------------------------------------------------------------------------


def test_a_process_is_dead_only_if_that_can_be_known() -> None:
    here = Process.current()
    assert not here.is_dead()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    other = dataclasses.replace(here, pid=child.pid, start=start)
    assert not other.is_dead()
    assert dataclasses.replace(other, start="1").is_dead(), "another process with its number"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert other.is_dead(), "a zombie"
    child.communicate()
    assert other.is_dead()
    for unknown in ({"boot": "another"}, {"space": "pid:[1]"}, {"boot": ""}, {"start": ""}):
        assert not dataclasses.replace(other, **unknown).is_dead(), "another machine, or another container"


# --- files ----------------------------------------------------------------------------------------


def prepared(root: Path) -> Chain:
    chain = Chain(root)
    chain.prepare()
    return chain


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / lease.FOLDER).iterdir())


def test_a_number_is_made_once(tmp_path: Path) -> None:
    chain = prepared(tmp_path)
    assert chain.newest() is None
    mine, other = note(MINE, 1), note(OTHER, 1)
    assert chain.make(mine)
    assert not chain.make(other)
    assert chain.newest() == mine
    assert chain.make(mine), "the server's answer may come twice: the content decides"
    assert names(tmp_path) == ["lease-00000001.json"], "nothing else is left"


def test_of_many_at_once_one_makes_it(tmp_path: Path) -> None:
    prepared(tmp_path).make(note(MINE, 1))
    won, ready = [], threading.Barrier(8)

    def make(number: int) -> None:
        ready.wait()
        if Chain(tmp_path).make(note(Claim(run=str(number)), 2)):
            won.append(str(number))

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = Chain(tmp_path).newest()
    assert newest is not None
    assert [newest.claim.run] == won


def test_a_number_below_the_highest_counts_for_nothing(tmp_path: Path) -> None:
    """As of a holder that was paused for so long that the number after its own has been removed."""
    chain = prepared(tmp_path)
    for number in (1, 5):
        assert chain.make(note(OTHER, number))
    assert not chain.make(note(MINE, 2))
    assert names(tmp_path) == ["lease-00000001.json", "lease-00000005.json"]


def test_a_holder_removes_its_own_but_for_the_first(tmp_path: Path) -> None:
    chain = prepared(tmp_path)
    assert chain.make(note(OTHER, 3))
    for number in range(4, 9):
        mine = note(MINE, number, term=4)
        assert chain.make(mine)
        chain.clean(mine)
    assert names(tmp_path) == [f"lease-{number:08d}.json" for number in (3, 4, 8)]
    assert not chain.make(note(OTHER, 4)), "the holder before cannot go on"


def test_the_oldest_of_many_are_removed(tmp_path: Path) -> None:
    chain = prepared(tmp_path)
    for number in range(1, KEEP + 6):
        assert chain.make(note(MINE, number))
        chain.clean(note(MINE, number))
    assert len(names(tmp_path)) == KEEP


def test_a_file_that_cannot_be_understood_is_that_of_an_unknown_holder(tmp_path: Path) -> None:
    chain = prepared(tmp_path)
    assert chain.make(note(MINE, 1))
    for text in ("", "{}", "[]", '{"number": 2'):
        (tmp_path / lease.FOLDER / "lease-00000002.json").write_text(text)
        found = chain.newest()
        assert found is not None
        assert found.number == 2
        assert not asked(found, unchanged=89.0).take
        assert asked(found, unchanged=90.0).take


def spoil(path: Path, kind: str) -> None:
    """Put something into the place of a lease file that no holder has written."""
    whole = json.loads(note(MINE, 2).to_text())
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "deep":
        path.write_text("[" * 100_000)
    else:
        name, value = {
            "seconds": ("seconds", "abc"),
            "text": ("since", "x"),
            "pid": ("process", {**whole["process"], "pid": 10**30}),
            "run": ("claim", {**whole["claim"], "run": ["a"]}),
        }[kind]
        path.write_text(json.dumps({**whole, name: value}))


@pytest.mark.parametrize("kind", ["link", "pipe", "deep", "seconds", "text", "pid", "run"])
def test_a_hostile_file_is_that_of_an_unknown_holder_and_the_same_at_each_look(tmp_path: Path, kind: str) -> None:
    """Two looks at the same file must not seem a renewal: the folder would be refused for ever."""
    chain = prepared(tmp_path)
    spoil(tmp_path / lease.FOLDER / "lease-00000002.json", kind)
    found = chain.newest()
    assert found is not None
    assert found == chain.newest()
    assert found.claim.run == "?"
    assert "?" in found.holder
    assert asked(found, unchanged=90.0).take


@pytest.mark.parametrize("since", [-1e9, 1e300])
def test_a_holder_whose_clock_is_wrong_is_known_all_the_same(since: float) -> None:
    found = Note.from_text(5, dataclasses.replace(note(MINE, 5), since=since).to_text())
    assert found.claim == MINE
    assert "an unknown time" in found.holder


def test_an_empty_file_is_not_renewed_by_looking_at_it() -> None:
    assert Note.from_text(5, b"") == Note.from_text(5, b"")


def test_no_lease_counts_for_longer_than_an_hour(tmp_path: Path) -> None:
    chain = prepared(tmp_path)
    text = json.loads(note(MINE, 2).to_text()) | {"seconds": 1e12}
    (tmp_path / lease.FOLDER / "lease-00000002.json").write_text(json.dumps(text))
    found = chain.newest()
    assert found is not None
    assert found.seconds == lease.LONGEST_SECONDS


def test_without_links_a_number_is_made_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    chain = prepared(tmp_path)
    assert chain.make(note(MINE, 1))
    assert not chain.make(note(OTHER, 1))
    assert chain.newest() == note(MINE, 1, token=chain.newest().token)  # type: ignore[union-attr]
    assert chain.has("mine")
    assert not chain.has("other")
