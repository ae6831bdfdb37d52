"""``bench planner``, small: it measures what it says, and its bars can be missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.race_report import publish
from bench.races import planner
from bench.races.planner import MODELS, PlannerSizes, failures, with_minimum
from holdfast.plan.planner import PipelinePlan, make_plan
from holdfast.plan.profile import Profile
from holdfast.plan.template import make_templates

SMALL = PlannerSizes(published=(8, 8), large=(12, 40), layers=(4, 8), nodes=(10, 40))


def test_a_small_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planner, "TURNS", 1)
    results, bars = planner.race(rounds=1, say=lambda text: None, sizes=SMALL)
    publish("planner", results, bars, columns=planner.COLUMNS, as_json=True)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(printed["bars"]) == 4
    for kind in MODELS:
        row = printed["results"][f"templates, {kind}, 12 layers on 40x8"]
        assert 0 < row["seconds"]["low"] <= row["seconds"]["high"]
        assert "optimal" in row["note"]
    kinds = {name for name in printed["results"] if name.startswith("after a failure: ")}
    assert {name.split(": ")[1] for name in kinds} == {
        "one lost",
        "2 lost",
        "a pipeline lost",
        "a tenth lost",
        "one joins",
    }
    assert all(len(printed["results"][name]["each"]) == len(MODELS) * len(planner.MINIMA) for name in kinds)
    assert printed["results"]["templates, 8 nodes of 8"]["points"]["random"].keys() == {"4", "8"}
    assert (tmp_path / ".bench" / "planner.png").read_bytes().startswith(b"\x89PNG")


def test_the_bars_are_missed_by_a_slow_planner() -> None:
    """The slowest model decides; of failures the median and the slowest kind."""
    times = {
        "templates, equal, 96 layers on 24x8": [1.0, 1.0, 9.0],
        "templates, random, 96 layers on 24x8": [2.5, 2.5, 0.1],
        "templates, equal, 128 layers on 1000x8": [29.0],
        "after a failure, equal: one lost": [0.05],
        "after a failure, equal: 2 lost": [0.06, 0.06, 5.0],
        "after a failure, random: one lost": [0.2],
    }
    bars = planner._bars(times, PlannerSizes())
    assert [bar.ok for bar in bars.values()] == [False, True, True, False]
    assert bars["templates, 96 layers on 24x8, s"].value == 2.5


@pytest.mark.parametrize("kind", MODELS)
def test_the_models_are_profiles(kind: str) -> None:
    profile = MODELS[kind](9)
    assert len(profile.layers) == 9
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert MODELS[kind](9) == profile, "the same in every round"


def test_the_failures_are_what_they_are_called() -> None:
    templates = with_minimum(make_templates(MODELS["equal"](8), nodes=40, tolerate=2), 2)
    assert min(templates.by_nodes) == templates.minimum == 2
    everyone = [f"n{number}" for number in range(40)]
    plan = make_plan(templates, everyone, micro_batches=160)
    assert isinstance(plan, PipelinePlan)
    lost = failures(plan, everyone, seed=1)
    assert {kind: len(nodes) for kind, nodes in lost.items() if kind != "a pipeline lost"} == {
        "one lost": 1,
        "2 lost": 2,
        "a tenth lost": 4,
    }
    assert lost["a pipeline lost"] in [set(pipeline.nodes) for pipeline in plan.pipelines]
