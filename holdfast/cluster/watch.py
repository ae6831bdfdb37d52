"""Notices what no closed connection tells: silence, and too few hosts. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

LOOKS = 5  # how often the coordinator looks within one heartbeat timeout, and sends beats of its own


@dataclass(kw_only=True)
class Watch:
    """Who has been silent for too long, as far as the watcher itself was awake.

    A coordinator whose process was stopped hears nothing and misses its own looks. What it finds when it wakes up
    says nothing about the others, so for one more timeout a lost connection is not taken for a death.

    >>> watch = Watch(timeout=5.0, patience=30.0, now=0.0)
    >>> watch.look(1.0), watch.silent({"0.0": 0.5, "0.1": -4.5}, 1.0)
    (True, ['0.1'])
    """

    timeout: float  # seconds of silence after which a peer counts as lost
    patience: float  # seconds to wait for missing hosts
    now: float  # when the last look was

    def __post_init__(self) -> None:
        self._dazed_until = self.now
        self._few_since: float | None = None

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return self.timeout / LOOKS

    @property
    def deadline(self) -> float:
        """When the next look is due."""
        return self.now + self.interval

    def look(self, now: float) -> bool:
        """Note a look; False if we were asleep ourselves before it: then nobody's silence counts."""
        slept = self._overslept(now)
        self.now = now
        if slept:
            self._dazed_until = now + self.timeout
        return not slept

    def is_dazed(self, now: float) -> bool:
        """Whether a closed connection may be our own doing: we did not answer."""
        return now < self._dazed_until or self._overslept(now)

    def _overslept(self, now: float) -> bool:
        return now - self.now > 2 * self.interval

    def silent(self, heard: Mapping[K, float], now: float) -> list[K]:
        """Return those whose last word, or begin of absence, is longer ago than the timeout."""
        return [who for who, when in heard.items() if now - when > self.timeout]

    def too_few(self, here: int, needed: int, now: float) -> bool:
        """Whether there have been too few hosts for longer than the patience."""
        self._few_since = None if here >= needed else self.now if self._few_since is None else self._few_since
        return self._few_since is not None and now - self._few_since > self.patience
