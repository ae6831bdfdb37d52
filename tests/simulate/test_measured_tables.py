"""Tables are checked before anything is simulated with them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.simulate.measured_tables import Speeds, parse_tables, read_tables

SMALL: dict[str, Any] = {
    "samples_per_s_by_nodes": {"oobleck": {"m": {"2": 5, "3": 9.5}}, "bamboo": {"m": None}, "varuna": {"m": {"2": 4}}},
    "samples_per_step": {"m": 64},
    "oobleck": {"reconfigure_s": {"m": 2}},
    "bamboo": {"local_rendezvous_s": {"m": 70}, "global_rendezvous_s": 30},
    "varuna": {"checkpoint_every_steps": 10, "checkpoint_s": {"m": 5}, "restart_s": {"m": 60}},
    "instance_creation_s": 45,
}


def test_what_is_read() -> None:
    facts = parse_tables(SMALL).facts("m")
    assert facts.speeds == {
        "oobleck": Speeds({2: 5.0, 3: 9.5}),
        "recycle": Speeds({2: 5.0, 3: 9.5}),
        "varuna": Speeds({2: 4.0}),
        "bamboo": None,
    }
    assert facts.best() == Speeds({2: 5.0, 3: 9.5}, {2: 2, 3: 3})
    assert facts.best(Speeds({3: 9.6}, {3: 2})).at(3) == (9.6, 2)
    assert facts.state_bytes != facts.state_bytes  # not one of Oobleck's models: nobody said


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"x.*m"):
        parse_tables(SMALL).facts("x")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["samples_per_step", "m"], 0, "samples_per_step of m"),
        (["samples_per_step"], {}, "model"),
        (["samples_per_s_by_nodes", "oobleck", "m", "2"], -1, "oobleck, m is -1"),
        (["samples_per_s_by_nodes", "oobleck", "m", "2"], "fast", "fast"),
        (["samples_per_s_by_nodes", "oobleck", "m"], {}, "oobleck, m"),
        (["samples_per_s_by_nodes", "oobleck", "m"], {"two": 3}, "two"),
        (["samples_per_s_by_nodes", "varuna"], {}, "'m'"),
        (["varuna", "checkpoint_every_steps"], 0, "checkpoint_every_steps"),
        (["varuna", "restart_s", "m"], float("inf"), "restart_s"),
        (["oobleck"], None, "tables.json"),
    ],
)
def test_bad_tables(tmp_path: Path, path: list[str], value: Any, said: str) -> None:
    document = copy.deepcopy(SMALL)
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    file = tmp_path / "tables.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError) as error:
        read_tables(file)
    assert said in str(error.value)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    for text in ("", "[]", "3", '{"samples_per_s_by_nodes": []}'):
        file = tmp_path / "tables.json"
        file.write_text(text)
        with pytest.raises(UsageError, match=r"tables\.json"):
            read_tables(file)
    with pytest.raises(UsageError, match=r"none\.json"):
        read_tables(tmp_path / "none.json")
