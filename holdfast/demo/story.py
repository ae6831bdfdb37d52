"""The story of a run: its events and the demo's own kills, put together and told in sentences."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.demo.places import Arrangement
from holdfast.words import size_text

Event = dict[str, Any]


@dataclass(kw_only=True)
class Death:
    """A worker that the demo has killed, and the recovery from it."""

    worker: str
    step: int  # the step that was under way
    at: float  # time.time() just before os.kill
    noticed_ms: float | None = None
    generation: int | None = None  # the first one without the dead worker
    recovered_ms: float | None = None


@dataclass(kw_only=True)
class Syncs:
    """The synchronisations so far of replicas that train apart."""

    number: int = 0
    sent: dict[str, int] = field(default_factory=dict)  # bytes, of each worker
    distance: float = 0.0  # between replicas, before the last synchronisation
    lssr: float = 0.0  # the share of steps without an exchange

    def hear(self, event: Event) -> None:
        self.number = max(self.number, event["number"])
        self.sent[event["worker"]] = event["total"]
        self.distance = event["distance"] or 0.0
        self.lssr = event["lssr"]

    def text(self, step: int) -> str:
        """Return the synchronisations in words.

        >>> Syncs(number=2, sent={"0.0": 3_000_000}, distance=0.25, lssr=0.9).text(20)
        'synchronised 2 times in 20 steps (LSSR 0.90), 3 MB sent, replicas 0.25 apart'
        """
        sent, apart = size_text(sum(self.sent.values())), f"replicas {self.distance:.2f} apart"
        return f"synchronised {self.number} times in {step} steps (LSSR {self.lssr:.2f}), {sent} sent, {apart}"


@dataclass(kw_only=True)
class Story:
    """The state of one run, from its events in order. ``hear`` returns a sentence if an event is worth telling.

    >>> story = Story(steps=2)
    >>> story.hear({"event": "generation", "t": 1.0, "number": 1, "workers": ["0.0", "0.1"]})
    '2 workers train together: 0.0, 0.1'
    >>> story.hear({"event": "commit", "t": 2.0, "worker": "0.1", "step": 0, "loss": 5.5, "generation": 1})
    >>> story.step, story.loss
    (1, 5.5)
    """

    steps: int
    by_hand: bool = False  # it is somebody else who kills
    generation: int = 0
    members: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)  # when each step was first committed
    deaths: list[Death] = field(default_factory=list)
    arrangements: list[Arrangement] = field(default_factory=list)  # of each generation that got to training
    coming: Arrangement | None = None  # of the generation that is being entered
    over: str = ""  # why the run was stopped, if it was
    syncs: Syncs | None = None  # where replicas do not talk at every step

    @property
    def step(self) -> int:
        """The step under way: how many are committed."""
        return len(self.losses)

    @property
    def loss(self) -> float | None:
        return self.losses.get(self.step - 1)

    @property
    def recovering(self) -> bool:
        return any(death.recovered_ms is None for death in self.deaths)

    @property
    def recoveries_ms(self) -> list[float]:
        return [death.recovered_ms for death in self.deaths if death.recovered_ms is not None]

    @property
    def step_seconds(self) -> float:
        return median_gap(list(self.times.values()))

    @property
    def survives_a_loss(self) -> bool:
        """Whether any worker may be lost now, as far as is known."""
        if self.coming is not None:
            return False
        return not self.arrangements or self.arrangements[-1].survives_a_loss

    def hear(self, event: Event) -> str | None:
        """Take in an event; return a sentence about it, or None."""
        hearers: dict[str, Callable[[Event], str | None]] = {
            "generation": self._generation,
            "failure": self._failure,
            "layout": self._place,
            "entered": self._place,
            "commit": self._commit,
            "stop": self._stop,
            "sync": self._sync,
        }
        hearer = hearers.get(event["event"])
        return None if hearer is None else hearer(event)

    def killed(self, worker: str, at: float) -> str:
        """Note a kill at the time ``at``, and return a sentence about it."""
        self.deaths.append(Death(worker=worker, step=self.step, at=at))
        return f"kill -9: worker {worker} dies in step {self.step}"

    def _generation(self, event: Event) -> str | None:
        before, self.members = self.members, list(event["workers"])
        self.generation = event["number"]
        self.coming = Arrangement(workers=self.members, generation=self.generation, step=self.step)
        for death in self.deaths:
            if death.generation is None and death.worker not in self.members:
                death.generation = self.generation
        joined = [worker for worker in self.members if worker not in before]
        if not joined:
            return None
        if not before:
            together = f"{len(joined)} workers train together" if len(joined) > 1 else "one worker trains alone"
            return f"{together}: {', '.join(joined)}"
        return f"worker {', '.join(joined)} joins: {len(self.members)} workers from step {self.step} on"

    def _place(self, event: Event) -> str | None:
        """Note a place; once all are known, return them in a sentence if the model is cut."""
        coming = self.coming
        if coming is None:
            return None
        coming.hear(event)
        if not coming.is_complete:
            return None
        self.coming = None
        self.arrangements.append(coming)
        return coming.text if coming.is_cut else None

    def _failure(self, event: Event) -> str | None:
        for death in self.deaths:
            if death.worker == event["worker"] and death.noticed_ms is None:
                death.noticed_ms = 1000 * (event["t"] - death.at)
                return None
        if self.by_hand:  # when it was killed nobody has noted: the recovery is timed from the notice
            self.killed(event["worker"], event["t"])
            self.deaths[-1].noticed_ms = 0.0
            return f"worker {event['worker']} is lost: {event['cause']}"
        return f"worker {event['worker']} is lost, and not by the demo: {event['cause']}"

    def _commit(self, event: Event) -> str | None:
        self.losses.setdefault(event["step"], event["loss"])
        self.times.setdefault(event["step"], event["t"])
        # A recovery is timed from just before os.kill to the first commit of a survivor in the first
        # generation without the dead worker: it has the detection, the regrouping and the redone step in
        # it. Commits of the old generation that were under way at the kill do not count.
        for death in self.deaths:
            if death.recovered_ms is None and death.generation and event["generation"] >= death.generation:
                death.recovered_ms = 1000 * (event["t"] - death.at)
                count = len(self.members)
                left = f"{count} survivors commit" if count > 1 else "the survivor commits"
                return f"{left} step {event['step']} {death.recovered_ms:.0f} ms after the kill"
        return None

    def _sync(self, event: Event) -> None:
        self.syncs = self.syncs or Syncs()
        self.syncs.hear(event)

    def _stop(self, event: Event) -> None:
        self.over = event["message"]


def median_gap(times: Sequence[float]) -> float:
    """Return the median seconds between one moment and the next.

    >>> median_gap([1.0, 2.0, 3.0, 7.0])
    1.0
    """
    gaps = [after - before for before, after in pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


class Tail:
    """Reader of the lines that were appended to a file of JSON lines since the last ``read``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]
