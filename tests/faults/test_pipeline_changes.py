"""Workers that come and go between steps: layers are handed over, only what is missing moves, its load is spread."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from holdfast.cluster.agent import Agent
from tests.faults.judge import (
    HEARTBEAT,
    PIPELINE,
    assert_load_is_spread,
    assert_nothing_twice,
    assert_only_what_is_missing_moves,
    assert_same,
    covered,
    generations,
    kill,
    places,
    train,
)
from tests.harness import Hosts, count_events, launch_hosts, until

STEPS = 18
PATIENT = {"PATIENT": "4", "PAUSE": "0.2"}  # time for a replacement to come


async def training(agent: Agent, step: int = 3) -> None:
    path = agent.settings.log_dir / "events.jsonl"
    await until(lambda: path.exists() and count_events(agent, "commit", step=step))


@pytest.mark.parametrize(
    ("workers", "stages", "tolerate", "more"),
    [
        (6, "3,4,3", 1, {}),
        (5, "auto", 1, {"MEMORY": "260kB"}),
        covered("other stages move, too", 6, "5,5", 2, {}),
        covered("other stages move, too", 4, "1", 1, {}),
        covered("with 260 kB there are uneven stages, too", 7, "auto", 1, {"MEMORY": "200kB"}),
    ],
)
def test_only_what_is_missing_moves(tmp_path: Path, whole, workers: int, stages: str, tolerate: int, more) -> None:
    """One is lost, the survivors re-plan; one comes in its place, and they do again. Every byte is counted."""
    more = {"WANTED": str(workers), **PATIENT, **more}
    faults = kill(["0.1"])
    result = train(tmp_path, workers=workers, stages=stages, tolerate=tolerate, steps=STEPS, faults=faults, **more)
    assert_same(result, whole(STEPS))
    assert_nothing_twice(result)
    first, second, third = generations(result)
    assert set(places(result, third)) == set(places(result, first)) - {"0.1"} | {f"0.{workers}"}
    for before, after in ((first, second), (second, third)):
        sent = assert_only_what_is_missing_moves(result, before, after)
        assert_load_is_spread(result, before, after, sent)


@pytest.mark.parametrize(
    ("doomed", "stages", "tolerate"),
    [
        covered("both are killed in another case", ["0.6"], "3,4,3", 1),
        covered("both are killed in another case", ["0.3"], "5,5", 2),
        (["0.3", "0.6"], "5,5", 2),
    ],
    ids=["who receives", "who sends", "both"],
)
def test_kill_while_layers_are_copied(tmp_path: Path, whole, doomed: list[str], stages: str, tolerate: int) -> None:
    meddle = "; ".join(f"copying {worker}" for worker in doomed)
    more = {"WANTED": "6", **PATIENT, "MEDDLE": meddle}
    result = train(tmp_path, workers=6, stages=stages, tolerate=tolerate, steps=STEPS, faults=kill(["0.1"]), **more)
    assert_same(result, whole(STEPS))
    assert_nothing_twice(result)
    assert {e["worker"] for e in result.of("failure") if e["member"]} >= {"0.1", *doomed}
    assert not result.of("resumed")


@pytest.mark.parametrize(
    ("workers", "stages", "leaver"),
    [
        (3, "5,5", "0.1"),
        *(covered("one of three leaves", 2, "5,5", leaver) for leaver in ("0.0", "0.1")),
        covered("one of three leaves", 4, "3,4,3", "0.2"),
    ],
)
def test_who_has_the_only_copy_hands_it_over_before_it_leaves(
    tmp_path: Path, whole, workers: int, stages: str, leaver: str
) -> None:
    async def meddle(agent: Agent) -> None:
        await training(agent)
        agent.workers[leaver].tell({"type": "leave"})

    more = {"WANTED": "99", "PAUSE": "0.05"}
    result = train(tmp_path, workers=workers, stages=stages, tolerate=0, steps=STEPS, meddle=meddle, **more)
    assert_same(result, whole(STEPS))
    assert_nothing_twice(result)
    assert not result.of("failure"), "leaving is no failure"
    assert not result.of("resumed")
    assert {line["worker"] for line in result.results} == {f"0.{n}" for n in range(workers)} - {leaver}
    first, handing_over = generations(result)[:2]
    assert not places(result, handing_over)[leaver]
    assert_only_what_is_missing_moves(result, first, handing_over)


def test_hosts_come_and_leave(tmp_path: Path, whole) -> None:
    """From two pipelines to three and back, on other hosts than before."""

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: trains(hosts) == 4)
        hosts.start(2)
        await until(lambda: trains(hosts) == 6)
        hosts.leave(1)
        await until(lambda: trains(hosts) == 4)
        (tmp_path / "hurry").touch()

    settings = {"STEPS": "40", "STAGES": "4,6", "TOLERATE": "1", "WANTED": "99", "PAUSE": "0.5"}
    result = launch_hosts(
        tmp_path,
        script=PIPELINE,
        workers=[2, 2],
        meddle=meddle,
        environment={**settings, "HURRY": str(tmp_path / "hurry")},
        heartbeat_timeout=HEARTBEAT,
    )
    assert_same(result, whole(40))
    assert_nothing_twice(result)
    assert not result.of("failure")
    assert {line["worker"][0] for line in result.results} == {"0", "2"}
    for before, after in itertools.pairwise(generations(result)):
        assert_only_what_is_missing_moves(result, before, after)


def trains(hosts: Hosts) -> int:
    """How many workers have committed something in the last generation."""
    commits = [e for e in hosts.events() if e["event"] == "commit"]
    last = max((e["generation"] for e in commits), default=0)
    return len({e["worker"] for e in commits if e["generation"] == last})


def test_asked_to_leave_and_killed_in_the_handing_over(tmp_path: Path, whole) -> None:
    """The only copy is lost while it is being handed over: back to the checkpoint."""

    async def meddle(agent: Agent) -> None:
        await training(agent, 4)
        agent.workers["0.1"].tell({"type": "leave"})
        await asyncio.sleep(0)

    saved = {"CHECKPOINT": str(tmp_path / "saved"), "EVERY": "3", "WANTED": "99", "MEDDLE": "copying 0.1"}
    result = train(tmp_path / "a", workers=3, stages="5,5", tolerate=0, steps=STEPS, meddle=meddle, **saved)
    assert_same(result, whole(STEPS))
    assert len(result.of("resumed")) == 1
