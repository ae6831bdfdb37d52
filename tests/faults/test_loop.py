"""``holdfast.Loop`` on real processes: the hash of the same program as a ``Run``, through kills, joins and resumes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults import loop_train
from tests.faults.judge import covered, sweep
from tests.faults.sync_judge import Rules, assert_good_end, assert_nothing_lost, assert_went_on
from tests.faults.sync_judge import train as train_apart
from tests.faults.test_sync_faults import ALL as APART
from tests.faults.test_sync_faults import STEP_PHASES
from tests.harness import (
    Hosts,
    Result,
    assert_each_sample_once_per_epoch,
    assert_every_worker_commits_each_step_once,
    launch,
    launch_hosts,
    until,
)

SCRIPT = Path(loop_train.__file__)
STEPS = 6
PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]


def train(folder: Path, *, workers: int = 3, faults: str = "", steps: int = STEPS, **settings: object) -> Result:
    folder.mkdir(exist_ok=True)
    environment = {"STEPS": str(steps), **{name: str(value) for name, value in settings.items()}}
    return launch(folder, script=SCRIPT, workers=workers, faults=faults, environment=environment)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The hash of an undisturbed run on one worker, by default of the program as a ``Run``."""

    @cache
    def found(**settings: object) -> str:
        result = train(tmp_path_factory.mktemp("alone"), workers=1, **{"FORM": "run", **settings})
        assert result.code == 0, result.said
        return result.sha256

    return found


def assert_same(result: Result, expected: str, *, lost: set[str]) -> None:
    assert result.code == 0, result.said
    assert {e["worker"] for e in result.of("failure")} == lost, "others were killed, or nobody"
    assert result.sha256 == expected


# --- a Run and a Loop -----------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kills = [(phase, f"0.{n}") for phase in PHASES for n in range(3)]
    sweep(metafunc, "kill", kills, [("backward", "0.1"), ("voted", "0.0")])
    turns = [(part, phase, f"0.{n}") for part in range(3) for phase in PHASES for n in range(3)]
    sweep(metafunc, "turn", turns, [(2, "reduce", "0.2")])
    apart = [strike for strike in APART if strike[0] != "ssp"]  # what a server has is judged in another way
    sweep(metafunc, "apart", apart, [("overlap", "averaged", "0.1"), ("gradients", "update", "0.1")])


def test_kill(tmp_path: Path, alone: Any, kill: tuple[str, str]) -> None:
    """And somebody joins, who begins with the state and the average of the others."""
    phase, worker = kill
    result = train(tmp_path, faults=f"kill worker={worker} step=2 phase={phase}", WANTED=3)
    assert_same(result, alone(), lost={worker})
    assert_every_worker_commits_each_step_once(result)
    assert_each_sample_once_per_epoch(result, size=70, steps_per_epoch=5)
    assert "0.3" in {e["worker"] for e in result.of("commit")}, "nobody has joined"


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (4, {"AUTOCAST": 1, "WEIGHT": 1, "LOADERS": 1, "INSTANCE": 1}),
        *(covered("four are more than one, too", n, {}) for n in (1, 2, 3)),
        *(covered("all at once, in another case", 2, {name: 1}) for name in ("AUTOCAST", "WEIGHT", "LOADERS")),
    ],
)
def test_a_run_and_a_loop_have_the_same_hash(
    tmp_path: Path, alone: Any, workers: int, settings: dict[str, object]
) -> None:
    own = {name: value for name, value in settings.items() if name not in ("LOADERS", "INSTANCE")}
    assert_same(train(tmp_path, workers=workers, **settings), alone(**own), lost=set())


@pytest.mark.parametrize("data", ["stream", covered("a stream has positions, too", "map")])
def test_a_resume_on_more_workers(tmp_path: Path, alone: Any, data: str) -> None:
    kept = {"CHECKPOINT": tmp_path / "kept", "EVERY": 2, "DATA": data}
    first = train(tmp_path / "first", workers=2, steps=3, faults="kill worker=0.0 step=1 phase=vote", WANTED=2, **kept)
    assert first.code == 0
    second = train(tmp_path / "second", faults="kill worker=0.1 step=4 phase=backward", **kept)
    assert {e["step"] for e in second.of("resumed")} == {3}
    assert_same(second, alone(DATA=data), lost={"0.1"})


def test_control_a_gradient_that_is_missing_is_seen(tmp_path: Path, alone: Any) -> None:
    assert train(tmp_path, workers=2, faults="skip-gradient worker=0.1 step=2").sha256 != alone()


def test_a_preempted_machine_leaves_between_two_steps(tmp_path: Path, alone: Any) -> None:
    """Between two steps of three updates each, not between two updates."""

    async def meddle(hosts: Hosts) -> None:
        await until(lambda: any(e["event"] == "commit" and e["step"] == 1 for e in hosts.events()))
        hosts.leave(1)
        (tmp_path / "hurry").touch()

    environment = {"FORM": "turns", "STEPS": str(STEPS), "WANTED": "99"}
    more: dict[str, Any] = {"minimum_hosts": 1, "maximum_hosts": 2}
    result = launch_hosts(tmp_path, script=SCRIPT, workers=[2, 1], meddle=meddle, environment=environment, **more)
    assert result.code == 0, result.said
    assert result.sha256 == alone(FORM="turns")
    last = [e["generation"] for e in result.of("commit") if e["worker"] == "1.0"]
    assert max(last) < max(e["generation"] for e in result.of("commit")), "nobody has left"


# --- several models in turns ----------------------------------------------------------------------------


def test_kill_between_the_commits_of_a_step(tmp_path: Path, alone: Any, turn: tuple[int, str, str]) -> None:
    part, phase, worker = turn
    faults = f"kill worker={worker} step=2 part={part} phase={phase}"
    result = train(tmp_path, faults=faults, FORM="turns", WANTED=3)
    assert_same(result, alone(FORM="turns"), lost={worker})


def test_several_kills_between_the_commits_of_steps_with_evaluations(tmp_path: Path, alone: Any) -> None:
    """What was evaluated after the first commit has its value, though there is another commit since."""
    faults = [(0, "step=1 part=1 phase=vote"), (1, "step=1 part=2 phase=backward"), (2, "step=3 part=2 phase=voted")]
    text = "; ".join(f"kill worker=0.{number} {place}" for number, place in faults)
    result = train(tmp_path, workers=4, faults=text, FORM="turns", BETWEEN=1)
    assert_same(result, alone(FORM="turns", BETWEEN=1), lost={"0.0", "0.1", "0.2"})
    assert {line["updates"] for line in result.results} == {3 * STEPS}


# --- replicas that train apart --------------------------------------------------------------------------


def test_kill_apart(tmp_path: Path, apart: tuple[str, str, str]) -> None:
    policy, phase, victim = apart
    step = " step=4" if phase in STEP_PHASES else ""
    trial = train_apart(tmp_path, policy, faults=f"kill worker={victim}{step} phase={phase}", EVALUATE=7, FORM="loop")
    assert_good_end(trial)
    assert_went_on(trial, {victim}, workers=3)
    assert_nothing_lost(trial.lives, Rules.of(policy))


@pytest.mark.parametrize(
    "policy", ["LocalSGD(every=4, overlap=2)", covered("each is driven alike", "DiLoCo(every=3)"), "SelSync(delta=0)"]
)
def test_apart_a_run_and_a_loop_have_the_same_hash(tmp_path: Path, policy: str) -> None:
    """Undisturbed: what a lost replica has learned alone is lost. The model's layers have no random numbers here."""
    more = {"model": "waves", "CLIP": 1.0, "EVALUATE": 5, "DROPOUT": 0, "workers": 2}
    run, loop = (train_apart(tmp_path / form, policy, FORM=form, **more) for form in ("run", "loop"))
    assert_good_end(loop)
    assert loop.result.sha256 == run.result.sha256


# --- workers that do not do the same --------------------------------------------------------------------

WORDS = {
    "nothing": "step 2 was not committed",
    "leaves": "before all of its micro-batches were computed",
    "once more": "workers disagree on what comes next",
    "clips": "workers disagree on what comes next",
    "other": "workers disagree on what comes next",
    "evaluates": "workers disagree on what comes next",
}


OTHERS = [covered("another way of it", name) for name in ("leaves", "clips", "other", "evaluates")]


@pytest.mark.parametrize("astray", ["nothing", "once more", *OTHERS])
def test_workers_that_do_not_do_the_same_are_told(
    tmp_path: Path, astray: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, workers=2, FORM="astray", ASTRAY=astray)
    assert result.code == 2
    assert WORDS[astray] in capsys.readouterr().err
