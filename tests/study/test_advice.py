"""Advice follows the rows: other numbers, other advice; no rows, no sentence."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from holdfast.plan.interval import young_daly
from holdfast.study.advice import advise
from holdfast.study.advice.interval import Rhythm
from holdfast.study.rows import AXES
from tests.study.example import example, spread

Results = dict[str, Any]


@pytest.fixture
def results() -> Results:
    return example(missing=None)


def sentences(results: Results, axis: str, word: str = "") -> list[str]:
    return [each["sentence"] for each in advise(results) if each["axis"] == axis and word in each["sentence"]]


def row(results: Results, wanted: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for axis in AXES for row in results[axis] if row["id"] == wanted)
    return found


def without(results: Results, axis: str) -> Results:
    return {**results, axis: []}


def test_every_sentence_rests_on_rows_that_exist(results: Results) -> None:
    ids = {row["id"] for axis in AXES for row in results[axis]}
    for each in advise(results):
        assert each["rests_on"], each["sentence"]
        assert set(each["rests_on"]) <= ids
        assert any(letter.isdigit() for letter in each["sentence"]), each["sentence"]


def test_there_are_not_more_sentences_than_people_read(results: Results) -> None:
    assert 10 <= len(advise(results)) <= 15


def test_no_rows_no_sentences(results: Results) -> None:
    for axis in AXES:
        results = without(results, axis)
    assert advise(results) == []
    assert advise({"settings": {"mtbf_s": 60.0}}) == []


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_that_was_not_measured_is_not_spoken_of(results: Results, axis: str) -> None:
    for each in advise(without(results, axis)):
        assert not any(wanted.startswith(axis.removesuffix("_safety") + "/") for wanted in each["rests_on"])


# --- the format -------------------------------------------------------------------------------------------


def test_the_safe_format_that_loses_least_is_advised(results: Results) -> None:
    assert sentences(results, "cost")[0].startswith("Save resnet50 as holdfast: ")
    row(results, "cost/resnet50/pytorch/safetensors")["lost_s"] = spread(0.001)
    assert sentences(results, "cost")[0].startswith("Save resnet50 as safetensors (pytorch): ")


def test_a_format_that_a_kill_harmed_is_never_advised(results: Results) -> None:
    row(results, "cost/resnet50/pytorch/torch.save")["lost_s"] = spread(0.001)
    assert sentences(results, "cost")[0].startswith("Save resnet50 as holdfast: ")
    (unsafe,) = sentences(results, "crash_safety", "Killed")
    assert "the one that loses the least time, too: torch.save (pytorch)" in unsafe
    assert "rename: torch.save then survived 20 of 20" in unsafe
    row(results, "crash/pytorch/torch.save/kill")["verdict"] = "safe"
    assert sentences(results, "cost")[0].startswith("Save resnet50 as torch.save (pytorch): ")


def test_without_kills_nothing_is_called_safe(results: Results) -> None:
    results["crash_safety"] = [row for row in results["crash_safety"] if row["what"] != "kill"]
    said = " ".join(each["sentence"] for each in advise(results))
    assert "surviv" not in said
    assert "none was killed" in sentences(results, "cost")[0]


def test_where_no_format_survives_that_is_said(results: Results) -> None:
    for each in results["crash_safety"]:
        if each["what"] == "kill" and "error" not in each:
            each["verdict"] = "unsafe"
    assert sentences(results, "cost")[0].startswith("No format survived all kills; ")


def test_ranges_that_overlap_are_no_difference(results: Results) -> None:
    assert "Next is safetensors" in sentences(results, "cost")[0]
    row(results, "cost/resnet50/pytorch/safetensors")["lost_s"] = {"median": 0.15, "low": 0.08, "high": 0.2}
    assert "cannot be told from it" in sentences(results, "cost")[0]


def test_each_framework_has_its_own_best(results: Results) -> None:
    (said,) = sentences(results, "cost", "bound to a framework")
    assert "pytorch: safetensors" in said
    assert "jax: orbax raw" in said
    assert "chainer: npz raw" in said
    assert "none of its 4 formats survived" in said
    assert "holdfast:" not in said


# --- the interval -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "between"), [(0.5, 3600.0), (2.0, 21600.0), (30.0, 86400.0)])
def test_no_other_interval_trains_more(lost: float, between: float) -> None:
    rhythm = Rhythm(lost=lost, reload=3.0, between=between)
    tried = [rhythm.best * 1.1**power for power in range(-30, 31)]
    assert max(tried, key=rhythm.goodput) == pytest.approx(rhythm.best)
    assert rhythm.goodput(rhythm.best) == pytest.approx(1 - math.sqrt(2 * lost / between) - 3.0 / between)


def test_the_interval_follows_the_cost_and_the_failures(results: Results) -> None:
    best = row(results, "cost/resnet50/holdfast/holdfast")
    best["lost_s"] = spread(0.08)
    results["settings"]["mtbf_s"] = 4000.0
    assert young_daly(0.08, 4000.0) == pytest.approx(25.298, abs=1e-3)
    (said,) = sentences(results, "interval")
    assert "every 25.3 s" in said
    assert "failure every 1 h 7 min" in said
    results["settings"]["mtbf_s"] = 400_000.0
    assert "every 4 min 13 s" in sentences(results, "interval")[0]


def test_nobody_is_told_to_save_all_the_time(results: Results) -> None:
    row(results, "cost/resnet50/holdfast/holdfast")["lost_s"] = {"median": 0.0001, "low": 0.0, "high": 0.01}
    (said,) = sentences(results, "interval")
    assert "every 10 s" in said
    assert "2.08 s: too often" in said


# --- restarts ---------------------------------------------------------------------------------------------


def test_parts_that_were_missed_are_to_be_saved(results: Results) -> None:
    (said,) = sentences(results, "determinism", "pytorch:")
    assert "save model, loader, torch RNG and numpy RNG (missed at once); optimizer (missed from step 1)" in said
    assert "not enough: saved at mid-epoch and epoch's end" in said
    assert "With worker processes, with everything restored the run is identical" in said
    assert "but differs when saved at mid-epoch" in said
    for each in results["determinism"]:
        if each["framework"] == "pytorch" and each["left_out"] == "loader":
            each |= {"verdict": "identical", "first_step": None, "where": []}
    (said,) = sentences(results, "determinism", "pytorch:")
    assert "save model, torch RNG and numpy RNG" in said
    assert "Not missed here: loader" in said


def test_a_part_that_shows_only_in_itself_is_told_so(results: Results) -> None:
    for each in results["determinism"]:
        if each["framework"] == "pytorch" and each["left_out"] == "average" and each["verdict"] == "differs":
            each |= {"first_step": None, "where": ["average"]}
    assert "average (only average differs)" in sentences(results, "determinism", "pytorch:")[0]


def test_not_testable_never_becomes_identical(results: Results) -> None:
    (said,) = sentences(results, "determinism", "tensorflow:")
    assert "not testable: two undisturbed runs differ" in said
    assert "identical" not in said
    assert "save" not in said


def test_what_failed_is_not_called_identical(results: Results) -> None:
    for each in results["determinism"]:
        if each["framework"] == "jax" and each["case"] == "everything":
            each |= {"verdict": "failed", "error": "gone", "says": "gone"}
    (said,) = sentences(results, "determinism", "jax:")
    assert "failed when saved at step 0, mid-epoch and epoch's end (gone)" in said
    assert "identical" not in said


# --- the rest ---------------------------------------------------------------------------------------------


def test_compression_is_weighed_by_its_pairs(results: Results) -> None:
    (said,) = sentences(results, "formats", "Compression")
    assert "npz (chainer) of vgg16 saves 7.5% of the bytes and takes 26 times as long" in said
    row(results, "formats/vgg16/chainer/npz")["save_s"] = spread(0.5)
    assert "(0.5 s against 1.56 s): leave it on" in sentences(results, "formats")[0]
    results["formats"] = [row for row in results["formats"] if not row["format"].endswith(" raw")]
    assert sentences(results, "formats") == []


def test_who_writes_with_many_ranks(results: Results) -> None:
    (said,) = sentences(results, "scale")
    assert said.startswith("With 4 ranks that hold the same 204 MB, holdfast's “holdfast” is done first: 0.336 s")
    assert "613 MB written beyond one copy" in said
    row(results, "scale/pytorch/DCP/4")["slowest_s"] = spread(0.01)
    assert "pytorch's “DCP” is done first: 10 ms" in sentences(results, "scale")[0]


def test_silent_damage_asks_for_a_checksum(results: Results) -> None:
    (said,) = sentences(results, "crash_safety", "checksum")
    assert "safetensors (pytorch) 5 of 12 bit flips" in said
    for each in results["crash_safety"]:
        if "silent" in each:
            each["silent"] = 0
    assert sentences(results, "crash_safety", "checksum") == []


def test_short_stalls_that_cost_are_named(results: Results) -> None:
    (said,) = sentences(results, "cost", "stall")
    assert "DCP async (pytorch) returns after 40.2 ms and costs 0.382 s (waiting for it: 0.387 s)" in said
    for each in results["cost"]:
        if each["background"]:
            each["lost_s"] = each["stall_s"]
    assert sentences(results, "cost", "stall") == []


def test_what_is_not_durable_asks_for_fsync(results: Results) -> None:
    (said,) = sentences(results, "cost", "fsync")
    assert said.startswith("safetensors (pytorch), torch.save (pytorch)")
    assert "orbax" not in said  # it never promised: it is in the background
    for each in results["cost"]:
        if "error" not in each:
            each["durable_on_return"] = True
    assert sentences(results, "cost", "fsync") == []


def test_results_are_not_changed(results: Results) -> None:
    before = copy.deepcopy(results)
    advise(results)
    assert results == before
