"""What a run could lose at this moment and go on, and what it could not. Pure, from who holds which layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.words import count, ranges_text, some_of


@dataclass(frozen=True, kw_only=True)
class Place:
    """The layers that a worker holds, from ``first`` to before ``stop``, and the host that it is lost with."""

    host: str
    first: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Survival:
    """What may be lost. ``workers``, ``hosts``: how many of them at once, whichever they are.

    ``alone``: workers that have the only copy of some layers, and these layers; ``alone_hosts``: the same of hosts.
    ``words``: all of it in sentences, the most important first.
    """

    workers: int
    hosts: int
    alone: tuple[tuple[str, str], ...]
    alone_hosts: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


def _nothing(words: str) -> Survival:
    return Survival(workers=0, hosts=0, alone=(), alone_hosts=(), words=(words,))


OVER = _nothing("The run is over.")
UNSETTLED = _nothing("A generation is being entered: who holds what is not settled yet.")


def survival(places: Mapping[str, Place], *, log: bool = False, checkpoint: int | None = None) -> Survival:
    """Return what may be lost. ``log``: layers can be computed again. ``checkpoint``: the step of the last one.

    >>> two = {"0.0": Place(host="a", first=0, stop=4), "1.0": Place(host="b", first=0, stop=4)}
    >>> for line in survival(two, checkpoint=8).words: print(line)
    Any worker may be lost, and nothing is trained again.
    Any host may be lost.
    """
    if not places:
        return _nothing("Nobody holds the model yet.")
    layers = max(place.stop for place in places.values())
    holders: list[set[str]] = [set() for _ in range(layers)]
    houses: list[set[str]] = [set() for _ in range(layers)]
    for worker, place in places.items():
        for layer in range(max(0, place.first), place.stop):
            holders[layer].add(worker)
            houses[layer].add(place.host)
    workers = max(0, min(len(each) for each in holders) - 1)
    hosts = max(0, min(len(each) for each in houses) - 1)
    alone, alone_hosts = _alone(holders), _alone(houses)
    otherwise = _otherwise(log=log, checkpoint=checkpoint)
    words = [_of_workers(workers, alone, otherwise), _of_hosts(hosts, alone_hosts, otherwise, workers)]
    return Survival(
        workers=workers, hosts=hosts, alone=alone, alone_hosts=alone_hosts, words=tuple(filter(None, words))
    )


def _alone(holders: Sequence[set[str]]) -> tuple[tuple[str, str], ...]:
    """Return who has the only copy of some layers, and which ones."""
    found: dict[str, list[int]] = {}
    for layer, names in enumerate(holders):
        if len(names) == 1:
            found.setdefault(next(iter(names)), []).append(layer)
    return tuple((name, ranges_text(layers)) for name, layers in found.items())


def _otherwise(*, log: bool, checkpoint: int | None) -> str:
    """Return what a loss means that takes the last copy."""
    back = "the run ends" if checkpoint is None else f"all return to the checkpoint of step {checkpoint}"
    return f"they are computed again from the log, or else {back}" if log else back


def _of_workers(number: int, alone: Sequence[tuple[str, str]], otherwise: str) -> str:
    if number == 1:
        return "Any worker may be lost, and nothing is trained again."
    if number > 1:
        return f"Any {number} workers may be lost at once, and nothing is trained again."
    return f"The only copy of some layers is on {_named(alone, 'worker')}: if it is lost, {otherwise}."


def _of_hosts(number: int, alone: Sequence[tuple[str, str]], otherwise: str, workers: int) -> str:
    if number == 1:
        return "Any host may be lost."
    if number > 1:
        return f"Any {number} hosts may be lost at once."
    if not workers:
        return ""  # the sentence on workers says it
    return f"All copies of some layers are on {_named(alone, 'host')}: if it is lost as a whole, {otherwise}."


def _named(alone: Sequence[tuple[str, str]], noun: str) -> str:
    names = [f"{name} (layers {layers})" for name, layers in alone]
    return f"{noun} {names[0]}" if len(names) == 1 else f"{count(len(names), noun)}: {some_of(names, 4)}"
