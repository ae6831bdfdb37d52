"""Synthetic traces: nodes fail one by one and in bursts, and are replaced; everything from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import Any

from holdfast.errors import UsageError
from holdfast.simulate.trace import Trace, grouped
from holdfast.words import duration_code, parse_duration

PREFIX = "synthetic:"
EXAMPLE = "synthetic:nodes=30,mtbf=10d,joins=30m,burst=4,burst_every=12h,hours=24,seed=0"
MOST_NODES, MOST_MOVES = 4_000, 20_000  # nodes and events that can be simulated within half a minute
DURATIONS = ("mtbf", "joins", "burst_every")  # fields that are given as 90s, 10m, 6h or 2d


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Parameters of a synthetic trace; times in seconds. Raises UsageError for impossible values.

    >>> Synthetic.parse("synthetic:nodes=30,mtbf=10d,hours=24")
    Synthetic(nodes=30, mtbf=864000.0, joins=None, burst=0, burst_every=None, hours=24.0, seed=0)
    >>> Synthetic.parse("synthetic:nodes=30,mtfb=10d")
    Traceback (most recent call last):
    holdfast.errors.UsageError: 'mtfb' is not known to a synthetic trace (there are nodes, mtbf, joins, burst, \
burst_every, hours, seed)
    """

    nodes: int = 30
    mtbf: float | None = None  # mean time between failures of one node; None: none fails alone
    joins: float | None = None  # mean time until a lost node is replaced; None: never
    burst: int = 0  # nodes lost at once
    burst_every: float | None = None  # mean time from one burst to the next
    hours: float = 24.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise UsageError(f"a synthetic trace of {self.nodes} nodes cannot be made", hint=f"1 to {MOST_NODES}")
        if not 0 < self.hours < math.inf:
            raise UsageError(f"a synthetic trace of {self.hours:g} hours cannot be made")
        for name in DURATIONS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} is {value:g} s, it has to be more than nothing")
        if self.burst < 0 or bool(self.burst) != (self.burst_every is not None):
            raise UsageError("a burst takes both: how many nodes, and how often", hint="burst=4,burst_every=12h")

    @classmethod
    def parse(cls, text: str) -> Synthetic:
        """Read the text behind ``--trace``: names and values, durations as 90s, 10m, 6h or 2d. Raises UsageError."""
        given: dict[str, float] = {}
        names = [field.name for field in fields(cls)]
        for part in filter(None, text.removeprefix(PREFIX).split(",")):
            name, _, value = part.strip().partition("=")
            if name not in names:
                raise UsageError(f"{name!r} is not known to a synthetic trace", hint=f"there are {', '.join(names)}")
            if name in given:
                raise UsageError(f"{name} is given twice")
            given[name] = parse_duration(value, name) if name in DURATIONS else _number(name, value)
        whole = {name: int(value) for name, value in given.items() if name in ("nodes", "burst", "seed")}
        return cls(**{**given, **whole})  # type: ignore[arg-type]

    def trace(self) -> Trace:
        """Make the trace. The same parameters and seed give the same trace.

        >>> Synthetic(mtbf=864000.0, seed=1).trace() == Synthetic(mtbf=864000.0, seed=1).trace()
        True
        """
        end = 3600 * self.hours
        return grouped(self._moves(end), name=self._name(), end=end)

    def _name(self) -> str:
        """Return the text from which ``parse`` makes this trace."""
        names = [field.name for field in fields(self) if getattr(self, field.name) or field.name == "seed"]
        shown: dict[str, Any] = {name: getattr(self, name) for name in names}
        shown |= {name: duration_code(value) for name, value in shown.items() if name in DURATIONS}
        shown["hours"] = f"{self.hours:g}"
        return PREFIX + ",".join(f"{name}={value}" for name, value in shown.items())

    def _moves(self, end: float) -> Iterator[tuple[float, bool, str]]:
        """Yield moves (time, added or lost, node) in the order of time.

        A node's failure is drawn when the node is added.
        """
        rng = random.Random(self.seed)
        there: dict[str, None] = {}
        queue: list[tuple[float, int, str]] = []  # time, a number that breaks ties, "join", "burst" or a node
        made = moves = 0

        def plan(time: float, mean: float | None, what: str) -> None:
            """Queue an event at a random time after ``time``."""
            nonlocal moves
            if mean is not None:
                moves += 1
                if moves > MOST_MOVES:
                    raise UsageError(f"more than {MOST_MOVES} events take minutes to follow", hint="a longer mtbf")
                heappush(queue, (time + rng.expovariate(1 / mean), moves, what))

        def add(time: float) -> tuple[float, bool, str]:
            """Add a node, and draw its failure."""
            nonlocal made
            made += 1
            name = f"node{made}"
            there[name] = None
            plan(time, self.mtbf, name)
            return time, True, name

        for _ in range(self.nodes):
            yield add(0.0)
        plan(0.0, self.burst_every, "burst")
        while queue and queue[0][0] < end:
            time, _, what = heappop(queue)
            if what == "join":
                yield add(time)
                continue
            if what == "burst":
                victims = rng.sample(list(there), min(self.burst, len(there)))
                plan(time, self.burst_every, "burst")
            else:
                victims = [what] if what in there else []
            for victim in victims:
                del there[victim]
                plan(time, self.joins, "join")
                yield time, False, victim


def _number(name: str, text: str) -> float:
    try:
        value = float(text.removesuffix("h") if name == "hours" else int(text))
    except ValueError as e:
        kind = "a number of hours" if name == "hours" else "a whole number"
        raise UsageError(f"{name}={text} is not {kind}", hint=EXAMPLE) from e
    return value
