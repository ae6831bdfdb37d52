"""One copy of each layer and a log: workers are killed anywhere, and the weights are those of one worker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.judge import kill, scenarios, sweep
from tests.faults.logs import (
    STEPS,
    STRUCK,
    assert_as_if_nothing_had_happened,
    assert_replayed,
    assert_survivors_went_on,
    failures,
    layers_of,
    logged,
    replay_of,
)

PHASES = ["data", "forward", "backward", "reduce", "vote", "voted", "update"]
WORKERS = ["0.0", "0.1", "0.2", "0.3"]
STRIKES = [(phase, worker) for phase in PHASES for worker in WORKERS]
GROUPS = [
    ("0.0", "0.1"), ("0.1", "0.2"), ("0.2", "0.3"), ("0.0", "0.2"), ("0.1", "0.3"), ("0.0", "0.3"),
    ("0.1", "0.2", "0.3"), ("0.0", "0.2", "0.3"), ("0.0", "0.1", "0.3"), ("0.0", "0.1", "0.2"),
]  # fmt: skip
AGAIN = [("0.2", 1), ("0.0", 1), ("0.0", 3), ("0.2", 3), ("0.3", 2), ("0.3", 6)]
REGROUPS = [(phase, worker) for phase in ("regroup", "copy", "replay") for worker in ("0.0", "0.2", "0.3")]
SAVING = [(phase, worker, step) for phase in ("snapshot", "write") for worker in ("0.0", "0.2") for step in (0, 4)]
SAVING += [("commit", "0.0", 0), ("commit", "0.0", 4)]
HANGS = [("forward", "0.0"), ("backward", "0.2"), ("vote", "0.3"), ("reduce", "0.1")]
VOTES = [(number,) for number in range(10, 20)]  # of the last steps, the evaluations, the hashes and the end


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweep(metafunc, "strike", STRIKES, [("update", "0.3")])
    sweep(metafunc, "group", GROUPS, [("0.0", "0.3")])
    sweep(metafunc, "again", AGAIN, [("0.0", 3)])
    sweep(metafunc, "second", [("forward",), ("snapshot",), ("write",)], [])
    sweep(metafunc, "regroup", REGROUPS, [])
    sweep(metafunc, "saving", SAVING, [("write", "0.2", 4)])
    sweep(metafunc, "hang", HANGS, [])
    sweep(metafunc, "vote", VOTES, [])
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", scenarios(metafunc.config))


LONG = pytest.mark.thorough("other tests lose stages, also with replacements and twice")


def test_a_stage_is_lost(tmp_path: Path, whole, strike: tuple[str, str]) -> None:
    phase, worker = strike
    result = logged(tmp_path, lost=[worker], phase=phase, LOG_MEDDLE="count *")
    assert_replayed(result, whole(STEPS), [worker])
    assert failures(result) == {worker}
    assert len(result.of("recomputed")) == 3, "all who are left take part"


@LONG
def test_without_replacements(tmp_path: Path, whole) -> None:
    result = logged(tmp_path, lost=["0.1"], phase="voted", max_restarts=0)
    assert_replayed(result, whole(STEPS), ["0.1"])
    assert {line["worker"] for line in result.results} == {"0.0", "0.2", "0.3"}


def test_several_are_lost_at_once(tmp_path: Path, whole, group: tuple[str, ...]) -> None:
    result = logged(tmp_path, lost=group, phase="vote")
    assert_replayed(result, whole(STEPS), group)


def test_a_stage_hangs(tmp_path: Path, whole, hang: tuple[str, str]) -> None:
    phase, worker = hang
    result = logged(tmp_path, faults=f"stop worker={worker} step=6 phase={phase}", heartbeat_timeout=2.0)
    assert_replayed(result, whole(STEPS), [worker])


def test_both_copies_of_a_stage_are_lost(tmp_path: Path, whole) -> None:
    """Two pipelines: each worker has the records of half of the micro-batches.

    The second goes when it has missed the first: had it lived on until its own vote, its layers could have been copied.
    """
    second = kill(["0.2"], step=STRUCK, phase="regroup")
    result = logged(tmp_path, lost=["0.0"], phase="vote", faults=second, stages="5,5", tolerate=1)
    assert_replayed(result, whole(STEPS), ["0.0", "0.2"])


# --- losses while the first one is recovered from ------------------------------------------------


def test_one_more_is_lost_in_the_replay(tmp_path: Path, whole, again: tuple[str, int]) -> None:
    """0.0 and 0.2 have records that the lost stage needs, 0.3 has none."""
    worker, count = again
    result = logged(tmp_path, lost=["0.1"], LOG_MEDDLE=f"die {worker} {count}; count *")
    assert_replayed(result, whole(STEPS), ["0.1", worker])
    assert not [e for e in result.of("replay") if e["generation"] == 2 and e["worker"] == worker]


def test_a_second_loss_before_the_next_checkpoint(tmp_path: Path, whole, second: tuple[str]) -> None:
    """The layers that came back are lost once more, and others with them: their records are those of the replay."""
    result = logged(tmp_path, lost=["0.1"], faults=f"kill worker=0.2 step=7 phase={second[0]}", max_restarts=0)
    assert_replayed(result, whole(STEPS), ["0.1", "0.2"])
    assert {e["first"] for e in result.of("replay")} == {0}, "there is no other checkpoint yet"


def test_one_more_is_lost_while_the_others_regroup(tmp_path: Path, whole, regroup: tuple[str, str]) -> None:
    phase, worker = regroup
    more = {"MEDDLE": f"copying {worker}"} if phase == "copy" else {}
    faults = "" if more else f"kill worker={worker} step=6 phase={phase}"
    result = logged(tmp_path, lost=["0.1"], faults=faults, **more)
    assert_replayed(result, whole(STEPS), ["0.1", worker])


@LONG
def test_two_losses_with_a_join_between(tmp_path: Path, whole) -> None:
    """The replacement comes, then one of the first is lost: the log began anew with a checkpoint."""
    steps = 24
    faults = "kill worker=0.3 step=20 phase=reduce"
    patient = {"WANTED": "4", "PATIENT": "4", "HURRY": str(tmp_path / "never")}
    result = logged(tmp_path, lost=["0.1"], step=3, faults=faults, steps=steps, **patient)
    assert_replayed(result, whole(steps), ["0.1", "0.3"])
    joined = [e["number"] for e in result.of("generation") if "0.4" in e["workers"]]
    assert joined, "the replacement came"
    later = [e for e in result.of("replay") if e["generation"] > joined[0]]
    assert later
    assert all(e["first"] > 3 for e in later), "not from the checkpoint before the join"


# --- checkpoints and the end ---------------------------------------------------------------------


def test_a_loss_while_a_checkpoint_is_taken(tmp_path: Path, whole, saving: tuple[str, str, int]) -> None:
    phase, worker, step = saving
    result = logged(tmp_path, faults=f"kill worker={worker} step={step} phase={phase}", EVERY="4")
    assert_as_if_nothing_had_happened(result, whole(STEPS))
    if step:
        assert_survivors_went_on(result, [worker])


@LONG
def test_the_first_checkpoint_was_never_there(tmp_path: Path, whole) -> None:
    """It could not be committed. Some steps later there is nothing to begin from but the begin."""
    result = logged(tmp_path, faults="kill worker=0.0 step=0 phase=commit; kill worker=0.2 step=3 phase=forward")
    assert_as_if_nothing_had_happened(result, whole(STEPS))


def test_a_loss_in_the_last_operations(tmp_path: Path, whole, vote: tuple[int]) -> None:
    """Of steps, evaluations, the last checkpoint, hashes: 0.2 is killed when it has heard all others."""
    result = logged(tmp_path, MEDDLE=f"die 0.2 {vote[0]}", MODEL=str(tmp_path / "model.safetensors"))
    assert_as_if_nothing_had_happened(result, whole(STEPS))
    assert_survivors_went_on(result, ["0.2"])
    expected = Path(whole(STEPS).results[0]["model"])
    assert (tmp_path / "model.safetensors").read_bytes() == expected.read_bytes()


def test_a_vote_that_only_some_have_heard(tmp_path: Path, whole) -> None:
    """0.0 hears nobody; 0.1 commits and dies: its layers must take that step as well."""
    result = logged(tmp_path, MEDDLE="deaf 0.0 8; die 0.1 8")
    assert_replayed(result, whole(STEPS), ["0.1"])
    assert layers_of(replay_of(result, 2)) == {3, 4}


@LONG
def test_layers_that_each_worker_makes(tmp_path: Path) -> None:
    one = logged(tmp_path / "one", workers=1, stages="1", LATER="1", LOG="0")
    result = logged(tmp_path / "four", lost=["0.3"], LATER="1")
    assert_replayed(result, one, ["0.3"])


# --- anything ------------------------------------------------------------------------------------


def test_random_losses(tmp_path: Path, whole, seed: int) -> None:
    """Any number of workers, replacements too, sometimes in the middle of a recovery; never wrong."""
    steps, rng = 16, random.Random(seed)
    workers = rng.randint(2, 5)
    kills = [("kill", phase) for phase in [*PHASES, "regroup", "copy", "replay", "snapshot", "write", "commit"]]
    # Nobody can tell a worker that hangs before it has come from one whose script takes its time.
    strikes = [*kills, *(("stop", phase) for phase in ("forward", "vote", "replay"))]
    doomed = [f"0.{number}" for number in range(2 * workers) if rng.random() < 0.4]
    chosen = [(worker, rng.randrange(steps), *rng.choice(strikes)) for worker in doomed]
    faults = "; ".join(f"{kind} worker={worker} step={step} phase={phase}" for worker, step, kind, phase in chosen)
    shape = {"stages": rng.choice(["auto", "2", "4", "3,2,2,3", "9,1"]), "tolerate": rng.choice([0, 0, 1])}
    shape |= {"EVERY": rng.choice(["3", "100"]), "LOG": rng.choice(["1", "1", "60000"])}
    shape |= {"LOG_MEMORY": "0"} if rng.random() < 0.3 else {}
    print(f"{workers} workers, {shape}, {faults}")
    result = logged(tmp_path, workers=workers, steps=steps, faults=faults, heartbeat_timeout=3.0, **shape)
    assert_as_if_nothing_had_happened(result, whole(steps))
