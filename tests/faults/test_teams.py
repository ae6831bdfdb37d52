"""Teams on real processes: the hash through kills of single ranks, joins, and resumes with other teams."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.agent import Agent
from holdfast.cluster.events import read_events
from tests.faults import teams_train
from tests.faults.judge import covered, sweep
from tests.harness import Hosts, Result, assert_every_worker_commits_each_step_once, hurry, launch, launch_hosts, until

SCRIPT = Path(teams_train.__file__)
PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]
WHOLE = 4 * (16 * 10 + 10 + 10 * 5 + 5 + 2 * 5 + 5 + 1)  # bytes of the model


def ranks_of(split: object) -> int:
    """The ranks of a team: a mesh of two dimensions has four."""
    return 4 if split == "2d" else 2


def train(folder: Path, *, teams: int = 2, team: int = 2, faults: str = "", **settings: object) -> Result:
    folder.mkdir(exist_ok=True)
    environment = {name: str(value) for name, value in settings.items()}
    return launch(folder, script=SCRIPT, workers=teams, team=team, faults=faults, environment=environment)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The hash of an undisturbed run of one team."""

    @cache
    def found(**settings: object) -> str:
        team = ranks_of(settings["SPLIT"])
        return train(tmp_path_factory.mktemp("alone"), teams=1, team=team, **settings).sha256

    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kills = [("fsdp", phase, f"0.{n}") for phase in PHASES for n in ("0.0", "0.1", "1.0", "1.1")]
    kills += [("tp", phase, "0.0.1") for phase in PHASES] + [("2d", phase, "0.1.2") for phase in PHASES]
    sweep(metafunc, "kill", kills, [("fsdp", "backward", "0.1.1"), ("tp", "voted", "0.0.1"), ("2d", "reduce", "0.1.2")])


def test_a_killed_rank_takes_its_team_along_and_nobody_else(
    tmp_path: Path, alone: Any, kill: tuple[str, str, str]
) -> None:
    """And another team joins, which gets each shard from its counterpart."""
    split, phase, rank = kill
    team = ranks_of(split)
    result = train(tmp_path, team=team, faults=f"kill worker={rank} step=2 phase={phase}", WANTED=2, SPLIT=split)
    assert result.code == 0, result.said
    assert {e["worker"] for e in result.of("failure")} == {rank[:3]}
    assert result.sha256 == alone(SPLIT=split)
    assert_every_worker_commits_each_step_once(result)
    assert "0.2" in {e["worker"] for e in result.of("commit")}, "no team has joined"
    assert len(result.results) == 2 * team


def test_three_teams_of_which_two_are_killed_at_the_same_time(tmp_path: Path, alone: Any) -> None:
    """A rank holds its part of the model only."""
    faults = "kill worker=0.0.1 step=3 phase=reduce; kill worker=0.2.0 step=3 phase=reduce"
    result = train(tmp_path, teams=3, faults=faults)
    assert result.code == 0, result.said
    assert result.sha256 == alone(SPLIT="fsdp")
    assert max(found["held"] for found in result.results) < 0.6 * WHOLE


@pytest.mark.parametrize(
    "phase", ["copy", *(covered("a recovery that breaks is tried again", p) for p in ("regroup", "enter"))]
)
def test_a_second_team_is_lost_while_others_recover(tmp_path: Path, alone: Any, phase: str) -> None:
    """In the phase copy a rank of team 0.0 sends its shards to a team that joins."""
    second = "0.2.1" if phase != "copy" else "0.0.1"
    step = "step=2 " if phase != "copy" else ""
    faults = f"kill worker=0.1.0 step=2 phase=vote; kill worker={second} {step}phase={phase}"
    result = train(tmp_path, teams=3, faults=faults, WANTED=3)
    assert result.code == 0, result.said
    assert {"0.1", second[:3]} <= {e["worker"] for e in result.of("failure")}
    assert result.sha256 == alone(SPLIT="fsdp")


@pytest.mark.thorough("the checkpoint that a lost worker leaves unfinished, and the next one")
@pytest.mark.parametrize("phase", ["snapshot", "write", "commit"])
def test_a_rank_is_lost_while_a_checkpoint_is_taken(tmp_path: Path, alone: Any, phase: str) -> None:
    kept = {"CHECKPOINT": tmp_path / "kept", "EVERY": 2}
    rank = "0.0.0" if phase == "commit" else "0.0.1"
    first = train(tmp_path / "first", faults=f"kill worker={rank} step=2 phase={phase}", STEPS=4, WANTED=2, **kept)
    assert first.code == 0, first.said
    assert {e["worker"] for e in first.of("failure")} == {"0.0"}
    second = train(tmp_path / "second", teams=1, **kept)
    assert {e["step"] for e in second.of("resumed")} == {4}
    assert second.sha256 == alone(SPLIT="fsdp")


def test_two_machines_lose_a_rank_and_the_coordinator(tmp_path: Path, alone: Any) -> None:
    """Each machine has a team. The lost one comes back on its machine, through a coordinator that begins anew."""

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: any(e["event"] == "failure" for e in hosts.events()))
        assert hosts.agents[0].coordinator is not None
        hosts.agents[0].coordinator.kill()

    result = launch_hosts(
        tmp_path,
        script=SCRIPT,
        workers=[1, 1],
        team=2,
        meddle=meddle,
        environment={"WANTED": "2"},
        faults="kill worker=1.0.1 step=2 phase=vote",
    )
    assert result.code == 0, result.said
    assert result.of("coordinator-restart")
    assert result.sha256 == alone(SPLIT="fsdp")
    assert_every_worker_commits_each_step_once(result)
    assert len(result.results) == 4


def test_control_a_gradient_that_a_team_leaves_out_is_seen(tmp_path: Path, alone: Any) -> None:
    faults = "skip-gradient worker=0.1.0 step=2; skip-gradient worker=0.1.1 step=2"
    assert train(tmp_path, faults=faults).sha256 != alone(SPLIT="fsdp")


def test_ranks_that_train_whole_models_on_parts_of_a_batch_are_told(tmp_path: Path) -> None:
    result = train(tmp_path, teams=1, SPLIT="forgotten")
    assert result.code == 2
    assert "fully_shard" in "".join(e["error"]["text"] for e in result.of("exit") if e.get("error")) + "".join(
        result.said
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("clip", "clip_norm=0.1"),
        ("rate", "param_groups"),
        ("state", "state 'seen'"),
        ("leaves", "the begin of hash"),  # it would wait for its mates in a collective, and they for it in another
    ],
)
def test_a_rank_that_does_something_else_than_its_mates_is_told(tmp_path: Path, wrong: str, said: str) -> None:
    """In all teams alike, so that nobody can tell by the other teams."""
    result = train(tmp_path, WRONG=wrong)
    assert result.code != 0
    assert said in "".join(e["error"]["text"] for e in result.of("exit") if e.get("error"))


@pytest.mark.thorough("a stopped process is noticed by its heartbeats, in a team or not")
def test_a_rank_that_is_stopped_takes_its_team_along(tmp_path: Path, alone: Any) -> None:
    result = train(tmp_path, faults="stop worker=0.1.1 step=2 phase=backward")
    assert result.code == 0, result.said
    assert result.sha256 == alone(SPLIT="fsdp")


@pytest.mark.parametrize(
    ("split", "team"),
    [("fsdp", 3), covered("the same bytes are read into other places", "tp", 2), ("2d", 4), ("plain", 1)],
)
def test_another_layout_reads_the_same_bytes(tmp_path: Path, alone: Any, split: str, team: int) -> None:
    """FSDP2 of 2 ranks saves; other layouts resume, and hash what they hold. Two teams instead of one go on alike."""
    kept = {"CHECKPOINT": tmp_path / "kept", "EVERY": 2}
    first = train(tmp_path / "first", teams=1, STEPS=4, **kept)
    assert first.code == 0, first.said
    other = train(tmp_path / "other", teams=1, team=team, STEPS=4, SPLIT=split, **kept)
    assert {e["step"] for e in other.of("resumed")} == {4}
    assert other.sha256 == first.sha256
    again = train(tmp_path / "again", faults="kill worker=0.1.0 step=4 phase=vote", STEPS=6, **kept)
    assert {e["step"] for e in again.of("resumed")} == {4}
    assert again.sha256 == alone(SPLIT="fsdp")


@pytest.mark.thorough("spare workers, and a team that joins, are each in a test")
def test_a_spare_team_takes_the_place_of_a_lost_one(tmp_path: Path, alone: Any) -> None:
    faults = "kill worker=0.1.1 step=2 phase=backward"
    environment = {"WANTED": "2"}
    result = launch(
        tmp_path, script=SCRIPT, workers=2, team=2, spares=1, max_restarts=0, faults=faults, environment=environment
    )
    assert result.code == 0, result.said
    assert result.sha256 == alone(SPLIT="fsdp")
    assert "0.2" in {e["worker"] for e in result.of("commit")}
    assert len(result.results) == 4


@pytest.mark.thorough("FSDP2 is read into tensor parallelism in make test")
def test_fsdp_reads_what_tensor_parallelism_has_saved(tmp_path: Path) -> None:
    kept = {"CHECKPOINT": tmp_path / "kept", "EVERY": 2}
    first = train(tmp_path / "first", STEPS=4, SPLIT="tp", **kept)
    assert first.code == 0, first.said
    other = train(tmp_path / "other", STEPS=4, **kept)
    assert {e["step"] for e in other.of("resumed")} == {4}
    assert other.sha256 == first.sha256


@pytest.mark.thorough("a preempted machine saves, with teams or without")
def test_preempted_teams_save_and_leave(tmp_path: Path, alone: Any) -> None:
    kept = {"CHECKPOINT": str(tmp_path / "kept"), "EVERY": "100"}

    async def meddle(agent: Agent) -> None:
        await until(lambda: any(e["event"] == "commit" for e in read_events(agent.settings.events)))
        agent._asked_to_stop(signal.SIGTERM)
        hurry(agent)

    (tmp_path / "first").mkdir()
    settings = {"workers": 2, "team": 2, "environment": {**kept, "WANTED": "9", "STEPS": "60"}, "meddle": meddle}
    first = launch(tmp_path / "first", script=SCRIPT, **settings)
    assert any("is saved" in line for line in first.said), first.said
    second = train(tmp_path / "second", teams=1, **kept)
    assert second.of("resumed")
    assert second.sha256 == alone(SPLIT="fsdp")
