"""Members of one generation in threads of this process, each with a hub of its own, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from holdfast.cluster.group import Group
from holdfast.cluster.links.hub import Hub
from holdfast.cluster.links.member_links import LinkSettings
from holdfast.cluster.membership import Generation, Member

T = TypeVar("T")

TOKEN = "a token that all members know, and more"
HEARTBEAT = 5.0
SECONDS = 60.0  # for anything here: a test that would hang fails instead


def generation_of(hubs: list[Hub], address: str = "127.0.0.1", number: int = 1) -> Generation:
    members = [Member(worker=f"0.{rank}", address=address, port=hub.port) for rank, hub in enumerate(hubs)]
    return Generation(number=number, members=tuple(members), run="run", life="life")


def enter(hub: Hub, generation: Generation, rank: int) -> Group:
    return Group(generation, rank, hub.links(generation, f"0.{rank}"))


@contextmanager
def hubs(size: int, address: str = "127.0.0.1", **settings: Any) -> Iterator[list[Hub]]:
    shared = LinkSettings(**{"token": TOKEN, "heartbeat": HEARTBEAT} | settings)
    made = [Hub(address, shared) for _ in range(size)]
    try:
        yield made
    finally:
        for hub in made:
            hub.close()


@contextmanager
def linked(size: int = 2, address: str = "127.0.0.1", **settings: Any) -> Iterator[list[Group]]:
    """Members that have met."""
    with hubs(size, address, **settings) as made:
        generation = generation_of(made, address)
        groups = [enter(hub, generation, rank) for rank, hub in enumerate(made)]
        together(*(group.gather for group in groups))
        yield groups


def together(*works: Callable[[], T]) -> list[T]:
    """Do these at once, each in a thread of its own; return the results, or raise the first error."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def do(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=do, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if errors:
        raise errors[0]
    assert len(results) == len(works), "some hang"
    return [results[number] for number in range(len(works))]


def talk(groups: list[Group]) -> list[float]:
    """Have the members add up what they have; return what each got."""
    values = [torch.tensor([2.0**rank]) for rank in range(len(groups))]
    together(*(lambda group=group, value=value: group.vote(value) for group, value in zip(groups, values, strict=True)))
    return [float(value) for value in values]
