"""The feed: follows the files of several runs in a thread, and has the newest picture of each ready for viewers.

A picture is encoded once, however many look at it. A viewer that is slow misses pictures in between, and costs nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.watch.reader import Reader

POLL_SECONDS = 0.5  # between two looks at the files, and two pictures: more costs more, and nobody sees it
TOLD = 200  # moments that a page is told of: the last ones

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What a page is told of a run: ``number`` grows with each; ``view`` and ``curves`` are JSON."""

    number: int
    view: str
    curves: str


class Feed:
    """Follows runs by name. ``actions``: pages may offer to disturb them.

    All work on a run is done in one thread, so it needs no locks, and the server answers meanwhile.
    """

    def __init__(self, readers: Mapping[str, Reader], *, actions: bool = False) -> None:
        self._readers, self._actions = dict(readers), actions
        self._numbers = dict.fromkeys(readers, 0)  # of the newest picture, drawn or not
        self._pictures: dict[str, Picture] = {}  # the last ones that were drawn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-watch")
        self._news = asyncio.Condition()
        self.is_over = False  # viewers are to go

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return list(self._readers)

    async def follow(self) -> None:
        """Read what is new, for ever."""
        while True:
            for name in self._readers:
                await self.look(name)
            more = any(reader.more for reader in self._readers.values())
            await asyncio.sleep(0.0 if more else POLL_SECONDS)

    async def look(self, name: str) -> None:
        """Read a bounded part of a run's news, and wake those who wait for them."""
        news = await self.ask(name, lambda reader: reader.read())
        if news or not self._numbers[name]:
            async with self._news:
                self._numbers[name] += 1
                self._news.notify_all()

    def _picture(self, name: str) -> Picture:
        """Return the newest picture. It is drawn when somebody looks: without viewers nothing is."""
        reader, number = self._readers[name], self._numbers[name]
        known = self._pictures.get(name)
        if known is None or known.number < number:
            curves = {key: curve.to_json() for key, curve in reader.fold.curves.items()}
            view = dumps(self._told(name, reader))
            known = Picture(number=number, view=view, curves=dumps({**curves, "clock": reader.fold.clock.to_json()}))
            self._pictures[name] = known
        return known

    def _told(self, name: str, reader: Reader) -> dict[str, Any]:
        moments = [vars(moment) for moment in reader.fold.moments[-TOLD:]]
        facts = {"run": name, "runs": self.names, "share": round(reader.share, 3), "actions": self._actions}
        return {**facts, "moments": moments, **reader.fold.view().to_json()}

    async def next(self, name: str, seen: int, *, seconds: float) -> Picture | None:
        """Return the newest picture of a run that is newer than ``seen``; None if there is none for so long."""
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: self._numbers[name] > seen or self.is_over)
        except TimeoutError:
            return None
        return await self._in_thread(lambda: self._picture(name)) if self._numbers[name] > seen else None

    async def past(self, name: str, t: float) -> str:
        """Return the view that a run had at a time, as JSON."""
        return await self.ask(name, lambda reader: dumps(reader.fold.at(t).view().to_json()))

    async def ask(self, name: str, question: Callable[[Reader], T]) -> T:
        """Return what a function says of a run's reader, while nobody reads. Raises ``KeyError``."""
        reader = self._readers[name]
        return await self._in_thread(lambda: question(reader))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def end(self) -> None:
        """Let all viewers go, after the pictures that there are."""
        async with self._news:
            self.is_over = True
            self._news.notify_all()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def dumps(value: Any) -> str:
    """Return JSON that browsers read: without NaN, which the fold never has."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
