"""Profiles as people and programs write them, and models that cannot be planned: a sentence, never a traceback."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.plan.profile import MOST_LAYERS, Profile, state_bytes, uniform
from holdfast.plan.template import make_templates
from tests.plan import judge

GOOD = json.loads(json.dumps(uniform(3).to_json()))


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    """A copy of a good profile with one value replaced."""
    document: dict[str, Any] = json.loads(json.dumps(GOOD))
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document


@pytest.mark.parametrize("family", sorted(judge.FAMILIES))
def test_a_profile_survives_json(family: str) -> None:
    profile = judge.FAMILIES[family](random.Random(0), 7)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "profile"),
        ({}, "profile"),
        (changed(["holdfast_profile"], 2), "version 2"),
        (changed(["layers"], []), "0 layers"),
        (changed(["layers"], [GOOD["layers"][0]] * (MOST_LAYERS + 1)), f"{MOST_LAYERS + 1} layers"),
        (changed(["layers", 1, "forward"], -1.0), "layer 1 .*forward.*-1"),
        (changed(["layers", 1, "forward"], float("nan")), "forward.*nan"),
        (changed(["layers", 2, "backward"], float("inf")), "backward.*inf"),
        (changed(["layers", 0, "forward"], "fast"), "profile"),
        (changed(["layers", 0, "weights"], 1), "profile"),
        (changed(["layers", 0], None), "profile"),
        (changed(["between", "bandwidth"], 0), "0 bytes/s"),
        (changed(["between"], 12.5e9), "profile"),
        (changed(["micro_batch"], 0), "micro-batch"),
        (changed(["memory"], "24 GB"), "profile"),
        (changed(["memory"], 0), "memory"),
        (changed(["memory"], -1), "memory"),
        ({key: value for key, value in GOOD.items() if key != "inside"}, "inside"),
    ],
)
def test_bad_profiles_get_a_sentence(document: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_templates(Profile.from_json(document), nodes=2, tolerate=0)


PATHS: list[list[Any]] = [
    *(["layers", 1, name] for name in GOOD["layers"][0]),
    *([name] for name in GOOD),
    *([link, name] for link in ("inside", "between") for name in ("bandwidth", "latency")),
    ["layers", 1],
]
JUNK: list[Any] = [None, True, 0, -1, 10**30, 0.5, float("nan"), float("inf"), "", "24 GB", [], [1], {}, {"forward": 1}]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_anything_else_is_read_or_refused_in_words(path: list[Any]) -> None:
    """What from_json accepts can be planned, or is refused for a reason; nothing else is ever raised."""
    for value in JUNK:
        with contextlib.suppress(UsageError):
            make_templates(Profile.from_json(changed(path, value)), nodes=2, tolerate=0)


@pytest.mark.parametrize("layers", [0, -1, MOST_LAYERS + 1])
def test_more_layers_than_sense(layers: int) -> None:
    with pytest.raises(UsageError, match=str(layers)):
        uniform(layers)


@pytest.mark.parametrize(
    ("memory", "arguments", "words"),
    [
        (0, {"nodes": 4, "tolerate": 1}, "0 bytes of memory"),
        (1 << 20, {"nodes": 4, "tolerate": 1}, "layer 0"),
        (None, {"nodes": 4, "tolerate": 4}, "4.*5.*3"),
        (None, {"nodes": 5, "tolerate": 2, "minimum": 2}, "6.*1"),
        (None, {"nodes": 1, "tolerate": 0, "minimum": 2}, "2 nodes"),
        (None, {"nodes": 0, "tolerate": 0}, "0 nodes"),
        (None, {"nodes": 4, "tolerate": -1}, "-1"),
        (None, {"nodes": 4, "tolerate": 0, "devices": 0}, "0 devices"),
        (None, {"nodes": 40, "tolerate": 0, "minimum": 9}, "9.*8"),
        (int(1.2e9), {"nodes": 8, "tolerate": 0, "minimum": 1}, "1 node.*2"),
    ],
)
def test_impossible_wishes_get_a_sentence(memory: int | None, arguments: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_templates(replace(uniform(8), memory=memory), **arguments)


def test_state_is_what_a_new_holder_is_sent() -> None:
    layers = uniform(4, weight_bytes=10).layers
    assert state_bytes(layers, range(1, 3)) == 60
    assert layers[0].resident_bytes == 40, "the gradient is made anew"
