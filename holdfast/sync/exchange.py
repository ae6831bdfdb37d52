"""Exchanges between replicas: means of parameters, and sums of ballots.

All memory that travels belongs to the exchange, because training goes on beside it. No exchange waits for a send.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.cluster import tags
from holdfast.cluster.pulse import PULSE
from holdfast.sync.peers import Peers

BUCKET_BYTES = 4 * 2**20  # so that averaging one bucket overlaps with sending the next
CACHED = 2**15  # elements averaged at a time: they stay in the processor's cache, which is several times quicker


@dataclass
class _BucketExchange:
    """A part of a buffer, cut into one slice for each replica: its values here, and room for their means."""

    values: list[torch.Tensor]
    means: list[torch.Tensor]
    rows: list[torch.Tensor]  # all replicas' values of the slice that this replica averages
    receives: list[Any] = field(default_factory=list)


class Averaging:
    """The mean of all replicas' buffers, element by element, with the same bits everywhere. It starts at once.

    Each replica averages one slice of every bucket: it gets the others' values, takes their mean in the order of
    ranks, and sends that to all. It does so in a thread of its own (``beside``), or in ``finish``. The mean is
    x₀ + Σ share·(x − x₀), so that equal replicas stay exactly as they are. A replica without a share sends nothing, but
    gets the mean.

    ``buffers`` must not change until ``finish`` has returned, and the means not until the next vote of the peers. No
    vote may come between start and ``finish``: a vote is taken for a proof that all that was sent has arrived.
    """

    def __init__(
        self,
        peers: Peers,
        buffers: Sequence[torch.Tensor],
        shares: Sequence[float] | None = None,
        *,
        beside: bool = True,
    ) -> None:
        """``shares``: the weight of each replica, adding up to one; None: all the same."""
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
        """Whether ``finish`` would return at once."""
        return not self._left and (self._thread is None or not self._thread.is_alive())

    def finish(self) -> list[torch.Tensor]:
        """Return the means. Raise the error of the exchange, if there was one."""
        if self._left:
            self._left = False
            self._run()
        self._join()
        if self._error is not None:
            raise self._error
        return self._means

    def abandon(self) -> None:
        """Wait until the exchange has ended. It is for peers that broke: else ``finish`` waits."""
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            with PULSE.at("helper"):
                self._thread.join()
            self._thread = None

    # --- the exchange ----------------------------------------------------------------------------

    def _scatter(self, bucket: _BucketExchange) -> None:
        """Send each slice to the replica that averages it; receive the others' values of the own slice."""
        sends = []
        if self._shares[self._peers.rank]:
            sends = [(rank, bucket.values[rank], tags.AVERAGE) for rank in self._others]
        counted = [rank for rank in self._others if self._shares[rank]]
        bucket.receives = self._start(sends, [(rank, bucket.rows[rank], tags.AVERAGE) for rank in counted])

    def _run(self) -> None:
        try:
            self._peers.finish(self._steps())
        except BaseException as e:  # raised again where the training thread can act on it
            self._error = e

    def _steps(self) -> Iterator[Any]:
        """Yield all receives in order. After those of a bucket, average the own slice and send it on."""
        coming: list[Any] = []
        for bucket in self._buckets:
            yield from bucket.receives
            self._peers.check()  # after a failure the rest comes no more
            coming += self._spread(bucket)
        yield from coming

    def _spread(self, bucket: _BucketExchange) -> list[Any]:
        """Send the mean of the own slice to all, and start to receive the means of the other slices."""
        own = bucket.means[self._peers.rank]
        ranks = [rank for rank, share in enumerate(self._shares) if share]
        _mean([bucket.rows[rank] for rank in ranks], [self._shares[rank] for rank in ranks], own)
        sends = [(other, own, tags.MEAN) for other in self._others]
        return self._start(sends, [(other, bucket.means[other], tags.MEAN) for other in self._others])

    def _start(self, sends: list[Any], receives: list[Any]) -> list[Any]:
        """Start transfers, but not of empty slices, of which a tiny buffer has some."""
        sends = [transfer for transfer in sends if transfer[1].numel()]
        self.sent += sum(tensor.nbytes for _, tensor, _ in sends)
        return self._peers.start(sends, [transfer for transfer in receives if transfer[1].numel()])


def _cut(buffer: torch.Tensor, room: torch.Tensor, rank: int, size: int) -> Iterator[_BucketExchange]:
    """Yield the buckets of a buffer. ``room`` is for the means, and longer by ``size`` elements.

    Another replica's values of our slice are received into the place of the mean of *its* slice. That mean comes only
    after ours was taken, so the memory is free. All slices but the last ones have the same width, so the values fit.
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
        yield _BucketExchange([values[part] for part in parts], [here[part] for part in parts], rows)


def _mean(rows: Sequence[torch.Tensor], shares: Sequence[float], out: torch.Tensor) -> None:
    """Write x₀ + Σ share·(x − x₀) to ``out``, in the order of the rows. Products are rounded before they are added, so
    that all machines get the same bits.
    """
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
        if not math.isfinite(total.sum()):  # inf - inf is nan: masks keep their infinite numbers
            total = torch.where(torch.stack([row[here] == rows[0][here] for row in rows]).all(0), first, total)
        out[here] = total


@dataclass
class _Ballot:
    step: int
    mine: list[float]
    heard: torch.Tensor  # a row for each of the others
    receives: list[Any]


class Ballots:
    """Numbers that each replica sends to all others at a step. Each adds them up in the order of ranks.

    A ballot begins with the number of ballots that its sender has received in full. So the receiver knows which of its
    own ballots have arrived, and need not be kept any more.
    """

    def __init__(self, peers: Peers, tag: int = tags.BALLOT) -> None:
        self.sent = 0  # bytes
        self._peers = peers
        self._tag = tag
        self._others = [rank for rank in range(peers.size) if rank != peers.rank]
        self._open: deque[_Ballot] = deque()
        self._heard = 0
        self._kept: deque[Any] = deque()  # sends of each ballot from number ``_arrived`` on
        self._arrived = 0

    def cast(self, step: int, numbers: Sequence[float]) -> None:
        """Send this replica's numbers to all others, without waiting."""
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
        """The first step whose ballots were not added up yet; None: there is none."""
        return self._open[0].step if self._open else None

    @property
    def replicas(self) -> int:
        return self._peers.size

    def sums(self, step: int) -> list[float]:
        """Return the sums of all replicas' numbers of ``step``, which must be ``oldest``. Wait for them."""
        ballot = self._hear()
        assert ballot.step == step, f"ballots of step {ballot.step} come before those of step {step}"
        rows: list[list[float]] = ballot.heard[:, 1:].tolist()
        rows.insert(self._peers.rank, ballot.mine)
        total = rows[0]
        for row in rows[1:]:  # not sum(): how that rounds depends on the version of Python
            total = [a + b for a, b in zip(total, row, strict=True)]
        return total

    def drop(self) -> None:
        """Receive all open ballots and forget them. All replicas do that at the same step."""
        while self._open:
            self._hear()
        while self._kept:  # no later ballot may come that proves their arrival
            self._peers.keep(self._kept.popleft())
            self._arrived += 1

    def abandon(self) -> None:
        """Forget all open ballots, because the peers broke. That cancels their receives."""
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
