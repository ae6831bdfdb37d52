"""The simulator gives what was published, and its document has the simulator's numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.simulate.course import follow
from holdfast.simulate.measured_tables import Tables
from holdfast.simulate.outcome import SYSTEMS, Setting, SystemOutcome, judge
from holdfast.simulate.systems.rearranging import oobleck
from holdfast.simulate.trace import Trace
from holdfast.simulate.validation import TRACES as NAMES
from holdfast.simulate.validation import PublishedAverage, bamboo_variants, compare, read_all, table, variants_table
from tests.simulate.given import TABLES, TRACES, needs_tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "simulation.md"
pytestmark = needs_tables


@cache
def everything() -> tuple[Tables, dict[str, Trace]]:
    return read_all(TABLES, TRACES)


@cache
def cells() -> list[PublishedAverage]:
    return list(compare(*everything()))


@pytest.mark.parametrize(("system", "count"), [("oobleck", 15), ("bamboo", 6)])
def test_table_2_within_three_per_cent(system: str, count: int) -> None:
    ours = [cell for cell in cells() if cell.system == system]
    assert len(ours) == count
    assert {cell for cell in ours if abs(cell.difference) > 0.03} == set()


def test_varuna_differs_where_the_document_says() -> None:
    far = {(cell.model, cell.trace) for cell in cells() if cell.system == "varuna" and abs(cell.difference) > 0.03}
    assert far == {("BERT-large", "10m"), ("GPT-3-2.7b", "1h"), ("GPT-3-2.7b", "10m"), ("GPT-3-6.7b", "10m")}


def test_the_document_has_these_numbers() -> None:
    text = DOCUMENT.read_text()
    assert table(*everything()) in text
    assert variants_table(*everything()) in text


def test_control_a_step_that_is_not_lost() -> None:
    """Would the bar notice? Without the loss of the running step the largest model is far off."""
    tables, traces = everything()
    facts, trace = tables.facts("GPT-3-6.7b"), traces["10m"]
    kept = replace(oobleck(facts), boundary_samples=0.0)
    average = SystemOutcome(system="oobleck", segments=follow(trace, kept)).samples_per_s
    assert average / tables.published["oobleck"]["GPT-3-6.7b"]["10m"] > 1.03
    free = replace(kept, on_loss=0.0)
    assert SystemOutcome(system="oobleck", segments=follow(trace, free)).samples_per_s > average


def test_control_reconfiguring_five_times_as_long() -> None:
    tables, traces = everything()
    facts = tables.facts("GPT-3-6.7b")
    slow = replace(facts, reconfigure=5 * facts.reconfigure)
    average = judge("oobleck", Setting(trace=traces["10m"], facts=slow)).samples_per_s
    assert average / tables.published["oobleck"]["GPT-3-6.7b"]["10m"] < 0.97


def test_control_bamboo_without_its_peculiarities() -> None:
    far = {}
    for title, cell in bamboo_variants(*everything()):
        far.setdefault(title, []).append(abs(cell.difference) > 0.03)
    assert not any(far["as published"])
    assert all(far["a waiting node's loss slows nobody"])
    assert sum(far["pipelines of 6"]) == 4
    assert all(far["both"])


@pytest.mark.parametrize("system", SYSTEMS)
def test_more_frequent_losses_never_help(system: str) -> None:
    tables, traces = everything()
    for facts in tables.models.values():
        outcomes = [judge(system, Setting(trace=traces[name], facts=facts, recovery=0.036)) for name in NAMES]
        if outcomes[0].runs:
            averages = [outcome.samples_per_s for outcome in outcomes]
            assert all(more >= less - 1e-9 for more, less in pairwise(averages)), facts.model


def test_nobody_beats_the_ideal() -> None:
    tables, traces = everything()
    for facts in tables.models.values():
        for name in NAMES:
            setting = Setting(trace=traces[name], facts=facts)
            best = judge("ideal", setting).samples_per_s
            for system in SYSTEMS:
                outcome = judge(system, setting)
                assert not outcome.runs or outcome.samples_per_s <= best * (1 + 1e-9)
