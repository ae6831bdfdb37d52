"""Hosts as failure domains: named by ``--hosts``, or network namespaces with an address and a link of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Result, collect, launch, wait_until
from tests.namespaces import Machines, machines

STEPS = 40
HEARTBEAT = 2.0  # seconds


def start_all(cluster: Machines, folder: Path, **environment: str) -> None:
    """Two workers on each of three machines; returns once all of them train."""
    for machine in range(3):
        words = ("-n", "2", "--nnodes", "3", "--heartbeat-timeout", str(HEARTBEAT), "--hosts", f"m{machine}")
        patience = "4" if machine == 2 else "90"  # of the coordinator, that of machine 0 counts
        settings = {"STEPS": str(STEPS), "WANTED": "99", **environment}
        cluster.start(machine, folder, *words, "--patience", patience, **settings)
    wait_until("all train", lambda: _training(folder) == 6 or cluster.ended())
    assert not cluster.ended(), cluster.agents[0].stderr


def _training(folder: Path) -> int:
    return len({e["worker"] for e in collect(folder).of("commit")})


def workers_of(result: Result, host: str) -> set[str]:
    return {e["worker"] for e in result.of("started") if e["host"] == host}


def hosts_of_layers(result: Result, generation: int = 1) -> dict[int, set[str]]:
    found = defaultdict(set)
    for event in result.of("layout"):
        if event["generation"] == generation:
            for layer in range(event["first"], event["stop"]):
                found[layer].add(event["host"])
    return found


# --- one machine that plays two ------------------------------------------------------------------


def lose_two_of_four(folder: Path, hosts: tuple[str, ...]) -> Result:
    """The second goes when it has missed the first: had it lived on, its layers could have been copied."""
    faults = "kill worker=0.1 step=5 phase=vote; kill worker=0.3 step=5 phase=regroup"
    environment = {"STAGES": "2", "TOLERATE": "1"}
    return launch(folder, workers=4, hosts=hosts, faults=faults, environment=environment)


def test_all_workers_of_a_host_are_lost(tmp_path: Path, undisturbed) -> None:
    """In the order of ranks, both copies of the second stage would be on host b."""
    result = lose_two_of_four(tmp_path, ("a", "b", "a", "b"))
    assert result.code == 0
    assert result.sha256 == undisturbed(10).sha256
    assert result.losses == undisturbed(10).losses
    assert set(map(frozenset, hosts_of_layers(result).values())) == {frozenset("ab")}
    assert {e["worker"] for e in result.of("failure")} == {"0.1", "0.3"} <= workers_of(result, "b")


def test_where_hosts_are_not_told_their_layers_are_lost(tmp_path: Path) -> None:
    """The same loss, but nobody knows that the two go together: a negative control."""
    result = lose_two_of_four(tmp_path, ())
    assert result.code == 3
    assert result.of("stop")
    assert not [e for e in result.of("commit") if e["step"] > 5]


def test_a_replacement_takes_the_host_of_the_slot_that_it_fills(tmp_path: Path, undisturbed) -> None:
    environment = {"STAGES": "2", "TOLERATE": "1", "STEPS": "60", "WANTED": "4"}
    result = launch(
        tmp_path,
        workers=4,
        hosts=("a", "b", "a", "b"),
        faults="kill worker=0.1 step=5 phase=forward",
        environment=environment,
    )
    assert result.sha256 == undisturbed(60).sha256
    assert [(e["worker"], e["host"]) for e in result.of("started")][4:] == [("0.4", "b")]
    last = result.of("generation")[-1]
    assert dict(zip(last["workers"], last["hosts"], strict=True)) == {"0.0": "a", "0.2": "a", "0.3": "b", "0.4": "b"}
    assert all(hosts == {"a", "b"} for hosts in hosts_of_layers(result, last["number"]).values())


# --- machines ------------------------------------------------------------------------------------


@pytest.fixture
def three() -> Iterator[Machines]:
    with machines(3) as made:
        yield made


def layouts(first: int, *others: int) -> pytest.MarkDecorator:
    """Numbers of stages: the first one in `make test`, the others in `make thorough`."""
    same = pytest.mark.thorough("the same loss with another layout")
    return pytest.mark.parametrize("stages", [str(first), *(pytest.param(str(n), marks=same) for n in others)])


@layouts(2, 1, 3)
def test_the_power_of_a_host_fails(tmp_path: Path, undisturbed, three: Machines, stages: str) -> None:
    start_all(three, tmp_path, STAGES=stages, TOLERATE="1")
    three.kill(2)
    assert [three.wait(machine) for machine in (0, 1)] == [0, 0]
    result = collect(tmp_path)
    assert all(len(hosts) >= 2 for hosts in hosts_of_layers(result).values())
    assert len(result.results) == 4
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses
    assert {e["worker"] for e in result.of("failure") if e["member"]} == workers_of(result, "m2")


@layouts(3, 1, 2)
def test_the_link_of_a_host_is_cut(tmp_path: Path, undisturbed, three: Machines, stages: str) -> None:
    """Nothing is closed: only heartbeats tell. The others go on; who is cut off from them ends, in words."""
    start_all(three, tmp_path, STAGES=stages, TOLERATE="1")
    three.cut(2)
    assert [three.wait(machine) for machine in (0, 1)] == [0, 0]
    result = collect(tmp_path)
    assert all(len(hosts) >= 2 for hosts in hosts_of_layers(result).values())
    assert len(result.results) == 4
    assert result.sha256 == undisturbed(STEPS).sha256
    causes = {e["worker"]: e["cause"] for e in result.of("failure") if e["member"]}
    assert causes.keys() == workers_of(result, "m2")
    assert all("no heartbeat" in cause for cause in causes.values())
    assert three.is_empty(2, 30)
    assert three.wait(2) == 1
    assert three.endpoint in three.agents[2].stderr, "whom it has lost"


def test_two_hosts_that_do_not_reach_each_other(tmp_path: Path, undisturbed, three: Machines) -> None:
    """Both reach the first host and the coordinator, so nobody counts as lost. One of them is kept out."""
    start_all(three, tmp_path, STAGES="2", TOLERATE="1")
    three.separate(1, 2)
    assert [three.wait(machine) for machine in range(3)] == [0, 0, 0]
    result = collect(tmp_path)
    assert [event["host"] for event in result.of("partition")] == [2]
    assert len(result.of("generation")) <= 3, "the same generation is not formed again and again"
    assert len(result.results) == 4
    assert result.sha256 == undisturbed(STEPS).sha256
    assert result.losses == undisturbed(STEPS).losses


def test_two_hosts_that_refuse_each_other(tmp_path: Path, undisturbed, three: Machines) -> None:
    """A firewall answers in their place. The third one trained with the first, and is not ended by the second."""
    three.refuse(1, 2)
    for machine in range(3):
        words = ("-n", "2", "--nnodes", "3", "--heartbeat-timeout", str(HEARTBEAT), "--patience", "90")
        three.start(machine, tmp_path, *words, STEPS=str(STEPS), STAGES="1", TOLERATE="1")
    assert [three.wait(machine) for machine in range(3)] == [0, 0, 0]
    result = collect(tmp_path)
    assert len({event["host"] for event in result.of("partition")}) == 1
    assert len(result.results) == 4
    assert result.sha256 == undisturbed(STEPS).sha256


@pytest.mark.thorough("a link is cut, and hosts join, in other tests")
def test_a_host_whose_link_comes_back_joins_again(tmp_path: Path, undisturbed, three: Machines) -> None:
    start_all(three, tmp_path, STEPS="150", STAGES="3", TOLERATE="1", WANTED="6")
    three.cut(2)
    wait_until("the others go on", lambda: collect(tmp_path).of("recovery"))
    three.mend(2)
    assert [three.wait(machine) for machine in range(3)] == [0, 0, 0]
    result = collect(tmp_path)
    assert len(result.results) == 6
    assert result.sha256 == undisturbed(150).sha256
    assert len(workers_of(result, "m2")) == 4, "two that were given up, two that took their places"
    assert all(len(hosts) >= 2 for hosts in hosts_of_layers(result, result.of("generation")[-1]["number"]).values())
