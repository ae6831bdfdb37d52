"""Advice follows the rows: other numbers, other advice; no rows, no sentence."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest

from holdfast.plan.save_interval import young_daly
from holdfast.study.advice import advise
from holdfast.study.advice.interval_advice import Rhythm
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
        assert "not testable" in each["sentence"] or re.search(r"\d", each["sentence"]), each["sentence"]


def test_there_are_not_more_words_than_people_read(results: Results) -> None:
    found = [each["sentence"] for each in advise(results)]
    assert 10 <= len(found) <= 15
    for sentence in (sentence for text in found for sentence in text.split(". ")):
        assert len(sentence.split()) <= 52, sentence


def test_the_most_important_comes_first(results: Results) -> None:
    axes = [each["axis"] for each in advise(results)]
    assert [*dict.fromkeys(axes)] == ["cost", "interval", "determinism", "crash_safety", "scale", "formats"]
    after = axes.index("crash_safety") + 1
    assert "fsync" in advise(results)[after]["sentence"]


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
    row(results, "crash/pytorch/torch.save/kill")["verdict"] = "safe"
    assert sentences(results, "cost")[0].startswith("Save resnet50 as torch.save (pytorch): ")


def test_without_kills_nothing_is_called_safe(results: Results) -> None:
    results["crash_safety"] = [row for row in results["crash_safety"] if row["what"] != "kill"]
    said = " ".join(each["sentence"] for each in advise(results))
    assert "surviv" not in said
    assert "harmed" not in said
    assert said.count("No format was tested for kills.") == 1


def test_where_no_format_survives_that_is_said(results: Results) -> None:
    for each in results["crash_safety"]:
        if each["what"] == "kill" and each.get("verdict") == "safe":
            each["verdict"] = "unsafe"
    said = sentences(results, "cost")[0]
    assert said.startswith("No format that was killed survived all kills: save under a new name, sync, then remove")
    assert "holdfast async costs 75.4 ms" in said  # nobody killed it, and so nobody says that it lost
    assert said.endswith("Not tested for kills: holdfast async and DCP async (pytorch).")


def test_what_was_not_killed_is_neither_a_survivor_nor_a_loser(results: Results) -> None:
    assert "the least of the 5 formats that no kill harmed" in sentences(results, "cost")[0]
    assert sentences(results, "cost")[0].endswith("Not tested for kills: holdfast async and DCP async (pytorch).")
    assert "DCP async" not in sentences(results, "crash_safety", "Killed")[0]
    for each in results["crash_safety"]:
        if each["what"] == "kill" and each["framework"] == "jax":
            each |= {"verdict": "failed", "error": "gone"}
    (bound,) = sentences(results, "cost", "bound to a framework")
    assert bound.endswith("Not tested for kills: orbax raw (jax).")


def test_all_that_cannot_be_told_apart_are_named(results: Results) -> None:
    said = sentences(results, "cost")[0]
    assert "in 3 rounds; next is safetensors (pytorch) with 0.15 s" in said
    for form in ("safetensors", "torch.save, renamed"):
        row(results, f"cost/resnet50/pytorch/{form}")["lost_s"] = {"median": 0.15, "low": 0.08, "high": 0.2}
    said = sentences(results, "cost")[0]
    names = "holdfast, “torch.save, renamed” (pytorch) and safetensors (pytorch)"
    assert f"By their cost {names} cannot be told apart in 3 rounds" in said
    assert "holdfast has the lowest median" in said
    assert "least" not in said


def test_a_kill_of_another_model_is_told_so(results: Results) -> None:
    said = sentences(results, "cost")[0]
    assert "no kill of 20 harmed it (SIGKILL while saving gpt, a smaller model)" in said
    assert "safe" not in said.replace("safetensors", "")
    for each in results["crash_safety"]:
        each["model"] = "vgg16"
    assert "vgg16, another model" in sentences(results, "cost")[0]
    for each in results["crash_safety"]:
        del each["model"]
    assert "no kill of 20 harmed it (SIGKILL while saving)." in sentences(results, "cost")[0]


def test_an_advised_format_that_loads_flipped_bits_is_told_so(results: Results) -> None:
    assert "flipped" not in sentences(results, "cost")[0]
    row(results, "crash/holdfast/holdfast/bit flip")["silent"] = 5
    assert "Without a word holdfast loaded 5 of 12 flipped bits: keep a checksum." in sentences(results, "cost")[0]
    said = "safetensors (pytorch) and npz raw (chainer) loaded 10 of 24 flipped bits: keep a checksum."
    assert said in sentences(results, "cost", "bound to a framework")[0]


def test_each_framework_has_its_own_best(results: Results) -> None:
    (said,) = sentences(results, "cost", "bound to a framework")
    assert "safetensors (pytorch) 0.15 s, npz raw (chainer) 0.293 s, orbax raw (jax) 0.305 s" in said
    assert "holdfast" not in said
    how = "save npz raw (chainer) and tf.train.Checkpoint (tensorflow) under a new name, sync, then remove the old one"
    assert f"For chainer and tensorflow no format was found that survives all kills: {how}." in said


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


@pytest.mark.parametrize("between", [2.0, 0.3])
def test_failures_without_end_are_told_in_words(results: Results, between: float) -> None:
    results["settings"]["mtbf_s"] = between
    (said,) = sentences(results, "interval")
    assert "hardly anything trains" in said
    assert "%" not in said


def test_no_other_interval_is_longer_than_failures_allow(results: Results) -> None:
    results["settings"]["mtbf_s"] = 1000.0
    assert "every 10 min, 70%." in sentences(results, "interval")[0]  # and nothing of an hour


def test_times_too_short_to_be_measured_break_nothing(results: Results) -> None:
    best = row(results, "cost/resnet50/holdfast/holdfast")
    best["step_s"] = spread(0.0)
    (said,) = sentences(results, "interval")
    assert "every 1 min 4 s (by Young and Daly's formula" in said
    best["lost_s"] = spread(0.0)
    (said,) = sentences(results, "interval")
    assert "no best interval follows: saving holdfast costs nothing that could be measured here" in said


# --- restarts ---------------------------------------------------------------------------------------------


def test_parts_that_were_missed_are_to_be_saved(results: Results) -> None:
    (said,) = sentences(results, "determinism", "pytorch:")
    assert "model, loader, torch RNG and numpy RNG (from the first step after the restart); optimizer (from" in said
    assert "optimizer (from the second step after the restart)" in said
    assert "not enough: saved at mid-epoch and epoch's end" in said
    assert "With worker processes and everything restored the run is identical" in said
    assert "but differs when saved at mid-epoch" in said
    for each in results["determinism"]:
        if each["framework"] == "pytorch" and each["left_out"] == "loader":
            each |= {"verdict": "identical", "first_step": None, "where": []}
    (said,) = sentences(results, "determinism", "pytorch:")
    assert "missed otherwise: model, torch RNG and numpy RNG" in said
    assert "Not missed here: loader" in said


def test_a_part_that_shows_only_in_itself_is_told_so(results: Results) -> None:
    for each in results["determinism"]:
        if each["framework"] == "pytorch" and each["left_out"] == "average" and each["verdict"] == "differs":
            each |= {"first_step": None, "where": ["average"]}
    assert "average (same losses, other average)" in sentences(results, "determinism", "pytorch:")[0]


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
    for each in results["determinism"]:
        each["says"] = f"DataLossError: {{{{function_node x_/job:localhost}}}} Read {'fewer bytes ' * 20}"
    (said,) = sentences(results, "determinism", "jax:")
    assert "(DataLossError: Read fewer bytes" in said
    assert re.search(r" (fewer|bytes) …\)", said)


def test_what_has_no_parts_proves_nothing_about_parts(results: Results) -> None:
    (said,) = sentences(results, "determinism", "holdfast:")
    assert "documentation" not in said
    assert "A Run saves and restores everything by itself, so there is nothing to leave out" in said
    assert "What its documentation saves is enough" in sentences(results, "determinism", "jax:")[0]


# --- the rest ---------------------------------------------------------------------------------------------


def test_compression_is_weighed_by_its_pairs(results: Results) -> None:
    (said,) = sentences(results, "formats", "Compression")
    assert "npz (chainer) saves 83 MB of vgg16 (7.5%) and takes 26 times as long" in said
    assert "worth it only on a disk or network slower than 2.16 MB/s" in said
    npz = row(results, "formats/vgg16/chainer/npz")
    npz["save_s"] = spread(0.5)
    assert "0.32 times as long: leave it on" in sentences(results, "formats")[0]
    npz["save_s"] = spread(1.6)
    said = "npz (chainer) saves 83 MB of vgg16 (7.5%), with no difference in time that could be told here."
    assert said in sentences(results, "formats")[0]
    npz["bytes"] *= 2
    assert (
        "npz (chainer) makes vgg16 no smaller (2.05 GB against 1.11 GB): leave it off"
        in sentences(results, "formats")[0]
    )
    results["formats"] = [row for row in results["formats"] if not row["format"].endswith(" raw")]
    assert sentences(results, "formats") == []


def test_who_writes_with_many_ranks(results: Results) -> None:
    (said,) = sentences(results, "scale")
    assert said.startswith("With 4 ranks that hold the same 204 MB, use “holdfast” with holdfast (0.336 s); use “DCP”")
    assert "let rank 0 alone write with tensorflow (1.48 s) and chainer (2.13 s)" in said
    assert "With “every rank its own file” 613 MB lie on the disk beyond one copy, and saving takes 1.9 to 6.5" in said
    assert "Ranks of tensorflow, jax and chainer are independent processes here" in said
    assert "one round" not in said
    row(results, "scale/pytorch/DCP/4")["slowest_s"] = spread(0.8)
    assert "with pytorch (0.8 s, not to be told from “rank 0 only”)" in sentences(results, "scale")[0]
    for each in results["scale"]:
        if "slowest_s" in each:
            each["slowest_s"] = spread(each["slowest_s"]["median"], by=0.0)
    assert "from one round" in sentences(results, "scale")[0]


def test_a_folder_is_not_to_be_renamed_over_another(results: Results) -> None:
    (said,) = sentences(results, "crash_safety", "Killed")
    assert "Save under a new name, sync, then remove the old one (a single file can be renamed over it)." in said
    assert (
        "no kill of 20 harmed torch.save; a save cost 0.22 s against 0.211 s, no difference that could be told" in said
    )
    assert "Orbax" not in said
    row(results, "crash/jax/orbax/kill")["verdict"] = "unsafe"
    assert "Orbax was tried with force=True, that is, overwriting." in sentences(results, "crash_safety", "Killed")[0]


def test_silent_damage_asks_for_a_checksum(results: Results) -> None:
    (said,) = sentences(results, "crash_safety", "checksum")
    assert "safetensors (pytorch) 5 of 12 bit flips" in said
    for each in results["crash_safety"]:
        if "silent" in each:
            each["silent"] = 0
    assert sentences(results, "crash_safety", "checksum") == []


def test_short_stalls_that_cost_are_named(results: Results) -> None:
    (said,) = sentences(results, "cost", "returns soon")
    assert "DCP async (pytorch) returns after 40.2 ms and costs 0.382 s (not in the background: 0.387 s)" in said
    for each in results["cost"]:
        if each["background"]:
            each["lost_s"] = each["stall_s"]
    assert sentences(results, "cost", "returns soon") == []


def test_what_is_not_durable_asks_for_fsync(results: Results) -> None:
    (said,) = sentences(results, "cost", "fsync")
    assert "after saving as safetensors (pytorch), torch.save (pytorch)" in said
    assert "orbax" not in said  # it never promised: it is in the background
    for each in results["cost"]:
        if "error" not in each:
            each["durable_on_return"] = True
    assert sentences(results, "cost", "fsync") == []


def test_results_are_not_changed(results: Results) -> None:
    before = copy.deepcopy(results)
    advise(results)
    assert results == before
