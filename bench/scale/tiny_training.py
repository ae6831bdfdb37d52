"""The training of ``bench scale``: a tiny model, and a line of counts for each generation and worker.

No worker makes its ``Run`` before the bench opens the gate, so that the bench can see what the first group costs.

Counts are taken around the product's own functions; nothing else of them is changed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast.cluster import wire
from holdfast.cluster.group import Group
from holdfast.cluster.membership import Generation, Standing
from holdfast.cluster.seat import News, Seat
from holdfast.commit.cohort import Cohort

COUNTED_VOTE = 2  # of a generation; by then all connections are made
GATE = "gate"  # a named pipe in the folder for counts: to open it takes until the bench has opened its other end
PAUSE_SECONDS = 0.02  # in each step: a worker is nearly always killed in it


class Counts:
    """Counts what this worker sends, and what it is told, from one generation to the next."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"counts-{os.environ['HOLDFAST_WORKER']}.jsonl"
        self._talk = [0, 0]  # messages and bytes to and from the coordinator, since the last generation began
        self._formed = [0, 0]  # messages and bytes that have formed the group
        self._votes = 0

    def install(self) -> None:
        """Count in the functions that show a standing, hear of a generation, enter it and vote."""
        self._count_talk()
        enter, vote = Cohort._enter, Group.vote

        def counted_enter(cohort: Cohort, generation: Generation) -> None:
            enter(cohort, generation)
            assert cohort.group is not None
            self._formed = [self._talk[0] + cohort.group.messages, self._talk[1] + cohort.group.bytes]
            self._talk, self._votes = [0, 0], 0

        def counted_vote(group: Group, *arguments: Any) -> list[float]:
            before = (group.messages, group.bytes)
            sums = vote(group, *arguments)
            self._votes += 1
            if self._votes == COUNTED_VOTE:
                self._write(group, group.messages - before[0], group.bytes - before[1])
            return sums

        Cohort._enter, Group.vote = counted_enter, counted_vote  # type: ignore[method-assign, assignment]

    def _count_talk(self) -> None:
        """Count the standing that this worker shows, and the generation that answers it."""
        show, hear = Seat.show, Seat.hear

        def counted_show(seat: Seat, standing: Standing) -> wire.Message:
            message = show(seat, standing)
            self._count(message)
            return message

        def counted_hear(seat: Seat, message: wire.Message) -> News | None:
            if message["type"] == "generation":
                self._count(message)
            return hear(seat, message)

        Seat.show, Seat.hear = counted_show, counted_hear  # type: ignore[method-assign, assignment]

    def _count(self, message: wire.Message) -> None:
        self._talk[0] += 1
        self._talk[1] += len(wire.encode(message))

    def _write(self, group: Group, messages: int, size: int) -> None:
        links = group._backend
        line = {"generation": group.generation.number, "workers": group.size, "connections": links.connected}
        line |= {"vote_messages": messages, "vote_bytes": size}
        line |= {"group_messages": self._formed[0], "group_bytes": self._formed[1] + links.greeting_bytes}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train until somebody ends it. Arguments: the folder for counts, and the number of micro-batches."""
    folder, micro_batches = Path(sys.argv[1]), int(sys.argv[2])
    Counts(folder).install()
    (folder / GATE).open("rb").close()
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    run = holdfast.Run(
        layers=torch.nn.Linear(4, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=TensorDataset(x, x.sum(1, True)),
        global_batch=micro_batches,
        micro_batch=1,
    )
    for _ in run.steps(1_000_000):
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
