"""The script's own state: what it may hold, and what a joiner or a resumed script takes over, and when."""

from __future__ import annotations

import collections
from collections import namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import codec
from holdfast.engine.agreement import digest_of
from holdfast.engine.plain import in_order, plain, taken
from holdfast.engine.script_state import SMALL, ScriptState
from holdfast.errors import HoldfastError, UsageError

Pair = namedtuple("Pair", "a b")


def everything() -> dict[str, Any]:
    net = nn.Linear(2, 1)
    return {
        "best": float("inf"),
        "bad": 3,
        "name": "x",
        "none": None,
        "flag": True,
        "mean": torch.arange(3.0),
        "nested": {"list": [1, (2.5, {"deep": torch.ones(2, dtype=torch.bfloat16)})], 3: "three"},
        "net": net,
        "optimizers": [torch.optim.AdamW(net.parameters(), lr=0.1)],
    }


def train(values: dict[str, Any]) -> None:
    values["net"](torch.ones(1, 2)).sum().backward()
    values["optimizers"][0].step()
    values["optimizers"][0].zero_grad()


def over_the_wire(state: ScriptState) -> Any:
    return codec.unflatten(*codec.flatten(state.told()))


def digest(state: ScriptState) -> str:
    return digest_of(in_order(state.plain()))


def join(state: ScriptState, told: Any, loop: str = "0 to 9") -> None:
    state.enter(loop)
    with state.waiting(regroups=True):
        state.hear(told)
    state.catch_up(trains=True, remembered=None)


def test_a_joiner_takes_over_values_of_every_kind() -> None:
    torch.manual_seed(0)
    mine, theirs = everything(), everything()
    train(theirs)
    theirs |= {"best": 0.5, "bad": -1, "name": "y", "none": {"was": [None]}, "flag": False}
    theirs["mean"].add_(7)
    joiner, member = ScriptState(mine), ScriptState(theirs)
    assert digest(joiner) != digest(member)
    kept, net = mine["mean"], mine["net"]
    join(joiner, over_the_wire(member))
    assert digest(joiner) == digest(member)
    assert mine["mean"] is kept, "the script may refer to it"
    assert mine["net"] is net
    train(mine)
    train(theirs)
    assert digest(joiner) == digest(member), "the optimizer goes on from the same slots"


def test_large_numbers_and_repeated_elements_reach_a_joiner() -> None:
    """Nobody can write into a tensor whose elements are one in memory: the joiner gets another tensor."""
    joiner = ScriptState({"number": 0, "same": torch.zeros(3, 1).expand(3, 4)})
    member = ScriptState({"number": 10**4300 - 1, "same": torch.ones(3, 1).expand(3, 4)})
    join(joiner, over_the_wire(member))
    assert digest(joiner) == digest(member)


def test_containers_are_filled_in_place() -> None:
    history: list[int] = [9]
    state = ScriptState({"history": history, "by name": {"a": 1}})
    join(state, ScriptState({"history": [1, 2], "by name": {"b": 2}}).told())
    assert history == [1, 2]
    assert state["by name"] == {"b": 2}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": {1, 2}}, r"state\['a'\] is of type set"),
        ({"a": [object()]}, r"state\['a'\]\[0\] is of type object"),
        ({"a": {"b": np.zeros(2)}}, r"state\['a'\]\['b'\] is of type ndarray"),
        ({"a": Pair(1, 2)}, r"state\['a'\] is of type Pair"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has a key that is a tuple"),
        ({"a": torch.zeros(2, device="meta")}, r"state\['a'\] is a tensor without plain memory"),
        ({"a": nn.Linear}, r"state\['a'\] is of type type"),
        ({"a": [-(10**4300)]}, r"state\['a'\]\[0\] is a number of more than 4,300 digits"),
        ({1: 2}, "the key 1 of state is an int"),
        ([1], "state is a list"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ScriptState(given)


def test_bad_changes_are_refused_by_name() -> None:
    state = ScriptState({"best": 1.0, "net": nn.Linear(1, 1), "list": []})
    with pytest.raises(UsageError, match="no 'bset'"):
        state["bset"] = 2.0
    with pytest.raises(UsageError, match=r"state\['best'\] is of type set"):
        state["best"] = {1}
    with pytest.raises(UsageError, match=r"state\['best'\] is an object"):
        state["best"] = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"state\['net'\]"):
        state["net"] = None
    state["list"].append({2})
    with pytest.raises(UsageError, match=r"state\['list'\]\[0\] is of type set"):
        state.told()


def test_an_attribute_is_no_value() -> None:
    """It would be lost for joiners, checkpoints and the hash."""
    state = ScriptState({"best": 1.0})
    with pytest.raises(UsageError, match=r"run\.state\['best'\]"):
        state.best = 0.5  # type: ignore[attr-defined]


def test_keys_come_with_the_run() -> None:
    given = {"best": 1.0}
    state = ScriptState(given)
    given["best"] = 0.5
    assert state["best"] == 0.5, "the script's own dict is the state"
    given["new"] = 2
    with pytest.raises(UsageError, match="'new'"):
        state.told()


def test_numbers_of_numpy_become_plain_on_every_worker() -> None:
    """A worker that joins gets plain numbers, which compute otherwise: float32 times 0.9 is no float32 any more."""
    state = ScriptState({"a": np.float32(0.5), "b": 0, "mean": np.float64(0.1)})
    state["b"] = np.int64(3)
    assert (type(state["a"]), type(state["b"])) == (float, int)
    assert plain({"a": np.float32(0.5)}, "", of_object=True) == {"a": 0.5}


class Phase(IntEnum):
    WARM = 1


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(1), Phase.WARM])
def test_numbers_that_come_back_as_another_type_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"state\['seen'\]\[0\] is of type"):
        ScriptState({"seen": [value]})


def test_what_is_in_two_places_is_refused() -> None:
    state = ScriptState({"seen": [1], "best": [], "weight": torch.zeros(2), "net": nn.Linear(1, 1)})
    state["best"] = [state["weight"].clone(), {}, (), torch.zeros(0), torch.zeros(0)]
    state.told()
    state["best"] = state["seen"]
    with pytest.raises(UsageError, match=r"state\['seen'\] and state\['best'\] are the same"):
        state.told()
    state["best"] = {"weight": state["weight"].view(1, 2)}
    with pytest.raises(UsageError, match=r"state\['weight'\] and state\['best'\]\['weight'\] are the same"):
        state.told()


def test_a_bad_value_is_found_before_a_worker_is_lost() -> None:
    state = ScriptState({"seen": []})
    for number in range(3):
        with state.waiting(regroups=False):
            state["seen"].append(number)
    state["seen"].append({3})
    with pytest.raises(UsageError, match=r"state\['seen'\]\[3\] is of type set"), state.waiting(regroups=False):
        pass


def test_the_order_of_keys_is_no_difference() -> None:
    one, other = ScriptState({"a": {"x": 1, "y": 2}}), ScriptState({"a": {"y": 2, "x": 1}})
    assert digest(one) == digest(other)


def test_an_object_that_does_not_fit_is_named() -> None:
    state = ScriptState({"net": nn.Linear(2, 1)})
    with pytest.raises(HoldfastError, match=r"state\['net'\] is a Linear"):
        join(state, ScriptState({"net": nn.Linear(3, 1)}).told())


def test_a_value_that_was_told_has_memory_of_its_own() -> None:
    tensor = torch.zeros(1)
    found = taken(None, {"a": [tensor]}, "")
    found["a"][0] += 1
    assert tensor.item() == 0


# --- when -------------------------------------------------------------------------------------------


def test_joiners_hear_of_the_boundary_even_when_the_member_has_left_it() -> None:
    """The generation broke after a member had gone on: a joiner's script will make the same change again."""
    member = ScriptState({"count": 4})
    member.enter("0 to 9")
    with member.waiting(regroups=True):
        pass
    member["count"] += 1
    assert over_the_wire(member)["values"] == {"count": 4}
    member.nobody_waits()
    assert over_the_wire(member)["values"] == {"count": 5}


@pytest.mark.parametrize("hears", ["of a member", "of a checkpoint"])
def test_a_joiner_tells_on_what_it_has_heard(hears: str) -> None:
    """The generation broke before its first vote, and somebody else has not heard yet."""
    joiner = ScriptState({"count": 0})
    joiner.enter("0 to 9")
    with joiner.waiting(regroups=True):
        if hears == "of a member":
            member = ScriptState({"count": 4})
            member.enter("0 to 9")
            joiner.hear(over_the_wire(member))
        else:
            joiner.restore({"count": 4}, "0 to 9")
        assert over_the_wire(joiner)["values"] == {"count": 4}, "the generation broke while it formed"
    joiner.catch_up(trains=True, remembered=None)
    joiner["count"] += 1
    assert over_the_wire(joiner)["values"] == {"count": 4}, "it broke in the first step"
    joiner.nobody_waits()
    assert over_the_wire(joiner)["values"] == {"count": 5}


def test_a_script_that_does_not_wait_keeps_its_values() -> None:
    state = ScriptState({"count": 1})
    state.hear(ScriptState({"count": 7}).told())
    assert state.restore({"count": 7}, "0 to 9") == []
    state.catch_up(trains=True, remembered=None)
    assert state["count"] == 1


def test_a_joiner_passes_loops_with_the_values_of_then() -> None:
    member, joiner = ScriptState({"best": 0.1, "count": 9}), ScriptState({"best": 9.0, "count": 0})
    member.enter("2 to 30")
    told = over_the_wire(member)
    joiner.enter("0 to 10")
    with joiner.waiting(regroups=True):
        joiner.hear(told)
    joiner.catch_up(trains=False, remembered={"best": 0.7, "count": 1})
    assert dict(joiner) == {"best": 0.7, "count": 1}
    joiner["count"] += 1
    joiner.enter("1 to 20")
    joiner.catch_up(trains=False, remembered={"best": 0.3, "count": 5})
    assert dict(joiner) == {"best": 0.3, "count": 5}
    joiner.enter("2 to 30")
    joiner.catch_up(trains=False, remembered={"best": 0.2, "count": 8})
    assert dict(joiner) == {"best": 0.1, "count": 9}, "here the others are: what they have is what counts"
    joiner["count"] += 1
    joiner.enter("3 to 40")
    joiner.catch_up(trains=True, remembered=None)
    assert joiner["count"] == 10, "it is told once"


def test_small_values_are_remembered_at_the_end_of_a_loop() -> None:
    state = ScriptState({"best": 0.5, "large": torch.zeros(SMALL), "long": [0.5] * SMALL, "net": nn.Linear(1, 1)})
    assert state.end() == {"best": 0.5}


def test_a_checkpoint_after_a_loop_has_the_values_of_its_end() -> None:
    state = ScriptState({"count": 1, "mean": torch.ones(1)})
    state.enter("0 to 9")
    state.end()
    state["count"] += 1
    state["mean"] += 1
    assert state.saved() == {"count": 1, "mean": torch.ones(1)}
    state.enter("1 to 20")
    assert state.saved()["count"] == 2


def test_keys_that_came_or_went_since_a_checkpoint_are_told() -> None:
    state = ScriptState({"best": 1.0, "new": 5})
    with state.waiting(regroups=True):
        remarks = state.restore({"best": 0.5, "old": 3}, "0 to 9")
    state.catch_up(trains=True, remembered=None)
    assert dict(state) == {"best": 0.5, "new": 5}
    assert len(remarks) == 2
    assert "'new'" in remarks[0]
    assert "'old'" in remarks[1]


def test_it_changes_as_a_dict_does() -> None:
    state = ScriptState({"best": 1.0, "bad": 0})
    state |= {"best": 0.5}
    state.update(bad=2)
    assert dict(state) == {"best": 0.5, "bad": 2}
    with pytest.raises(UsageError, match="'bad'"):
        del state["bad"]


@pytest.mark.parametrize(
    "value",
    [
        collections.Counter("ab"),
        collections.OrderedDict(a=1),
        collections.defaultdict(int),
        torch.ones(1, requires_grad=True),
        torch.nn.Parameter(torch.ones(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_another_type_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"state\['a'\]"):
        ScriptState({"a": value})


def test_a_list_in_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="in itself"):
        ScriptState({"a": endless})


def test_a_key_that_nobody_gave_is_named_with_a_hint_and_get_works_as_in_a_dict() -> None:
    state = ScriptState({"bad": 0})
    with pytest.raises(UsageError, match=r"^run.state has no 'best' \(give it a first value: Run\(state=") as refused:
        state["best"]
    assert isinstance(refused.value, KeyError)  # a script may have ``except KeyError``
    assert "best" not in state
    assert state.get("best", 1.0) == 1.0
    assert state.get("bad") == 0
