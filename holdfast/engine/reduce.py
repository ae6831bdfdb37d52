"""Sums a step's gradients over micro-batches and workers, while the backward pass still runs.

A bucket of gradients is summed by the workers that hold its layers. Each of them owns one slice of the bucket. Four
things happen, for all buckets at once:

1. Micro-batch after micro-batch, each worker adds up what it can on its own (``before``, ``after``).
2. During the last backward pass, as soon as a bucket's gradients are complete, the worker sends its partial sums, slice
   by slice, to the slices' owners (``gradient_ready``, ``flush``).
3. In a thread, each owner adds up its slice and sends the result to the others (``_finish_slices``).
4. ``finish`` waits for all of that and makes the sums the parameters' gradients.

That is the traffic of a ring all-reduce (and with Gloo quicker than one).

The mode ``exact`` adds along a fixed binary tree over the micro-batches, so that every layout gives the same bits: a
worker's partial sums are the largest whole subtrees in its share (``plan.tree.roots``). ``fast`` adds gradients in the
order in which they come, and then by rank: one partial sum for each worker.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.cluster import faults, tags
from holdfast.cluster.group import Group, Transfer
from holdfast.cluster.pulse import PULSE
from holdfast.engine.gradients import Bucket, Slab
from holdfast.plan.tree import Adder, Node, roots

TOTAL = tags.BUCKET_TAGS - 1  # the tag, within its bucket, of the finished slice
Item = tuple[int, list[Any], torch.Tensor | None]  # a bucket's position, the receives for it, and where they go


def slices(size: int, owners: int) -> list[slice]:
    """Return the part of a bucket that each of its ``owners`` owns.

    >>> slices(5, 2)
    [slice(0, 2, None), slice(2, 5, None)]
    """
    return [slice(size * rank // owners, size * (rank + 1) // owners) for rank in range(owners)]


class Reduction:
    """One attempt at summing the gradients of one step."""

    def __init__(
        self,
        buckets: list[Bucket],
        group: Group,
        shares: Sequence[range],
        *,
        exact: bool,
        summed: Callable[[Bucket], None] | None = None,
    ) -> None:
        """Begin an attempt.

        ``buckets`` are this worker's; ``shares`` are the micro-batches of each rank. ``exact`` selects the mode.
        ``summed`` is called, from the thread, with each bucket whose gradients have become the whole sum: so an update
        can begin before all sums are there.
        """
        self.buckets = buckets
        self.group = group
        self.exact = exact
        self.share = shares[group.rank]
        self._shares = shares
        self._leaves = max((share.stop for share in shares), default=0)  # micro-batches of the whole step
        self._roots = [roots(share, self._leaves) for share in shares]
        self._adders = [Adder(self._leaves_of(bucket), bucket.add) for bucket in buckets]
        self._open = False  # whether the parameters' gradients already hold a part of the next slab
        self._sums: list[Slab | None] = [None] * len(buckets)  # whole sums, of buckets that several ranks have
        self._summed = summed
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._stopping = False
        self._left = [len(bucket.parameters) for bucket in buckets]  # parameters whose last gradient is to come
        self._sent = 0  # buckets sent so far: they go in order
        self._thread: threading.Thread | None = None
        if summed is not None or any(len(bucket.ranks) > 1 for bucket in buckets):
            self._thread = threading.Thread(target=self._finish_slices, name="holdfast-reduce", daemon=True)
            self._thread.start()

    def _leaves_of(self, bucket: Bucket) -> int:
        """Leaves of the tree that a bucket is summed along: micro-batches, or in fast mode ranks."""
        return self._leaves if self.exact else len(bucket.ranks)

    def _nodes_of(self, bucket: Bucket, rank: int) -> list[Node]:
        """The tree's nodes that a rank has as partial sums: the roots of its share, or in fast mode one node."""
        if self.exact:
            return self._roots[rank]
        return [Node(0, bucket.ranks.index(rank))] if self._shares[rank] else []

    # --- while micro-batches are computed --------------------------------------------------------

    def before(self, index: int) -> None:
        """Prepare for the backward pass of micro-batch ``index``.

        Gradients are dropped unless it continues a sum: autograd then takes a new gradient instead of adding to it.
        """
        if not self._open:
            self._open = True
            for bucket in self.buckets:
                bucket.forget()

    def after(self, index: int) -> None:
        """Take the gradients of micro-batch ``index``, unless the next one will be added to them.

        Not called for the share's last one: its gradients are sent bucket by bucket.
        """
        if not self._continues(index):
            for position in range(len(self.buckets)):
                self._close(position, index)
            self._open = False

    def _continues(self, index: int) -> bool:
        """Return whether autograd itself may add the next micro-batch's gradients to those of this one.

        In exact mode it may if the two are a pair of the tree's leaves: autograd adds left + right, as the tree does.
        """
        return not self.exact or (index % 2 == 0 and index + 1 in self.share)

    def _close(self, position: int, index: int) -> None:
        """Push a bucket's present gradients into its tree: as a leaf, or as a pair that autograd has added up."""
        bucket = self.buckets[position]
        if not self.exact:
            node = Node(0, bucket.ranks.index(self.group.rank))
        elif index % 2 == 1 and index - 1 in self.share:
            node = Node(1, index // 2)
        else:
            node = Node(0, index)
        self._adders[position].push(node, bucket.gather())

    # --- during the last backward pass -----------------------------------------------------------

    def gradient_ready(self, position: int) -> None:
        """Note that one more parameter of a bucket has its gradient of the last micro-batch; send complete buckets."""
        self._left[position] -= 1
        while self._sent < len(self.buckets) and self._left[self._sent] == 0:
            self._send(self._sent)

    def flush(self) -> None:
        """Send the remaining buckets after the last backward pass: some of their parameters were not used in it."""
        while self._sent < len(self.buckets):
            self._send(self._sent)

    def _send(self, position: int) -> None:
        """Start to send a bucket's partial sums to the slices' owners, and to receive theirs of our slice."""
        self._sent += 1
        bucket = self.buckets[position]
        if self.share:
            self._close(position, self.share[-1])
        others = [rank for rank in bucket.ranks if rank != self.group.rank]
        if not others:
            if self._summed is not None:
                self._queue.put((position, [], None))
            return
        parts = dict(zip(bucket.ranks, slices(bucket.size, len(bucket.ranks)), strict=True))
        mine = parts[self.group.rank]
        width = mine.stop - mine.start
        foreign = [(rank, k) for rank in others for k in range(len(self._nodes_of(bucket, rank)))]
        room = bucket.receiving(width * len(foreign)).view(len(foreign), width)
        base = tags.BUCKETS + bucket.number * tags.BUCKET_TAGS
        receives = [(rank, room[i], base + k) for i, (rank, k) in enumerate(foreign) if width]
        stack = self._adders[position].stack
        stack[:] = [(node, bucket.flatten(slab)) for node, slab in stack]
        sends = [
            (rank, slab.flat[parts[rank]], base + k)
            for rank in others
            for k, (_, slab) in enumerate(stack)
            if parts[rank].stop > parts[rank].start
        ]
        self._queue.put((position, self.group.start(sends, receives), room))

    # --- in the thread: owners finish their slices -----------------------------------------------

    def _finish_slices(self) -> None:
        """Finish our slice of each bucket, then wait for the other slices. Runs until ``None`` comes from the queue."""
        coming: deque[tuple[int, list[Any]]] = deque()  # buckets whose other slices are on their way
        while (item := self._next(coming)) is not None:
            position, receives, room = item
            try:
                self.group.finish(receives)
                sums = [] if room is None else self.group.start(*self._finish_slice(position, room))
                coming.append((position, sums))
            except BaseException as e:  # raised again by ``finish``, in the training thread
                self._error = self._error or e  # go on with the rest: no receive may be left that still writes
        while coming and self._goes_on:
            self._complete(*coming.popleft())
        try:
            self.group.finish([work for _, sums in coming for work in sums])
        except BaseException as e:
            self._error = self._error or e

    def _next(self, coming: deque[tuple[int, list[Any]]]) -> Item | None:
        """Return the next bucket whose slice is ours to finish. While there is none, complete buckets.

        Our own slices come first because others wait for them.
        """
        while coming and self._goes_on and self._queue.empty():
            self._complete(*coming.popleft())
        return self._queue.get()

    @property
    def _goes_on(self) -> bool:
        """Whether buckets are completed one by one, for ``summed``. Nothing is begun after an error or ``stop``."""
        return self._summed is not None and self._error is None and not self._stopping

    def _complete(self, position: int, sums: list[Any]) -> None:
        """Wait for the other slices of a bucket, then attach its sum and tell ``summed``."""
        try:
            self.group.finish(sums)
            assert self._summed is not None
            self._attach(position)
            self._summed(self.buckets[position])
        except BaseException as e:
            self._error = self._error or e

    def _finish_slice(self, position: int, room: torch.Tensor) -> tuple[list[Transfer], list[Transfer]]:
        """Add up the slice that this worker owns; return the sends and receives that spread all slices."""
        bucket, rank = self.buckets[position], self.group.rank
        parts = dict(zip(bucket.ranks, slices(bucket.size, len(bucket.ranks)), strict=True))
        own = self._adders[position].stack
        adder: Adder[torch.Tensor] = Adder(self._leaves_of(bucket), torch.Tensor.add_)
        rows = iter(room)
        for owner in bucket.ranks:
            for k, node in enumerate(self._nodes_of(bucket, owner)):
                value = own[k][1].flat[parts[rank]] if owner == rank else next(rows)
                adder.push(node, value)
        total = own[0][1] if own else bucket.take()
        self._sums[position] = total
        # The other slices are received into the memory that we sent our partial sums of them from. That is safe: an
        # owner can only have finished its slice after our partial sum had arrived.
        assert not self.exact or len(adder.stack) == 1, (
            "the shares of a layer's holders are all micro-batches, in order"
        )
        result = _root(adder)
        if result.data_ptr() != total.flat[parts[rank]].data_ptr():
            total.flat[parts[rank]].copy_(result)
        tag = tags.BUCKETS + bucket.number * tags.BUCKET_TAGS + TOTAL
        others = [r for r in bucket.ranks if r != rank]
        filled = [r for r in others if parts[r].stop > parts[r].start]
        mine = parts[rank].stop > parts[rank].start
        sends = [(r, total.flat[parts[rank]], tag) for r in others if mine]
        return sends, [(r, total.flat[parts[r]], tag) for r in filled]

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the sums and make them the parameters' gradients. Raises what went wrong, such as ``Broken``."""
        faults.point("reduce")
        self._stop_thread()
        if self._error is not None:
            raise self._error
        for position in range(len(self.buckets)):
            self._attach(position)

    def _attach(self, position: int) -> None:
        self.buckets[position].attach(self._sums[position] or self._adders[position].stack[0][1])

    def stop(self) -> None:
        """Wait until nothing is written any more; what was not begun stays undone."""
        self._stopping = True
        self._stop_thread()

    def release(self) -> None:
        """Give the slabs back to the buckets, whether the attempt ended well or broke."""
        self.stop()
        for bucket, adder, total in zip(self.buckets, self._adders, self._sums, strict=True):
            if self._error is not None:  # a receive may still write: its memory must not be used again
                bucket.scratch = None
                bucket.forget()
                continue
            slabs = {id(slab): slab for _, slab in adder.stack}
            if total is not None:
                slabs[id(total)] = total
            bucket.free.extend(slab for slab in slabs.values() if slab.memory is not None)
            bucket.forget()

    def _stop_thread(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            with PULSE.at("helper"):
                self._thread.join()
            self._thread = None


def _root(adder: Adder[torch.Tensor]) -> torch.Tensor:
    """Return the whole sum. In exact mode one node is left; in fast mode ranks without micro-batches leave gaps."""
    _, total = adder.stack[0]
    for _, value in adder.stack[1:]:
        total.add_(value)
    return total
