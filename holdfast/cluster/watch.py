"""Detection of silent peers, and of too few hosts, by the roster. Pure: the time is an argument."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

LOOKS = 5  # looks, and heartbeats sent, within one timeout: a few late ones do no harm


@dataclass(kw_only=True)
class Shortage:
    """Notices when there have been too few for longer than the patience.

    >>> shortage = Shortage(patience=30.0)
    >>> shortage.lasts(1, 2, now=0.0), shortage.lasts(1, 2, now=31.0), shortage.lasts(2, 2, now=32.0)
    (False, True, False)
    """

    patience: float  # in seconds
    _since: float | None = None

    def lasts(self, here: int, needed: int, now: float) -> bool:
        """Take in how many there are; return whether there have been too few for too long."""
        self._since = None if here >= needed else now if self._since is None else self._since
        return self._since is not None and now - self._since > self.patience


@dataclass(kw_only=True)
class Watch:
    """Decides who has been silent for too long, and notices when the coordinator itself was asleep.

    A coordinator whose process was stopped hears nothing, and misses its own looks. When it wakes up, silence shows
    nothing about the others. So for one more timeout a lost connection is not taken for a death.

    >>> watch = Watch(timeout=5.0, patience=30.0, now=0.0)
    >>> watch.look(1.0), watch.silent({"0.0": 0.5, "0.1": -4.5}, 1.0)
    (True, ['0.1'])
    """

    timeout: float  # seconds of silence after which a peer counts as lost
    patience: float  # seconds to wait for missing hosts
    now: float  # time of the last look

    def __post_init__(self) -> None:
        self._woke = -math.inf
        self._shortage = Shortage(patience=self.patience)

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return self.timeout / LOOKS

    @property
    def deadline(self) -> float:
        """When the next look is due."""
        return self.now + self.interval

    def look(self, now: float) -> bool:
        """Note a look; return False if the coordinator was asleep before it: then nobody's silence counts."""
        slept = self._overslept(now)
        self.now = now
        if slept:
            self._woke = now
        return not slept

    def is_dazed(self, now: float) -> bool:
        """Whether the coordinator slept lately: peers may have closed connections because it did not answer."""
        return now < self.awake_since(now) + self.timeout

    def awake_since(self, now: float) -> float:
        """When the coordinator has last woken up: now, if it has not looked yet after a sleep; -inf if it never slept.

        >>> watch = Watch(timeout=5.0, patience=30.0, now=0.0)
        >>> watch.awake_since(1.0), watch.awake_since(9.0), watch.look(9.0), watch.awake_since(10.0)
        (-inf, 9.0, False, 9.0)
        """
        return now if self._overslept(now) else self._woke

    def _overslept(self, now: float) -> bool:
        return now - self.now > 2 * self.interval

    def silent(self, heard: Mapping[K, float], now: float) -> list[K]:
        """Return the peers whose last message (or begin of absence) is longer ago than the timeout."""
        return [who for who, when in heard.items() if now - when > self.timeout]

    def too_few(self, here: int, needed: int, now: float) -> bool:
        """Whether there have been too few hosts for longer than the patience."""
        return self._shortage.lasts(here, needed, now)
