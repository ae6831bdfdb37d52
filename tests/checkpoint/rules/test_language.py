"""Rules in YAML say the same as in Python, and what makes no sense is refused."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from holdfast.checkpoint.rules import (
    Flat,
    Partial,
    Replicate,
    Rule,
    Rules,
    Shard,
    Unique,
)
from holdfast.errors import UsageError

# --- YAML -----------------------------------------------------------------------------------------

TEXT = r"""
- match: 'model/.*\.(q|k|v)_proj\.weight'
  shard: {dim: 0}
- match: 'model/.*\.qkv\.weight'
  shard: {dim: 0, parts: [4096, 1024, 1024], groups: 8}
- match: 'model/embed.weight'
  shard: {dim: 0, size: 50257}
  copies: [pp]
- match: '.*norm.*'
  replicate: {}
- match: 'old\.(.*)'
  rename: 'new.\1'
  unique: {}
- match: 'two'
  shard: [{dim: 0}, {dim: -1, axis: ep}]
- match: 'zero'
  shard: {dim: 1, parts: 2}
  flat: {axis: dp, shape: [3, 4]}
- match: 'ema'
  partial: {}
- match: 'a'
  rename: b
"""


def test_yaml_says_the_same_as_python(tmp_path: Path) -> None:
    expected = (
        Rule(match=r"model/.*\.(q|k|v)_proj\.weight", pattern=Shard(dim=0)),
        Rule(match=r"model/.*\.qkv\.weight", pattern=Shard(dim=0, parts=(4096, 1024, 1024), groups=8)),
        Rule(match="model/embed.weight", pattern=Shard(dim=0, size=50257), copies=("pp",)),
        Rule(match=".*norm.*", pattern=Replicate()),
        Rule(match=r"old\.(.*)", rename=r"new.\1", pattern=Unique()),
        Rule(match="two", pattern=(Shard(dim=0), Shard(dim=-1, axis="ep"))),
        Rule(match="zero", pattern=(Shard(dim=1, parts=2), Flat(axis="dp", shape=(3, 4)))),
        Rule(match="ema", pattern=Partial()),
        Rule(match="a", rename="b"),
    )
    assert Rules.from_yaml(TEXT).rules == expected
    path = tmp_path / "rules.yaml"
    path.write_text(TEXT)
    assert Rules.from_yaml(path).rules == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rules are a list"),
        ("match: w", "rules are a list"),
        ("- shard: {dim: 0}", "rule 1 has no match"),
        ("- {match: w, replicate: {}}\n- {match: v, shards: {dim: 0}}", "rule 2, for v, has the unknown key shards"),
        ("- {match: w, shard: {dim: 0, axes: tp}}", "rule 1, for w, in shard has the unknown key axes"),
        ("- {match: w, shard: {axis: tp}}", "without a dim"),
        ("- {match: w, shard: {dim: '0'}}", "has the dim '0' in shard"),
        ("- {match: w, shard: {dim: true}}", "has the dim True in shard"),
        ("- {match: w, shard: 0}", "has the shard 0"),
        ("- {match: w, shard: {dim: 0, parts: [2, x]}}", r"has the parts \[2, 'x'\]"),
        ("- {match: w, shard: {dim: 0, size: 4, parts: 2}}", "for w, cannot be: a shard has either a size or parts"),
        ("- {match: w, shard: {dim: 0, groups: 2}}", "groups of a shard need parts"),
        ("- {match: w, shard: {dim: 0, parts: [4, 3], groups: 2}}", "a part of 3 cannot be cut into 2"),
        ("- {match: w, shard: {dim: 0, size: -1}}", "count something"),
        ("- {match: w, unique: {}, replicate: {}}", "is unique and replicate at once"),
        ("- {match: w}", "says nothing"),
        ("- {match: w, shard: {dim: 0}, shard: {dim: 1}}", "shard stands twice"),
        ("- {match: '(', replicate: {}}", "no regular expression"),
        ("- {match: w, rename: '\\1'}", "rename does not fit"),
        ("- {match: w, rename: 3}", "rename 3, which is not a name"),
        ("- {match: w, shard: {dim: 0}, copies: dp}", "has the copies 'dp'"),
        ("- {match: w, shard: {dim: 0}, copies: [tp]}", "names an axis twice: tp, tp"),
        ("- {match: w, replicate: {}, copies: [tp]}", "needs no copies"),
        ("- {match: w, shard: [{dim: 0}, {dim: 1}]}", "names an axis twice"),
        ("- {match: w", "cannot be read"),
        ("- !!python/object/apply:os.system ['true']", "cannot be read"),
    ],
)
def test_yaml_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rules.from_yaml(text)


def test_a_missing_file_of_rules_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml"):
        Rules.from_yaml(tmp_path / "none.yaml")


DOCS = Path(__file__).parents[3] / "docs" / "checkpoint-rules.md"


def test_the_examples_in_the_docs_run() -> None:
    text = re.sub(r"^```.*$", "", DOCS.read_text(), flags=re.MULTILINE)  # the end of a fence is no output
    examples = doctest.DocTestParser().get_doctest(text, {}, DOCS.name, str(DOCS), 0)
    found = doctest.DocTestRunner().run(examples)
    assert found.attempted > 10
    assert not found.failed


def test_the_rules_in_the_docs_are_rules() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 3
    assert all(Rules.from_yaml(block).rules for block in blocks)
