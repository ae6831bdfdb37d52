"""Restarts in fresh processes, of a toy that can be told to go wrong, and of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.study.adapters.base import SAVES
from holdfast.study.determinism_axis import measure, plan, restarts
from holdfast.study.inside.serve import hello
from holdfast.study.inside.session import Session
from holdfast.study.process import Failed, Start
from holdfast.study.restart_verdict import LessonRun, Row, difference, judge_control, needed
from tests.study import toy
from tests.study.conftest import Fork, starting

Rows = dict[str, Row]  # by what follows the framework in their id
StudyToy = Callable[..., Rows]


def rows_of(framework: str, start: Start, said: dict[str, Any], folder: Path, **given: Any) -> Rows:
    """``said``: in answer to hello."""
    heard: list[str] = []
    found = measure(framework, start, said, scratch=folder, logs=folder, say=heard.append, **given)
    assert len({row["id"] for row in found}) == len(found)
    assert all(row["says"] in "\n".join(heard) for row in found), "whoever waits is told what was found"
    assert not [path for path in folder.iterdir() if path.is_dir()], "what was saved is removed"
    return {row["id"].removeprefix(f"determinism/{framework}/"): row for row in found}


@pytest.fixture
def study_toy(tmp_path: Path) -> StudyToy:
    """Studies a toy with these faults; ``parts``: those that it can save."""

    def study(*, parts: tuple[str, ...] = toy.PARTS, quick: bool = True, limit_s: float = 60.0, **faults: Any) -> Rows:
        session = Session("toy")
        session.adapter = toy.Toy({})
        said = hello(session)
        said["parts"] = [part for part in said["parts"] if part["name"] in parts]
        start = starting("toy", toy.interpreter(tmp_path, **faults))
        return rows_of("toy", start, said, tmp_path, quick=quick, limit_s=limit_s)

    return study


def names(rows: Rows, verdict: str) -> set[str]:
    return {name for name, row in rows.items() if row["verdict"] == verdict}


# --- the plan ------------------------------------------------------------------------------------

HELLO = {"parts": [{"name": "model"}, {"name": "RNG"}, {"name": "loader"}], "usual": ["model"]}


def test_a_full_study_asks_every_question_at_every_save_point() -> None:
    cases = plan(HELLO, "", quick=False)
    assert len(cases) == len(restarts(cases)) == 3 * (1 + 1 + 3)
    assert {case.save_at for case in cases if case.left_out == "loader"} == set(SAVES)
    assert all(case.parts == {"model", "RNG"} for case in cases if case.left_out == "loader")


def test_a_variant_is_studied_in_full_too() -> None:
    assert len(plan(HELLO, "workers", quick=False)) == len(plan(HELLO, "", quick=False))
    assert len(plan(HELLO, "workers", quick=True)) == 1


@pytest.mark.parametrize(
    ("usual", "processes"), [(["model"], 7), (["model", "RNG"], 6), (["model", "RNG", "loader"], 6)]
)
def test_no_process_is_started_for_what_is_known(usual: list[str], processes: int) -> None:
    cases = plan({**HELLO, "usual": usual}, "", quick=True)
    assert (len(cases), len(restarts(cases))) == (7, processes)


# --- the verdict ---------------------------------------------------------------------------------

CONTROL = LessonRun(first=0, losses=["a", "b", "c", "d"], digests={"weights": "1", "average": "2"})


@pytest.mark.parametrize(
    ("losses", "digests", "first_step", "where"),
    [
        (["x", "d"], {}, 0, ("losses",)),
        (["c", "x"], {"weights": "x"}, 1, ("losses", "weights")),
        (["c", "d"], {"average": "x"}, None, ("average",)),
        (["c"], {}, 1, ("losses",)),
        ([], {}, 0, ("losses",)),
        (["c", "d"], {"scaler": "3"}, None, ("scaler",)),
    ],
)
def test_any_bit_that_differs_is_seen(
    losses: list[str], digests: dict[str, str], first_step: int | None, where: tuple[str, ...]
) -> None:
    found = difference(CONTROL, LessonRun(first=2, losses=losses, digests={**CONTROL.digests, **digests}))
    assert found is not None
    assert (found.first_step, found.where) == (first_step, where)


def test_only_what_is_all_the_same_is_identical() -> None:
    assert difference(CONTROL, LessonRun(first=2, losses=["c", "d"], digests=CONTROL.digests)) is None


@pytest.mark.parametrize(
    ("again", "verdict"),
    [
        (CONTROL, "identical"),
        (LessonRun(first=0, losses=["a", "b", "c", "x"], digests=CONTROL.digests), "not testable"),
        (LessonRun(first=0, losses=CONTROL.losses, digests={"weights": "1", "average": "x"}), "not testable"),
        (Failed("gone"), "failed"),
    ],
)
def test_the_control_is_identical_only_if_all_is(again: LessonRun | Failed, verdict: str) -> None:
    assert judge_control(CONTROL, again).verdict == judge_control(again, CONTROL).verdict == verdict


# --- a toy ---------------------------------------------------------------------------------------


def test_each_part_is_missed_where_it_matters(study_toy: StudyToy, tmp_path: Path) -> None:
    """At step 0 the script's seed makes all of it again, but for the numbers that the saved loader has drawn. An epoch
    begins with a new shuffle, whatever came before."""
    rows = study_toy(quick=False)
    asked = ["usual", *(f"without {part}" for part in toy.PARTS)]
    anyway = {"control", "saving itself", *(f"{at}/everything" for at in SAVES), "epoch's end/without loader"}
    at_step_0 = {f"step 0/{case}" for case in asked if case != "without RNG"}
    assert names(rows, "identical") == anyway | at_step_0
    assert names(rows, "differs") == rows.keys() - names(rows, "identical")
    assert toy.starts(tmp_path) == 2 + (1 + 3) * (1 + len(asked)), "a run that saves, and three restarts of it"
    assert needed(rows.values(), "toy") == list(toy.PARTS)
    assert needed([row for row in rows.values() if row["save_at"] == "step 0"], "toy") == ["RNG"]
    assert rows["mid-epoch/without loader"]["first_step"] == 0
    assert rows["mid-epoch/without optimizer"]["first_step"] == 1
    assert rows["mid-epoch/without optimizer"]["says"] == "differs from the second step after the restart"
    average = rows["mid-epoch/without average"]
    assert (average["first_step"], average["where"], average["says"]) == (
        None,
        ["average"],
        "same losses, other average",
    )
    assert rows["step 0/without optimizer"]["says"] == "identical: leaving it out is not noticed here"
    assert rows["control"]["save_at"] is None


def test_where_everything_is_not_enough_no_part_is_blamed(study_toy: StudyToy) -> None:
    """A framework that cannot save its loader: from mid-epoch on, all restarts differ, and show nothing."""
    rows = study_toy(parts=("model", "optimizer", "RNG"))
    assert rows["mid-epoch/everything"]["says"] == "differs from the first step after the restart"
    assert rows["mid-epoch/without RNG"]["says"].endswith("; with everything restored it differs, too")
    assert needed(rows.values(), "toy") == []


def test_nothing_is_identical_where_two_undisturbed_runs_differ(study_toy: StudyToy, tmp_path: Path) -> None:
    rows = study_toy(random=True)
    assert names(rows, "not testable") == rows.keys()
    assert rows["control"]["first_step"] == 0
    assert rows["control"]["where"] == ["losses", "weights", "average"]
    assert "differ already, from the first step on" in rows["control"]["says"]
    assert len(rows) == 2 + 3 + 1 + len(toy.PARTS), "they are listed all the same"
    assert toy.starts(tmp_path) == 2


def test_a_save_that_disturbs_the_run_is_seen(study_toy: StudyToy) -> None:
    row = study_toy(parts=("model",), disturbs=True)["saving itself"]
    assert (row["verdict"], row["where"][0]) == ("differs", "losses")
    assert row["says"].startswith("saving changes the run that saves, from the ")


def test_a_restart_that_fails_is_a_row_and_not_the_end(study_toy: StudyToy) -> None:
    faults = {"RNG": "raise", "loader": "crash"}
    rows = study_toy(parts=("RNG", "loader"), unless=faults)
    assert names(rows, "failed") == {f"mid-epoch/{case}" for case in ("usual", *(f"without {part}" for part in faults))}
    assert rows["mid-epoch/without RNG"]["error"] == "KeyError: 'RNG is missed'"
    assert "SIGSEGV" in rows["mid-epoch/without loader"]["error"]
    assert rows["step 0/everything"]["verdict"] == "identical"
    assert needed(rows.values(), "toy") == []


@pytest.mark.thorough("tests/study/test_process.py ends a process that hangs")
def test_a_restart_that_hangs_is_a_row_and_not_the_end(study_toy: StudyToy) -> None:
    rows = study_toy(parts=("average",), unless={"average": "hang"}, limit_s=6.0)
    assert names(rows, "failed") == {"mid-epoch/usual", "mid-epoch/without average"}


@pytest.mark.parametrize(
    ("op", "failed", "rest", "says"),
    [
        ("train", {"control"}, "not testable", "not run: the undisturbed run fails"),
        ("save", {"saving itself"}, "failed", "nothing to restart from: RuntimeError: the toy cannot save"),
    ],
)
def test_what_cannot_be_restarted_is_listed(
    study_toy: StudyToy, op: str, failed: set[str], rest: str, says: str
) -> None:
    rows = study_toy(breaks=op)
    assert failed <= names(rows, "failed")
    assert names(rows, "identical") <= {"control"}
    others = [row for name, row in rows.items() if name not in ("control", "saving itself")]
    assert {(row["verdict"], row["says"]) for row in others} == {(rest, says)}


# --- PyTorch -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_rows(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """As in a quick study: an interpreter for what may be identical, forks for what leaves a part out."""
    folder, quickly = tmp_path_factory.mktemp("determinism"), fork("pytorch")
    with quickly(folder / "hello.log") as process:
        said = process.ask("hello")
    return rows_of("pytorch", starting("pytorch"), {**said, "variants": [""]}, folder, quick=True, fork=quickly)


IN_INTERPRETERS = pytest.mark.thorough("tests/study/adapters/test_pytorch.py restarts forks with and without each part")


@IN_INTERPRETERS
@pytest.mark.parametrize("name", ["control", "saving itself", *(f"{at}/everything" for at in SAVES)])
def test_pytorch_restarts_identically_with_everything(torch_rows: Rows, name: str) -> None:
    assert torch_rows[name]["verdict"] == "identical", torch_rows[name]["says"]


@IN_INTERPRETERS
@pytest.mark.parametrize(
    ("part", "first_step"),
    [
        ("model", 0),
        ("loader", 0),
        ("torch rng", 0),
        ("numpy rng", 0),
        ("python rng", 0),
        ("optimizer", 1),
        ("scheduler", 2),
        ("average", None),
    ],
)
def test_what_pytorch_leaves_out_is_noticed(torch_rows: Rows, part: str, first_step: int | None) -> None:
    row = torch_rows[f"mid-epoch/without {part}"]
    assert (row["verdict"], row["first_step"]) == ("differs", first_step)
    assert part in needed(torch_rows.values(), "pytorch")
    assert ("losses" in row["where"]) == (first_step is not None)


@IN_INTERPRETERS
def test_the_tutorial_is_not_enough_in_mid_epoch(torch_rows: Rows) -> None:
    assert torch_rows["mid-epoch/usual"]["verdict"] == "differs"
