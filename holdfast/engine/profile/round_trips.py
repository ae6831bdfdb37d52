"""Measures the link between two workers: messages to and fro over the transport that a run uses.

One side keeps the time (``clock``), the other one sends back what it gets (``echo``). ``links.py`` brings two processes
together for that; ``quick_link`` measures between two workers of a run that is about to train.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from holdfast.cluster import tags
from holdfast.cluster.group import Group
from holdfast.plan.profile import Link

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20)  # bytes of the messages
ROUNDS = 7  # over all sizes; sizes take turns, so that other processes disturb all of them alike
SMALL_TRIPS, LARGE_TRIPS = 20, 4  # trips of one size in a round, for small and large messages, after one to warm up
LARGE_BYTES = 1 << 20  # from here on a message is large: a trip takes long enough to be timed well
SLOW_SECONDS = 0.5  # if a message takes longer one way, no larger one is tried: the whole would take minutes
CLOCK, ECHO = 0, 1  # ranks of the two sides


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """A link, and the measurements that it was fitted to."""

    link: Link
    seconds: dict[int, float]  # of one message one way, by its bytes
    error: float  # the fit's largest error, as a share of the measured time

    def notes(self) -> dict[str, Any]:
        """The measurements for a profile's notes, as JSON has them."""
        return {"seconds_by_bytes": {str(size): t for size, t in self.seconds.items()}, "fit_error": self.error}


def fit(seconds: Mapping[int, float]) -> Link:
    """Fit latency and bandwidth to measured ``seconds`` by bytes.

    The fit is of least squares, with each message's error as a share of its time: else large messages would decide all.

    >>> link = fit({size: 1e-4 + size / 1e9 for size in SIZES})
    >>> round(link.latency, 9), round(link.bandwidth)
    (0.0001, 1000000000)
    """
    sizes, times = np.array([*seconds], dtype=float), np.array([*seconds.values()])
    columns = np.stack([1 / times, sizes / times], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    if latency < 0 or slope <= 0:  # noise: take the latency from the smallest message, the bandwidth from the largest
        latency, slope = times[0], max(times[-1] - times[0], 0.5 * times[-1]) / sizes[-1]
    return Link(bandwidth=1 / float(slope), latency=float(latency))


def summary(rounds: Mapping[int, list[float]]) -> MeasuredLink:
    """Take the median of the rounds for each size, and fit a link to these.

    >>> summary({4: [2e-6, 1e-6, 9e-6], 10**9: [1.0, 1.0, 5.0]}).seconds
    {4: 2e-06, 1000000000: 1.0}
    """
    seconds = {size: median(times) for size, times in rounds.items()}
    link = fit(seconds)
    error = max(abs(link.seconds(size) - t) / t for size, t in seconds.items())
    return MeasuredLink(link=link, seconds=seconds, error=error)


# --- measured at leisure --------------------------------------------------------------------------


def clock(group: Group, sizes: tuple[int, ...] = SIZES) -> MeasuredLink:
    """Measure the link to the rank that runs ``echo``: announce a size, send messages, wait for their echoes.

    Of each round the fastest trip counts. A slower one tells of other processes, not of the link: when another
    process has the core, a message waits for the scheduler, and that takes milliseconds instead of microseconds.
    """
    rounds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size in list(rounds):
            count = LARGE_TRIPS if size >= LARGE_BYTES else SMALL_TRIPS
            _order(group, size, count)
            rounds[size].append(min(_timed_trips(group, size, count)))
            group.vote(torch.zeros(1))
            if rounds[size][-1] > SLOW_SECONDS:
                rounds = {smaller: times for smaller, times in rounds.items() if smaller <= size}
                break
    # The order to end. A vote would prove that it was heard, but nobody needs to know: the other side just leaves.
    group.start([(ECHO, torch.tensor([0, 0]), tags.ECHO_ORDER)], [])
    return summary(rounds)


def _timed_trips(group: Group, size: int, count: int) -> list[float]:
    """Seconds of one way, half of a trip, for each trip but the first one, which warms up."""
    message, echo = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    seconds = []
    for _ in range(1 + count):
        begin = time.perf_counter()
        group.finish(group.start([(ECHO, message, tags.ECHO)], [(ECHO, echo, tags.ECHO)]))
        seconds.append((time.perf_counter() - begin) / 2)
    return seconds[1:]


def _order(group: Group, size: int, count: int) -> None:
    """Tell the other side how large the next messages are and how many come. The vote proves that it has heard."""
    group.start([(ECHO, torch.tensor([size, count]), tags.ECHO_ORDER)], [])
    group.vote(torch.zeros(1))


def echo(group: Group) -> None:
    """Send back what the rank that runs ``clock`` sends, until it orders the end."""
    order = torch.zeros(2, dtype=torch.int64)
    while True:
        group.finish(group.start([], [(CLOCK, order, tags.ECHO_ORDER)]))
        size, count = order.tolist()
        if not 0 < size <= max(SIZES):
            return
        group.vote(torch.zeros(1))
        message = torch.empty(size, dtype=torch.uint8)
        for _ in range(1 + count):
            group.finish(group.start([], [(CLOCK, message, tags.ECHO)]))
            group.start([(CLOCK, message, tags.ECHO)], [])
        group.vote(torch.zeros(1))


# --- measured in a hurry --------------------------------------------------------------------------

QUICK_SIZES = (4, 16 << 10, 256 << 10, 1 << 20)  # bytes
QUICK_SIZE_SECONDS = 0.01  # to spend on one size, if the fewest trips take no longer
QUICK_FEWEST, QUICK_MOST = 3, 20  # trips of one size; at least 3 because the first is slow, more than 20 tell nothing
QUICK_SLOW_SECONDS = 0.05  # if a trip takes longer, one is enough: start-up no longer shows in it
QUICK_SECONDS = 0.6  # for all sizes together: a trip that would end later is not begun, the run is waiting


def quick_link(
    group: Group, hosts: Sequence[str], *, clock: int = 0, device: torch.device | None = None
) -> Link | None:
    """Measure the link between two workers of a group, on different hosts if there are any, in less than a second.

    Every worker of the group calls this. ``hosts`` are the hosts of all ranks; ``clock`` is the rank that measures. It
    gets the link, or None if it is alone. All others get None; one of them answers the messages, the rest return at
    once. Raises ``Broken`` if the generation ends meanwhile.
    """
    others = [rank for rank in range(group.size) if rank != clock]
    other = next((rank for rank in others if hosts[rank] != hosts[clock]), others[0] if others else None)
    if group.rank == clock and other is not None:
        return fit(_quick_trips(group, other, device))
    if group.rank == other:
        _quick_echo(group, clock, device)
    return None


def _quick_trips(group: Group, other: int, device: torch.device | None) -> dict[int, float]:
    """Seconds of one way by bytes. The fastest trip of each size counts, as in ``clock``."""
    seconds: dict[int, float] = {}
    start = time.perf_counter()
    for size in QUICK_SIZES:
        expected = 2 * fit(seconds).seconds(size) if len(seconds) > 1 else 0.0  # of a trip, as far as can be told
        if time.perf_counter() + expected > start + QUICK_SECONDS:
            break
        trips = QUICK_FEWEST
        if expected > QUICK_SLOW_SECONDS:
            trips = 1
        elif expected:
            trips = max(QUICK_FEWEST, min(QUICK_MOST, int(QUICK_SIZE_SECONDS / expected)))
        group.start([(other, torch.tensor([size, trips], device=device), tags.ECHO_ORDER)], [])
        message, echo = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(trips):
            begin = time.perf_counter()
            group.finish(group.start([(other, message, tags.ECHO)], [(other, echo, tags.ECHO)]))
            one_way = (time.perf_counter() - begin) / 2
            seconds[size] = min(seconds.get(size, one_way), one_way)
    group.start([(other, torch.tensor([0, 0], device=device), tags.ECHO_ORDER)], [])
    return seconds


def _quick_echo(group: Group, clock: int, device: torch.device | None) -> None:
    order = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        group.finish(group.start([], [(clock, order, tags.ECHO_ORDER)]))
        size, trips = order.tolist()
        if not size:
            return
        message = torch.empty(size, dtype=torch.uint8, device=device)
        for _ in range(trips):
            group.finish(group.start([], [(clock, message, tags.ECHO)]))
            group.start([(clock, message, tags.ECHO)], [])
