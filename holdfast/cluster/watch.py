"""Notices what no closed connection tells: silence, absence, too few hosts, workers at cross purposes."""

from __future__ import annotations

import asyncio
import time

from holdfast.cluster import compose
from holdfast.cluster.roster import Roster


class Watch:
    """Looks at the roster several times within a heartbeat timeout."""

    def __init__(self, roster: Roster, *, heartbeat_timeout: float, patience: float) -> None:
        self._roster = roster
        self._timeout = heartbeat_timeout
        self._interval = heartbeat_timeout / 5
        self._patience = patience
        self._awake = time.monotonic()
        self._dazed_until = 0.0
        self._few_since: float | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        slept = now - self._awake > 2 * self._interval
        self._awake = now
        for peer in self._roster.everybody():
            peer.send({"type": "beat"})
            if slept:  # we were asleep ourselves: nobody's silence counts
                peer.heard = now
        if slept:
            self._dazed_until = now + self._timeout
            return
        self._look_for_silence(now)
        self._look_for_absence(now)
        self._look_for_hosts(now)
        self._look_for_disagreement()
        self._roster.advance()  # some decisions wait for time to pass

    def disconnected(self, name: str) -> None:
        """A closed connection is a death, unless we were the one who did not answer."""
        now = time.monotonic()
        if now < self._dazed_until or now - self._awake > 2 * self._interval:
            del self._roster.workers[name]
            self._roster.absent[name] = now
        else:
            self._roster.worker_gone(name, "connection lost")

    def _look_for_silence(self, now: float) -> None:
        cause = f"no heartbeat for {self._timeout:g} s"
        for name, worker in list(self._roster.workers.items()):
            if now - worker.heard > self._timeout:
                worker.writer.transport.abort()
                self._give_up(name, cause)
        for number, host in list(self._roster.hosts.items()):
            if now - host.heard > self._timeout:
                host.writer.transport.abort()
                self._roster.host_gone(number, cause)

    def _look_for_absence(self, now: float) -> None:
        for name, since in list(self._roster.absent.items()):
            if now - since > self._timeout:
                self._give_up(name, "did not come back to the coordinator")

    def _give_up(self, name: str, cause: str) -> None:
        for host in self._roster.hosts.values():  # a hung process would come back to life later
            host.send({"type": "kill", "worker": name})
        self._roster.worker_gone(name, cause)

    def _look_for_hosts(self, now: float) -> None:
        here, needed = len(self._roster.hosts), self._roster.minimum_hosts
        few = here < needed and not (here and self._roster.finishing)
        self._few_since = (self._few_since or now) if few else None
        if self._few_since is not None and now - self._few_since > self._patience:
            text = f"{here} of at least {needed} hosts for {self._patience:g} s"
            self._roster.stop(3, f"too few workers: {text} (start more agents, or lower --nnodes)")

    def _look_for_disagreement(self) -> None:
        workers = self._roster.workers
        doings = {n: d for n in self._roster.members if n in workers and (d := workers[n].doing) is not None}
        if (text := compose.disagreement(doings)) is not None:
            self._roster.stop(2, text)
