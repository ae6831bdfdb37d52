"""Which rule a tensor goes by, and what does not fit its rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.checkpoint.rules import (
    Flat,
    Fragment,
    Laid,
    Partial,
    Replicate,
    Rule,
    Rules,
    Shard,
    Unique,
    copies,
    lay_out,
)
from holdfast.errors import CheckpointError, UsageError


def fragment(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **place: int) -> Fragment:
    return Fragment(name=name, shape=shape, dtype=dtype, place=place, holder=sum(place.values()))


def halves(name: str, shape: tuple[int, ...]) -> list[Fragment]:
    return [fragment(name, shape, tp=i) for i in range(2)]


def laid_out(fragments: list[Fragment], *rules: Rule) -> dict[str, Laid]:
    return lay_out(fragments, Rules(rules))


COLUMN = Rule(match=r"model/.*\.weight", pattern=Shard(dim=0))


def test_slots_go_by_their_parameters_rule() -> None:
    slots = [*halves("optimizer/state/a.weight/exp_avg", (2, 3)), *halves("optimizer/state/a.weight/deep/er", (2, 3))]
    laid = laid_out([*halves("model/a.weight", (2, 3)), *slots], COLUMN)
    assert {name: one.shape for name, one in laid.items()} == dict.fromkeys(
        ["model/a.weight", "optimizer/state/a.weight/exp_avg", "optimizer/state/a.weight/deep/er"], (4, 3)
    )


def test_a_slot_of_one_number_cannot_have_been_cut() -> None:
    steps = halves("optimizer/state/a.weight/step", ())
    laid = laid_out([*halves("model/a.weight", (2, 3)), *steps], COLUMN)["optimizer/state/a.weight/step"]
    assert laid.shape == ()
    assert len(copies(laid)) == 1


def test_a_slot_of_another_shape_needs_its_own_rule() -> None:
    factors = halves("optimizer/state/a.weight/row", (2,))
    fragments = [*halves("model/a.weight", (2, 3)), *factors]
    with pytest.raises(CheckpointError, match=r"optimizer/state/a.weight/row: .*\(2,\).*model/a.weight.*\(2, 3\)"):
        laid_out(fragments, COLUMN)
    own = Rule(match=".*/row", pattern=Shard(dim=0))
    assert laid_out(fragments, COLUMN, own)["optimizer/state/a.weight/row"].shape == (4,)


def test_a_slot_without_its_parameter_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight/exp_avg: .*is not there"):
        laid_out(halves("optimizer/state/a.weight/exp_avg", (2, 3)), COLUMN)


def test_renames_reach_the_slots() -> None:
    fragments = [*halves("model/old.w", (2,)), *halves("optimizer/state/old.w/exp_avg", (2,))]
    rule = Rule(match=r"model/old\.(.*)", rename=r"model/new.\1", pattern=Shard(dim=0))
    assert list(laid_out(fragments, rule)) == ["model/new.w", "optimizer/state/new.w/exp_avg"]


def test_a_rule_that_only_renames_comes_first() -> None:
    fragments = [*halves("model/old.w", (2,)), *halves("optimizer/state/old.w/exp_avg", (2,))]
    first = Rule(match=r"model/old\.(.*)", rename=r"model/new.\1")
    laid = laid_out(fragments, first, Rule(match=r"model/new\..*", pattern=Shard(dim=0)))
    assert list(laid) == ["model/new.w", "optimizer/state/new.w/exp_avg"]


def test_one_tensor_under_two_names_is_one() -> None:
    fragments = [fragment("model/embed", (4,), pp=0), fragment("model/head", (4,), pp=1)]
    laid = laid_out(fragments, Rule(match="model/(embed|head)", rename="model/embed", pattern=Replicate()))
    assert len(copies(laid["model/embed"])) == 1
    with pytest.raises(CheckpointError, match=r"model/embed, model/head"):
        laid_out(
            fragments,
            Rule(match="model/embed", pattern=Replicate()),
            Rule(match="model/head", rename="model/embed", pattern=Unique()),
        )


def test_names_alone_for_a_layout_that_is_known() -> None:
    rules = Rules([Rule(match=r"model/old\.(.*)", rename=r"model/\1")])
    names = ["model/old.w", "optimizer/state/old.w/exp_avg", "model/b"]
    assert list(rules.renames(names).values()) == ["model/w", "optimizer/state/w/exp_avg", "model/b"]
    with pytest.raises(UsageError, match=r"model/old\.w.*model/w"):
        rules.renames(["model/old.w", "model/w"])
    with pytest.raises(UsageError, match="known without rules"):
        Rules([COLUMN]).renames(names)


def test_rules_over_others() -> None:
    base = Rules([Rule(match=".*", pattern=Replicate()), Rule(match="nothing", pattern=Unique())])
    laid = lay_out([*halves("model/a.weight", (2,)), *halves("model/b", (2,))], Rules([COLUMN]).over(base))
    assert {name: one.shape for name, one in laid.items()} == {"model/a.weight": (4,), "model/b": (2,)}


def test_the_mean_is_asked_for_and_marked() -> None:
    places = [{"dp": i, "tp": j} for i in range(2) for j in range(2)]
    fragments = [fragment("w", (3,), **place) for place in places]
    laid = lay_out(fragments, Rules([Rule(match="w", pattern=Partial(), copies=("tp",))]))["w"]
    assert laid.mean
    assert [part.fragment for part in laid.parts] == [0, 2]  # one of the copies along tp
    assert copies(laid) == []


# --- refusals -------------------------------------------------------------------------------------

SHARD = Rule(match="w", pattern=Shard(dim=0))
WRONG: dict[str, tuple[list[Fragment], Rule, str]] = {
    "dtypes": (
        [fragment("w", (2,), tp=0), fragment("w", (2,), torch.float16, tp=1)],
        SHARD,
        r"w: it is torch.float32 at tp 0, but torch.float16 at tp 1",
    ),
    "missing": ([fragment("w", (2,), tp=0), fragment("w", (2,), tp=2)], SHARD, r"w: there is no fragment at tp 1 of 3"),
    "doubled": (
        [fragment("w", (2,), tp=0), *halves("w", (2,))],
        SHARD,
        r"w: there are two fragments at tp 0, of holders 0 and 0",
    ),
    "other dims": (
        [fragment("w", (2, 3), tp=0), fragment("w", (2, 4), tp=1)],
        SHARD,
        r"w: its shards differ in more than dim 0: tp 0 has the shape \(2, 3\), tp 1 \(2, 4\)",
    ),
    "fewer dims": ([fragment("w", (2, 3), tp=0), fragment("w", (2,), tp=1)], SHARD, "w: its shards differ"),
    "no such dim": (halves("w", (2,)), Rule(match="w", pattern=Shard(dim=1)), r"w: it has no dim 1"),
    "scalar": (halves("w", ()), SHARD, r"w: it has no dim 0"),
    "no axis": ([fragment("w", (2,), pp=0)], SHARD, r"w: it is cut along tp, but its fragments have no place there"),
    "different axes": (
        [fragment("w", (2,), tp=0), fragment("w", (2,), tp=0, dp=1)],
        SHARD,
        r"w: its places have different axes: tp 0; tp 0, dp 1",
    ),
    "undeclared copies": (
        [fragment("w", (2,), tp=0, dp=0), fragment("w", (2,), tp=0, dp=1)],
        SHARD,
        r"w: it lies at dp 0, 1, about which the rule for w says nothing; copies: \[dp\]",
    ),
    "not unique": (halves("w", (2,)), Rule(match="w", pattern=Unique()), r"w: it lies at tp 0, 1"),
    "unequal copies": (
        [fragment("w", (2,), tp=0), fragment("w", (3,), tp=1)],
        Rule(match="w", pattern=Replicate()),
        r"w: its copies have different shapes: \(2,\) and \(3,\)",
    ),
    "unequal means": (
        [fragment("w", (2,), tp=0), fragment("w", (3,), tp=1)],
        Rule(match="w", pattern=Partial()),
        r"w: its copies have different shapes",
    ),
    "copies cut differently": (
        [fragment("w", (n,), tp=i, dp=j) for j, sizes in enumerate([(1, 3), (2, 2)]) for i, n in enumerate(sizes)],
        replace(SHARD, copies=("dp",)),
        r"w: its copies are cut differently",
    ),
    "an incomplete copy": (
        [fragment("w", (2,), tp=0, dp=0), fragment("w", (2,), tp=1, dp=0), fragment("w", (2,), tp=0, dp=1)],
        replace(SHARD, copies=("dp",)),
        r"w: there is no fragment at tp 1 of 2",
    ),
    "too short for its size": (
        halves("w", (2,)),
        Rule(match="w", pattern=Shard(dim=0, size=5)),
        r"w: its shards have 2 \+ 2 = 4 along dim 0, fewer than the 5",
    ),
    "parts that do not add up": (
        halves("w", (4,)),
        Rule(match="w", pattern=Shard(dim=0, parts=(4, 2, 1))),
        r"w: tp 0 has 4 along dim 0, but its share of parts \[4, 2, 1\] is 4|w: tp 1 has 4 along dim 0.* is 3",
    ),
    "no equal parts": (
        halves("w", (3,)),
        Rule(match="w", pattern=Shard(dim=0, parts=4)),
        r"w: its shards have 3 \+ 3 = 6 along dim 0, which is not 4 parts",
    ),
    "groups shared by holders": (
        [fragment("w", (3,), tp=i) for i in range(4)],
        Rule(match="w", pattern=Shard(dim=0, parts=(8, 2, 2), groups=2)),
        r"w: tp 0 has 3 along dim 0, but its share of parts \[8, 2, 2\] in 2 groups is 6",
    ),
    "flat, too short": (
        halves("w", (2,)),
        Rule(match="w", pattern=Flat(axis="tp", shape=(5, 1))),
        r"w: its flat shards have 2 \+ 2 = 4 elements, fewer than the 5 of shape \(5, 1\)",
    ),
    "flat, but not": (
        halves("w", (2, 2)),
        Rule(match="w", pattern=Flat(axis="tp", shape=(8,))),
        r"w: it should be flat, but tp 0 has the shape \(2, 2\)",
    ),
    "flat, of no known shape": (
        halves("w", (2,)),
        Rule(match="w", pattern=Flat(axis="tp")),
        r"w: nothing says, .* before it was flattened",
    ),
    "a negative place": ([fragment("w", (2,), tp=-1)], SHARD, r"w lies at tp -1, but tp begins at 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_with_its_name_and_numbers(what: str) -> None:
    fragments, rule, message = WRONG[what]
    with pytest.raises(CheckpointError, match=message):
        laid_out(fragments, rule)


def test_a_missing_last_holder_shows_when_the_axis_is_known() -> None:
    assert lay_out(halves("w", (2,)), Rules([SHARD]))["w"].shape == (4,)
    with pytest.raises(CheckpointError, match=r"w: .*tp 2, 3"):
        lay_out(halves("w", (2,)), Rules([SHARD]), axes={"tp": 4})
    with pytest.raises(CheckpointError, match=r"w .*tp 1"):
        lay_out(halves("w", (2,)), Rules([SHARD]), axes={"tp": 1})


def test_every_tensor_matches_one_rule_and_every_rule_something() -> None:
    with pytest.raises(UsageError, match=r"\bv\b"):
        laid_out([*halves("w", (2,)), *halves("v", (2,))], SHARD)
    with pytest.raises(UsageError, match=r"w .*2 rules"):
        laid_out(halves("w", (2,)), SHARD, Rule(match=".*", pattern=Unique()))
    with pytest.raises(UsageError, match=r"\bww\b"):
        laid_out(halves("w", (2,)), SHARD, Rule(match="ww", pattern=Unique()))
    with pytest.raises(UsageError, match=r"\bw\b.*\bv\b"):
        laid_out(halves("w", (2,)), SHARD, Rule(match="w", rename="v"))
