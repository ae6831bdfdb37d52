"""Failure traces: the nodes at the start, the times at which nodes are lost or added, and the end."""

from __future__ import annotations

import datetime
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError

FORMATS = "a line is 'milliseconds,add|remove,node' or 'date, time, count'"
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?$")


@dataclass(frozen=True, kw_only=True)
class NodeChange:
    """A change at ``time`` (seconds): nodes that are lost, and nodes that are ordered but not up yet."""

    time: float
    lost: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The nodes of a cluster from ``start`` to ``end`` (seconds).

    >>> trace = Trace(name="t", start=0, end=7200, nodes=("a", "b"), changes=(NodeChange(time=3600, lost=("a",)),))
    >>> trace.node_hours, trace.losses, trace.counts
    (3.0, 1, (1, 2))
    """

    name: str
    start: float
    end: float
    nodes: tuple[str, ...]  # at the start, up and running
    changes: tuple[NodeChange, ...]  # in the order of time
    notes: tuple[str, ...] = ()  # sentences about what had to be assumed to read it

    @property
    def seconds(self) -> float:
        """Length of the trace."""
        return self.end - self.start

    @property
    def losses(self) -> int:
        """Number of nodes that are lost in all."""
        return sum(len(change.lost) for change in self.changes if change.time < self.end)

    @property
    def between_losses(self) -> float | None:
        """Average seconds between moments at which nodes are lost; None if none ever is."""
        moments = sum(1 for change in self.changes if change.lost and change.time < self.end)
        return self.seconds / moments if moments else None

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of nodes that occur, sorted."""
        return tuple(sorted({count for _, _, count in self.spans()}))

    @property
    def node_hours(self) -> float:
        """Hours of all nodes together."""
        return sum((end - start) * count for start, end, count in self.spans()) / 3600

    def spans(self) -> Iterator[tuple[float, float, int]]:
        """Yield stretches of time (start, end, number of nodes)."""
        time, count = self.start, len(self.nodes)
        for change in self.changes:
            if min(change.time, self.end) > time:
                yield time, min(change.time, self.end), count
            time, count = change.time, count + len(change.added) - len(change.lost)
        if self.end > time:
            yield time, self.end, count


def read_trace(path: Path) -> Trace:
    """Read a trace file in either format (see FORMATS). Raises UsageError with the number of a wrong line."""
    try:
        text = path.read_text()
    except FileNotFoundError as e:
        raise UsageError(f"there is no trace {path}", hint="or make one up: --trace synthetic:nodes=30,mtbf=6h") from e
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"the trace {path} cannot be read: {e}") from e
    return parse_trace(text, name=path.name)


def parse_trace(text: str, *, name: str) -> Trace:
    """Read a trace from a text; ``name`` is for messages.

    >>> parse_trace("0,add,a\\n0,add,b\\n3600000,remove,a\\n", name="t").changes
    (NodeChange(time=3600.0, lost=('a',), added=()),)
    >>> parse_trace("2021-12-11, 11:00:00, 3\\n2021-12-11, 12:00:00, 2\\n", name="t").counts
    (3,)
    >>> parse_trace("0,add,a\\n0,remove,b\\n", name="t")
    Traceback (most recent call last):
    holdfast.errors.UsageError: t, line 2: b is removed, but it is not there
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UsageError(f"the trace {name} is empty", hint=FORMATS)
    rows = [(number, [field.strip() for field in line.split(",")]) for number, line in lines]
    for number, row in rows:
        if len(row) != 3:
            raise UsageError(f"{name}, line {number}: {len(row)} fields instead of three", hint=FORMATS)
    if _DATE.match(rows[0][1][0]):
        return _from_counts(rows, name)
    return _from_moves(rows, name)


def grouped(
    moves: Iterable[tuple[float, bool, str]],
    *,
    name: str,
    start: float | None = None,
    end: float | None = None,
    notes: tuple[str, ...] = (),
) -> Trace:
    """Make a trace of single moves (time, added or lost, node), given in the order of time.

    Nodes that are added at the first moment, or at ``start``, are up from the start. A node that is added and lost at
    the same moment is left out. Raises UsageError for a trace of no length.

    >>> grouped([(0, True, "a"), (0, True, "b"), (5, False, "a"), (9, True, "c")], name="t").nodes
    ('a', 'b')
    """
    times: dict[float, tuple[list[str], list[str]]] = {} if start is None else {start: ([], [])}
    for time, is_added, node in moves:
        lost, added = times.setdefault(time, ([], []))
        if is_added:
            added.append(node)
        elif node in added:
            added.remove(node)
        else:
            lost.append(node)
    first = min(times)
    changes = [
        NodeChange(time=time, lost=tuple(lost), added=tuple(added))
        for time, (lost, added) in times.items()
        if time > first and (lost or added)
    ]
    last = max(times) if end is None else end
    if last <= first:
        raise UsageError(f"the trace {name} ends when it begins", hint="it takes a second moment, be it a last line")
    return Trace(name=name, start=first, end=last, nodes=tuple(times[first][1]), changes=tuple(changes), notes=notes)


# --- milliseconds, add or remove, node ------------------------------------------------------------


def _from_moves(rows: list[tuple[int, list[str]]], name: str) -> Trace:
    """Read lines of the format 'milliseconds,add|remove,node'. Raises UsageError for a line that cannot be."""
    there: set[str] = set()
    moves: list[tuple[float, bool, str]] = []
    for number, (when, verb, node) in rows:
        where = f"{name}, line {number}"
        time = _milliseconds(when, where)
        if moves and time < moves[-1][0]:
            raise UsageError(f"{where}: time goes back, from {1000 * moves[-1][0]:.0f} to {when} ms")
        if verb not in ("add", "remove"):
            raise UsageError(f"{where}: {verb!r} is neither add nor remove", hint=FORMATS)
        if not node:
            raise UsageError(f"{where}: the node has no name")
        if verb == "add" and node in there:
            raise UsageError(f"{where}: {node} is added, but it is there already")
        if verb == "remove" and node not in there:
            raise UsageError(f"{where}: {node} is removed, but it is not there")
        (there.add if verb == "add" else there.remove)(node)
        moves.append((time, verb == "add", node))
    return grouped(moves, name=name)


def _milliseconds(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError as e:
        raise UsageError(f"{where}: {text!r} is not a time in milliseconds", hint=FORMATS) from e
    if not 0 <= value < math.inf:
        raise UsageError(f"{where}: the time {text} ms is negative or not finite")
    return value / 1000


# --- date, time, count ----------------------------------------------------------------------------


def _from_counts(rows: list[tuple[int, list[str]]], name: str) -> Trace:
    """Read lines of the format 'date, time, count'. A count holds until the time of the next line.

    Probes that overlap write lines whose time goes back. A later line is newer knowledge: it replaces all earlier
    lines for its own time and after. (Sorting instead would make the count jump between old and new readings.) The
    format does not tell which node is lost: it is drawn, with a fixed seed.
    """
    readings: list[tuple[datetime.datetime, int]] = []
    replaced = 0
    for number, (day, clock, counted) in rows:
        reading = _reading(day, clock, counted, f"{name}, line {number}")
        while readings and readings[-1][0] >= reading[0]:
            readings.pop()
            replaced += 1
        readings.append(reading)
    notes = (
        f"{replaced} of {len(rows)} lines were replaced by later lines for the same or an earlier time"
        if replaced
        else "",
        "which nodes are lost is not told: they are drawn",
    )
    first, last = readings[0][0], readings[-1][0]
    moves = list(_moves([((moment - first).total_seconds(), count) for moment, count in readings]))
    if not moves:
        raise UsageError(f"the trace {name} never has a node")
    end = (last - first).total_seconds()
    return grouped(moves, name=name, start=0.0, end=end, notes=tuple(note for note in notes if note))


def _moves(readings: list[tuple[float, int]]) -> Iterator[tuple[float, bool, str]]:
    there: list[str] = []
    made = 0
    rng = random.Random(0)
    for time, count in readings:
        while len(there) < count:
            made += 1
            there.append(f"node{made}")
            yield time, True, there[-1]
        while len(there) > count:
            yield time, False, there.pop(rng.randrange(len(there)))


def _reading(day: str, clock: str, counted: str, where: str) -> tuple[datetime.datetime, int]:
    try:
        moment = datetime.datetime.strptime(f"{day} {clock}", "%Y-%m-%d %H:%M:%S")
    except ValueError as e:
        raise UsageError(f"{where}: '{day}, {clock}' is not a date and a time", hint=FORMATS) from e
    if not counted.isdecimal():
        raise UsageError(f"{where}: {counted!r} is not a count of nodes", hint=FORMATS)
    return moment, int(counted)
