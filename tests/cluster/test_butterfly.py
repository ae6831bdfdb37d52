"""The butterfly: with few messages each, all workers get the same sum of all."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.cluster import talk
from holdfast.cluster.butterfly import meetings
from holdfast.errors import Broken
from tests.cluster.links.hubs import linked, together

SIZES = [*range(2, 40), 64, 100, 1000]


@pytest.mark.parametrize("size", SIZES)
def test_everybody_has_something_of_everybody_and_nobody_sends_much(size: int) -> None:
    plans = [meetings(place, size) for place in range(size)]
    known = [{place} for place in range(size)]
    done = [0] * size
    while any(done[place] < len(plans[place]) for place in range(size)):
        before = sum(done)
        for place in range(size):
            step(place, plans, known, done)
        assert sum(done) > before, "they wait for each other for ever"
    assert all(each == set(range(size)) for each in known)
    assert max(sum(meet.sends for meet in plan) for plan in plans) <= math.log2(size) + 1


def step(place: int, plans: list, known: list[set[int]], done: list[int]) -> None:
    """Let a worker and its partner go one round on, if they are at rounds with each other."""
    if done[place] == len(plans[place]):
        return
    meet = plans[place][done[place]]
    other = meet.partner
    if done[other] == len(plans[other]) or plans[other][done[other]].partner != place or other < place:
        return
    back = plans[other][done[other]]
    assert (meet.sends, meet.receives) == (back.receives, back.sends)
    assert meet.is_result == back.is_result
    told = [set(known[place]), set(known[other])]
    if meet.receives:
        assert meet.is_result or not known[place] & told[1], "nothing is added twice"
        known[place] |= told[1]
    if back.receives:
        assert back.is_result or not known[other] & told[0], "nothing is added twice"
        known[other] |= told[0]
    done[place] += 1
    done[other] += 1


@pytest.mark.parametrize("size", [3, 4, 5])
def test_sums_over_links_are_the_same_on_all_and_those_of_everybody_telling_everybody(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Numbers that one worker has, as losses: their sums do not depend on the order."""
    generator = torch.Generator().manual_seed(0)
    owned = [torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(size)]
    values = [torch.where(torch.arange(size) == rank, own, 0.0) for rank, own in enumerate(owned)]
    shared = [torch.randn(7, generator=generator) for _ in range(size)]
    found: dict[int, list[list[torch.Tensor]]] = {}
    with linked(size) as groups:
        for direct in (size, 1):
            monkeypatch.setattr(talk, "DIRECT", direct)
            found[direct] = [[each.clone() for each in values], [each.clone() for each in shared]]

            def work(rank: int, copies: list[list[torch.Tensor]]) -> None:
                groups[rank].vote(copies[0][rank])
                groups[rank].sum(copies[1][rank])

            together(*(lambda rank=rank, copies=found[direct]: work(rank, copies) for rank in range(size)))
    assert all(torch.equal(each, found[size][0][0]) for way in found.values() for each in way[0])
    assert all(torch.equal(each, found[1][1][0]) for each in found[1][1]), "of other numbers all have the same, too"


@pytest.mark.parametrize("size", [4, 5])
def test_a_loss_frees_those_too_who_do_not_talk_to_the_lost_one(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Whoever notices it gives the group up, and so frees those who wait for itself."""
    monkeypatch.setattr(talk, "DIRECT", 1)
    with linked(size) as groups:

        def work(rank: int) -> None:
            if rank == 0:
                groups[0].abort("it is lost")
                return
            with pytest.raises(Broken):
                groups[rank].sum(torch.zeros(1))

        together(*(lambda rank=rank: work(rank) for rank in range(size)))
