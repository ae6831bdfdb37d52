"""Patterns out of a checkpoint match as Python's own do, but never take long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.formats.deepspeed_tp import pattern_of
from holdfast.checkpoint.formats.linear_regex import compiled
from holdfast.errors import CheckpointError

ATOMS = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[0-9_]", "x1", "^", "$"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?", "{0}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(pattern=PATTERNS, text=st.text(alphabet="abx.1_", max_size=8))
def test_they_match_what_pythons_own_match(pattern: str, text: str) -> None:
    assert compiled(pattern).match(text) is bool(re.match(pattern, text))


@pytest.mark.parametrize("pattern", [r".*\.weight$", r"layers\.\d+\.mlp.*", r"^(?:model|lm)\.[a-z_]+\.bias", "a.b"])
@pytest.mark.parametrize("name", ["model.layers.0.weight", "layers.12.mlp.fc1.weight", "lm.out_proj.bias", "a.b", ""])
def test_patterns_as_deepspeed_has_them(pattern: str, name: str) -> None:
    assert compiled(pattern).match(name) is bool(re.match(pattern, name))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*)*(.*)*(.*)*b", "(a*)*$", "(?:a?){300}b"])
def test_no_pattern_takes_long(pattern: str) -> None:
    """Python's engine would take longer than the age of the universe; the second text is ten times as long."""

    def taken(length: int) -> float:
        start = time.process_time()
        assert not compiled(pattern).match("a" * length + "!")
        return time.process_time() - start

    taken(10)
    assert taken(10_000) < 100 * taken(1000) + 1


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)b", "(?<!a)b", "(?i)a", "a{10000}", "(", "(" * 5000, "(?>a)"])
def test_what_cannot_be_followed_at_once_is_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="too involved"):
        compiled(pattern)


def test_a_hostile_list_of_deepspeeds_is_no_trap() -> None:
    info = {"parameter_with_row_parallelism_patterns": ["(a+)+b"], "vocabulary_parameter_patterns": ["(a|a)*b"]}
    assert pattern_of("a" * 900, info).dim == 0
