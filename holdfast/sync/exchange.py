"""What replicas exchange: parameters, of which they take the mean, and ballots, which they add up.

All memory that travels belongs to the exchange: training goes on beside it. Nobody waits for a send.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.sync.peers import AVERAGE_TAG, BALLOT_TAG, MEAN_TAG, Peers

BUCKET_BYTES = 4 * 2**20  # what is averaged in one go: adding one bucket up overlaps with sending the next
CACHED = 2**15  # elements that are averaged while they are in the cache: several times quicker than all at once


@dataclass
class _Bucket:
    """A part of a buffer: what each owner has of it here, and where their means go."""

    values: list[torch.Tensor]
    means: list[torch.Tensor]
    rows: list[torch.Tensor]  # everybody's values of this replica's slice
    receives: list[Any] = field(default_factory=list)


class Averaging:
    """The mean of everybody's buffers, element by element, the same bits everywhere. It starts at once.

    Each replica owns a slice of every bucket: it gets the others' values of it, takes their mean in the order of
    ranks, and sends that to all: in a thread beside whatever the caller does, or, if that is only to wait, in
    ``finish``. The mean is x₀ + Σ share·(x − x₀), so that replicas which are equal stay exactly as they are. Who has
    no share sends nothing, but gets the mean.

    ``buffers`` must stay as they are until ``finish``; what it returns must until the peers' next vote. No vote may
    come between: it would be taken for a proof that all has arrived.
    """

    def __init__(
        self,
        peers: Peers,
        buffers: Sequence[torch.Tensor],
        shares: Sequence[float] | None = None,
        *,
        beside: bool = True,
    ) -> None:
        """``shares``: how much each replica counts, adding up to one; None: all the same."""
        self.sent = 0  # bytes
        self._peers = peers
        self._shares = list(shares) if shares is not None else [1 / peers.size] * peers.size
        assert len(self._shares) == peers.size, "one share for each replica"
        assert any(self._shares), "somebody must count"
        self._others = [rank for rank in range(peers.size) if rank != peers.rank]
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._left = bool(self._others)  # whether ``finish`` has something to do itself
        if not self._others:
            self._means = [buffer.clone() for buffer in buffers]
            return
        memory = [torch.empty(len(b) + peers.size, dtype=b.dtype, device=b.device) for b in buffers]
        self._means = [room[: len(buffer)] for room, buffer in zip(memory, buffers, strict=True)]
        self._buckets = [
            bucket
            for buffer, room in zip(buffers, memory, strict=True)
            for bucket in _cut(buffer, room, peers.rank, peers.size)
        ]
        for bucket in self._buckets:
            self._scatter(bucket)
        if beside:
            self._left = False
            self._thread = threading.Thread(target=self._run, name="holdfast-average", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether ``finish`` would not have to wait."""
        return not self._left and (self._thread is None or not self._thread.is_alive())

    def finish(self) -> list[torch.Tensor]:
        """The means. Raises what went wrong in the exchange."""
        if self._left:
            self._left = False
            self._run()
        self._join()
        if self._error is not None:
            raise self._error
        return self._means

    def abandon(self) -> None:
        """After the peers broke: returns when the exchange has ended too."""
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- the exchange ----------------------------------------------------------------------------

    def _scatter(self, bucket: _Bucket) -> None:
        """Everybody's values go to who owns them."""
        sends = []
        if self._shares[self._peers.rank]:
            sends = [(rank, bucket.values[rank], AVERAGE_TAG) for rank in self._others]
        counted = [rank for rank in self._others if self._shares[rank]]
        bucket.receives = self._start(sends, [(rank, bucket.rows[rank], AVERAGE_TAG) for rank in counted])

    def _run(self) -> None:
        try:
            self._peers.finish(self._steps())
        except BaseException as e:  # raised again where the training thread can act on it
            self._error = e

    def _steps(self) -> Iterator[Any]:
        """Goes through all that is received; between two buckets, what has come is averaged and sent on."""
        coming: list[Any] = []
        for bucket in self._buckets:
            yield from bucket.receives
            self._peers.check()  # after a failure the rest comes no more
            coming += self._spread(bucket)
        yield from coming

    def _spread(self, bucket: _Bucket) -> list[Any]:
        """The mean of the slice that this replica owns goes to all; those of the others come."""
        own = bucket.means[self._peers.rank]
        ranks = [rank for rank, share in enumerate(self._shares) if share]
        _mean([bucket.rows[rank] for rank in ranks], [self._shares[rank] for rank in ranks], own)
        sends = [(other, own, MEAN_TAG) for other in self._others]
        return self._start(sends, [(other, bucket.means[other], MEAN_TAG) for other in self._others])

    def _start(self, sends: list[Any], receives: list[Any]) -> list[Any]:
        """Nothing need be sent of an empty slice, of which there are some if a buffer is tiny."""
        sends = [transfer for transfer in sends if transfer[1].numel()]
        self.sent += sum(tensor.nbytes for _, tensor, _ in sends)
        return self._peers.start(sends, [transfer for transfer in receives if transfer[1].numel()])


def _cut(buffer: torch.Tensor, room: torch.Tensor, rank: int, size: int) -> Iterator[_Bucket]:
    """The buckets of a buffer. ``room`` is for the means, and longer by ``size`` elements.

    What another sends of our slice is put where its mean will be, which comes only when ours has been taken. That
    fits, for all slices but the last ones are as wide.
    """
    most = max(BUCKET_BYTES // buffer.element_size() // size, 1) * size
    for start in range(0, len(buffer), most):
        values = buffer[start : start + most]
        width = -(-len(values) // size)
        parts = [slice(min(width * r, len(values)), min(width * (r + 1), len(values))) for r in range(size)]
        own = parts[rank]
        here = room[start:]
        rows = [here[width * r : width * r + own.stop - own.start] for r in range(size)]
        rows[rank] = values[own]
        yield _Bucket([values[part] for part in parts], [here[part] for part in parts], rows)


def _mean(rows: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor) -> None:
    """x₀ + Σ share·(x − x₀) in the order given. Products are rounded before they are added, whatever the machine."""
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    scratch = torch.empty(2, min(CACHED, out.numel()), dtype=wide, device=out.device)
    for start in range(0, out.numel(), CACHED):
        here = slice(start, min(start + CACHED, out.numel()))
        total, change = scratch[:, : here.stop - start]
        first, *others = (row[here].to(wide) for row in rows)
        total.copy_(first)
        for other, share in zip(others, shares[1:], strict=True):
            torch.sub(other, first, out=change)
            total.add_(change.mul_(share))
        if not math.isfinite(total.sum()):  # a mask has infinite numbers, which have no difference from themselves
            total = torch.where(torch.stack([row[here] == rows[0][here] for row in rows]).all(0), first, total)
        out[here] = total


@dataclass
class _Ballot:
    step: int
    mine: list[float]
    heard: torch.Tensor  # a row for each of the others
    receives: list[Any]


class Ballots:
    """Numbers that each replica tells all others at a step, and that each adds up in the order of ranks.

    A ballot begins with how many its sender has heard out, which proves that those sent to it have arrived.
    """

    def __init__(self, peers: Peers, tag: int = BALLOT_TAG) -> None:
        self.sent = 0  # bytes
        self._peers = peers
        self._tag = tag
        self._others = [rank for rank in range(peers.size) if rank != peers.rank]
        self._open: deque[_Ballot] = deque()
        self._heard = 0
        self._kept: deque[Any] = deque()  # the works of each cast from number ``_arrived`` on
        self._arrived = 0

    def cast(self, step: int, numbers: Sequence[float]) -> None:
        """Sends this replica's numbers and goes on."""
        mine = torch.tensor([self._heard, *numbers], dtype=torch.float64)
        heard = torch.empty(len(self._others), len(mine), dtype=torch.float64)
        receives = self._peers.start(
            [], [(rank, row, self._tag) for rank, row in zip(self._others, heard, strict=True)]
        )
        self._kept.append(self._peers.send([(rank, mine, self._tag) for rank in self._others]))
        self._open.append(_Ballot(step, list(numbers), heard, receives))
        self.sent += mine.nbytes * len(self._others)

    @property
    def oldest(self) -> int | None:
        """The first step whose ballots are under way."""
        return self._open[0].step if self._open else None

    @property
    def replicas(self) -> int:
        return self._peers.size

    def sums(self, step: int) -> list[float]:
        """Everybody's numbers of that step, the oldest whose sums were not asked for yet, added up."""
        ballot = self._hear()
        assert ballot.step == step, f"ballots of step {ballot.step} come before those of step {step}"
        rows: list[list[float]] = ballot.heard[:, 1:].tolist()
        rows.insert(self._peers.rank, ballot.mine)
        total = rows[0]
        for row in rows[1:]:  # not sum(): how that rounds depends on the version of Python
            total = [a + b for a, b in zip(total, row, strict=True)]
        return total

    def drop(self) -> None:
        """Receives the ballots that are under way, for nothing. All replicas do that at the same step."""
        while self._open:
            self._hear()
        while self._kept:  # there may be no later ballot
            self._peers.keep(self._kept.popleft())
            self._arrived += 1

    def abandon(self) -> None:
        """After the peers broke: forgets all that is under way. Whoever forgets a receive cancels it."""
        self._open.clear()
        self._kept.clear()

    def _hear(self) -> _Ballot:
        ballot = self._open.popleft()
        self._peers.finish(ballot.receives)
        self._heard += 1
        arrived = int(ballot.heard[:, 0].min()) if self._others else self._heard
        while self._kept and self._arrived < arrived:
            self._kept.popleft()
            self._arrived += 1
        return ballot
