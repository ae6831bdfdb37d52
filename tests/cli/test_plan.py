"""``holdfast plan`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.plan.profile import Profile, uniform
from tests.cli.conftest import Call

MADE_UP = ("--layers", 12, "--uniform")


@pytest.fixture
def plan(call: Call) -> Call:
    return partial(call, "plan", columns=80)


@pytest.fixture
def written(tmp_path: Path):
    """A file with a profile, or with a profile that somebody has changed."""

    def write(profile: Profile, **changes: object) -> Path:
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({**profile.to_json(), **changes}))
        return path

    return write


def test_the_plan_of_a_made_up_model(plan, tmp_path: Path) -> None:
    said = plan(*MADE_UP, "--nodes", 7, "--min-nodes", 2, "--picture", tmp_path / "plan.svg")
    assert said.code == 0
    assert said.out.startswith("12 equal layers on 7 nodes")
    assert max(map(len, said.out.splitlines())) <= 80 or str(tmp_path) in said.out
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1


def test_the_plan_of_a_profile(plan, written) -> None:
    profile = replace(uniform(10, memory=1 << 30), model="mine", micro_batch=4)
    said = plan("--profile", written(profile), "--nodes", 9, "--devices-per-node", 2, "--global-batch", 160, "--json")
    assert said.code == 0
    assert said.json["model"] == "mine"
    assert said.json["micro_batches"] == 40
    assert said.json["samples_per_s"] == pytest.approx(160 / said.json["step_seconds"])
    assert all(stage["bytes"] <= 1 << 30 for one in said.json["templates"] for stage in one["stages"])


def test_json_is_one_object_that_adds_up(plan) -> None:
    said = plan(*MADE_UP, "--nodes", 9, "--tolerate", 2, "--min-nodes", 2, "--micro-batches", 41, "--json")
    assert said.code == 0
    assert len(said.out.splitlines()) == 1, "what people read goes to stderr"
    assert "samples/s" in said.err
    made = said.json
    assert made["nodes"] == 9
    assert made["tolerate"] == 2
    assert made["minimum_nodes"] == 6
    assert [one["nodes"] for one in made["templates"]] == [2, 3, 4, 5]
    for one in made["templates"]:
        bounds = [stage["layers"] for stage in one["stages"]]
        assert [a for a, _ in bounds] == [0, *(b for _, b in bounds[:-1])]
        assert bounds[-1][1] == 12
        assert {stage["node"] for stage in one["stages"]} == set(range(one["nodes"]))
        assert one["gap"] >= 0
        assert one["seconds"] > 0
    pipelines = made["pipelines"]
    assert len(pipelines) >= 3
    assert sorted(node for one in pipelines for node in one["nodes"]) == [f"n{n}" for n in range(9)]
    assert sum(one["micro_batches"] for one in pipelines) == 41
    assert made["step_seconds"] == max(one["seconds"] for one in pipelines)
    assert made["reason"]


def test_json_has_each_loss_and_its_worst_case(plan) -> None:
    made = plan(*MADE_UP, "--nodes", 9, "--tolerate", 2, "--min-nodes", 2, "--json").json
    assert made["every_loss_listed"]
    for count, sets in ((1, 9), (2, 36)):
        cases = [case for case in made["losses"] if case["lost"] == count]
        assert sum(case["ways"] for case in cases) == sets
        assert sum(case["worst"] for case in cases) == 1
        for case in cases:
            assert not case["lost_layers"]
            assert sum(case["pipelines"]) == 9 - count
            assert len(case["pipelines"]) > 2
            assert sum(len(hit["positions"]) for hit in case["hit"]) == count
    assert [one["nodes"] for one in made["fewer"]] == [6, 5]
    assert [one["stops"] for one in made["fewer"]] == [False, True]
    assert sum(made["join"]["pipelines"]) == 10


def test_the_same_question_has_the_same_answer(plan) -> None:
    question = (*MADE_UP, "--nodes", 11, "--min-nodes", 3, "--json")
    assert plan(*question) == plan(*question)


def test_less_memory_takes_more_nodes(plan) -> None:
    rich, poor = (plan(*MADE_UP, "--nodes", 20, "--memory", gb, "--json").json for gb in (100, 1.2))
    assert rich["minimum_nodes"] == 2
    assert poor["minimum_nodes"] > 2


MISUSES = [
    (["--nodes", 4], "--profile FILE"),
    (["--nodes", 4, "--layers", 12], "--uniform"),
    (["--layers", 12, "--uniform"], "--nodes"),
    ([*MADE_UP, "--nodes", 0], "--nodes"),
    ([*MADE_UP, "--nodes", 1_000_000], "--nodes"),
    ([*MADE_UP, "--nodes", 4, "--tolerate", -1], "--tolerate"),
    (["--layers", 0, "--uniform", "--nodes", 4], "0 layers"),
    (["--layers", 1_000_000, "--uniform", "--nodes", 4], "1000000 layers"),
    ([*MADE_UP, "--nodes", 4, "--memory", 0], "0 GB"),
    ([*MADE_UP, "--nodes", 4, "--memory", -8], "-8 GB"),
    ([*MADE_UP, "--nodes", 4, "--memory", "nan"], "nan GB"),
    ([*MADE_UP, "--nodes", 4, "--memory", 0.01], "layer 0"),
    ([*MADE_UP, "--nodes", 4, "--tolerate", 4], "5"),
    ([*MADE_UP, "--nodes", 5, "--tolerate", 2, "--min-nodes", 2], "6"),
    ([*MADE_UP, "--nodes", 4, "--min-nodes", 13], "13"),
    ([*MADE_UP, "--nodes", 4, "--micro-batches", 0], "0 micro-batches"),
    ([*MADE_UP, "--nodes", 30, "--micro-batches", 1], "3"),
    ([*MADE_UP, "--nodes", 4, "--micro-batches", 8, "--global-batch", 8], "--global-batch"),
    ([*MADE_UP, "--nodes", 4, "--picture", "plan.pdf"], "plan.pdf"),
    ([*MADE_UP, "--nodes", 4, "--picture", "missing/plan.png"], "missing"),
    (["--profile", "missing.json", "--nodes", 4], "missing.json"),
    (["--profile", ".", "--nodes", 4], "profile"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISUSES)
def test_bad_use_is_a_sentence_and_exit_code_2(
    plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[object], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = plan(*arguments)
    assert said.code == 2
    assert sentence in said.err
    assert not said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"memory": 0}, "0 bytes of memory"),
        ({"holdfast_profile": 99}, "version 99"),
        ({"layers": []}, "0 layers"),
        ({"layers": "abc"}, "profile"),
        ({"micro_batch": 0}, "micro-batch"),
        ({"between": {"bandwidth": 0}}, "0 bytes/s"),
    ],
)
def test_a_spoilt_profile_is_refused(plan, written, changes: dict[str, Any], sentence: str) -> None:
    said = plan("--profile", written(uniform(4), **changes), "--nodes", 4)
    assert said.code == 2
    assert sentence in said.err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"layers": []}', "\udcff"])
def test_a_file_that_is_no_profile_is_refused(plan, tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    said = plan("--profile", path, "--nodes", 4)
    assert said.code == 2
    assert "profile" in said.err


def test_two_models_are_one_too_many(plan, written) -> None:
    path = written(uniform(4))
    assert "two models" in plan("--profile", path, "--layers", 12, "--uniform", "--nodes", 4).err
    assert "--uniform is for a made-up model" in plan("--profile", path, "--uniform", "--nodes", 4).err


def test_samples_that_are_no_whole_micro_batches_name_the_nearest(plan, written) -> None:
    path = written(replace(uniform(4), micro_batch=8))
    said = plan("--profile", path, "--nodes", 4, "--global-batch", 100)
    assert said.code == 2
    assert "96 and 104" in said.err


def test_planning_needs_no_torch() -> None:
    """And without a picture no matplotlib: the command has to start fast."""
    program = """
import sys
from holdfast.cli.plan import plan
assert not {"numpy", "rich"} & set(sys.modules), "imported before the command is called"
plan(nodes=4, layers=6, uniform=True, as_json=True)
assert not {"torch", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
