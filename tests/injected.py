"""Counts of the faults that tests have injected, by kind. The end of a session prints them, so a soak tells them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from holdfast.cluster import faults

injected: Counter[str] = Counter()  # since the last test: "simulated: kill", "processes: kill two"
PROPERTY = "injected faults"  # under which a test's report has them


def note(kind: str) -> None:
    """A fault strikes real processes."""
    injected[f"processes: {kind}"] += 1


def note_planned(planned: str, events: Iterable[dict[str, Any]]) -> None:
    """Count the named faults of a run, of which each ends its worker, by the workers that were ended by a signal."""
    killed = {event["worker"] for event in events if event["event"] == "exit" and "SIG" in event.get("cause", "")}
    for fault in faults.parse(planned):
        if fault.worker in killed:
            note(f"{fault.kind} at {fault.phase}")
            killed.discard(fault.worker)


def lines(total: Counter[str]) -> list[str]:
    """One line for the simulated world and one for real processes.

    >>> lines(Counter({"simulated: kill": 2, "simulated: cut": 1}))
    ['3 faults injected, simulated: 2 kill, 1 cut']
    """
    found = []
    for where in sorted({key.split(":")[0] for key in total}):
        kinds = [f"{count} {key.split(': ')[1]}" for key, count in total.most_common() if key.startswith(where)]
        number = sum(count for key, count in total.items() if key.startswith(where))
        found.append(f"{number} faults injected, {where}: {', '.join(kinds)}")
    return found
