"""Announcements of generations: what was told comes out as it was, and what is as before is not told again."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.announce import announce, heard, names_of, read_names
from holdfast.cluster.membership import Generation, Member, Message, Standing, worker_order

names = st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda name: f"{name[0]}.{name[1]}"), min_size=1)


def over_the_wire(message: Message) -> Message:
    return json.loads(json.dumps(message))


def generation(workers: set[str], number: int, seed: int, lives: int = 1) -> Generation:
    """One whose members show one of a few standings."""
    chance = random.Random(f"{seed} {number}")
    shown = [Standing(operation=n, broken=n % 2 == 0, payload={"held": list(range(n))}) for n in range(1, 4)]
    members = [
        Member(
            worker=name,
            address=f"10.0.0.{name}",
            port=hash(name) % 60000,
            host=name[0],
            incarnation=f"{name} {chance.randrange(lives)}",
            standing=chance.choice(shown),
        )
        for name in sorted(workers, key=worker_order)
    ]
    return Generation(number=number, members=tuple(members), reason="a test", run="run", life=f"life {number}")


def as_json(made: Generation) -> str:
    return json.dumps(made.to_json())


@given(workers=names)
def test_names(workers: set[str]) -> None:
    assert read_names(names_of(workers)) == sorted(workers, key=worker_order)


@given(first=names, second=names, seed=st.integers(0, 99), lives=st.integers(1, 2))
def test_a_generation_comes_out_as_it_was(first: set[str], second: set[str], seed: int, lives: int) -> None:
    """Told to those who know nothing, and to those who know the one before; some names belong to other processes."""
    one, two = generation(first, 1, seed, lives), generation(second, 2, seed, lives)
    known = heard(over_the_wire(announce(one, None)), None)
    assert as_json(known) == as_json(one)
    assert as_json(heard(over_the_wire(announce(two, one)), known)) == as_json(two)
    assert as_json(heard(over_the_wire(announce(two, None)), known)) == as_json(two), "a base is not needed"


def test_after_a_loss_its_size_does_not_depend_on_the_number_of_members() -> None:
    sizes = []
    for workers in (16, 1000):
        everybody = {f"{n // 8}.{n % 8}" for n in range(workers)}
        one = generation(everybody, 1, 0)
        two = Generation(number=2, members=tuple(m for m in one.members if m.worker != "1.3"), run="run", life="2")
        two = Generation(**vars(two) | {"members": tuple(Member(**vars(m) | {"standing": SAME}) for m in two.members)})
        sizes.append(len(json.dumps(announce(two, one))))
    assert sizes[0] == sizes[1]


SAME = Standing(operation=7, broken=True)


@pytest.mark.parametrize("base", [None, 3])
def test_what_builds_on_another_generation_is_refused(base: int | None) -> None:
    message = announce(generation({"0.0", "0.1"}, 2, 0), generation({"0.0"}, 1, 0))
    with pytest.raises(ValueError, match="not known"):
        heard(message, None if base is None else generation({"0.0"}, base, 0))
