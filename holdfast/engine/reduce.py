"""Sums a step's gradients over micro-batches and workers, while the backward pass still runs.

A bucket of gradients is summed by the workers that hold its layers. Three things happen, for all buckets at once:

1. Micro-batch after micro-batch, each worker adds up what it can on its own (``before``, ``after``).
2. During the last backward pass, as soon as a bucket's gradients are complete, the worker begins to exchange its
   partial sums with the other holders (``gradient_ready``, ``flush``). A thread carries the exchanges on
   (``exchanges``).
3. ``finish`` waits for all of them and makes the sums the parameters' gradients.

The mode ``exact`` adds along a fixed binary tree over the micro-batches, so that every layout gives the same bits: a
worker's partial sums are the largest whole subtrees in its share (``plan.tree.roots``). ``fast`` adds gradients in the
order in which they come, and then along a tree over the ranks: one partial sum for each worker.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.cluster import faults
from holdfast.cluster.group import Group
from holdfast.cluster.pulse import PULSE
from holdfast.cluster.talk import Spans, nodes_of
from holdfast.engine.exchanges import Course, Plan
from holdfast.engine.gradients import Bucket, Slab
from holdfast.plan.tree import Adder, Node

Item = tuple[int, Course | None, list[Any]]  # a bucket's position, its exchange, the receives it waits for


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
            self._thread = threading.Thread(target=self._carry_on, name="holdfast-reduce", daemon=True)
            self._thread.start()

    def _leaves_of(self, bucket: Bucket) -> int:
        """Leaves of the tree that a bucket is summed along: micro-batches, or in fast mode ranks."""
        return self._leaves if self.exact else len(bucket.ranks)

    def _plan(self, bucket: Bucket) -> Plan:
        leaves, spans = self._leaves_of(bucket), self._spans(bucket)
        return Plan(
            bucket=bucket,
            rank=self.group.rank,
            leaves=leaves,
            has_gaps=not self.exact,
            nodes_of=lambda first, stop: nodes_of(spans, leaves, first, stop),
        )

    def _spans(self, bucket: Bucket) -> Spans:
        """The leaves of each holder: its micro-batches, or in fast mode one leaf, if it has any."""
        shares = [self._shares[rank] for rank in bucket.ranks]
        if self.exact:
            return tuple((share.start, share.stop) for share in shares)
        return tuple((place, place + bool(share)) for place, share in enumerate(shares))

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
        """Begin to exchange a bucket's partial sums with its other holders."""
        self._sent += 1
        bucket = self.buckets[position]
        if self.share:
            self._close(position, self.share[-1])
        if len(bucket.ranks) == 1:
            if self._summed is not None:
                self._queue.put((position, None, []))
            return
        stack = self._adders[position].stack
        stack[:] = [(node, bucket.flatten(slab)) for node, slab in stack]
        course = Course(self._plan(bucket), list(stack))
        self._queue.put((position, course, self.group.start(*course.next())))

    # --- in the thread ---------------------------------------------------------------------------

    def _carry_on(self) -> None:
        """Carry the exchanges on, one after the other, until ``None`` comes from the queue; then complete all buckets.

        All workers go through their buckets in the same order, so nobody waits for somebody who waits for it. Only the
        last round of an exchange is not waited for at once: nothing that others need comes after it.
        """
        ending: deque[Item] = deque()  # exchanges whose last round is under way
        while (item := self._next(ending)) is not None:
            self._go_through(item, ending)
        while ending:
            self._complete(ending.popleft())

    def _next(self, ending: deque[Item]) -> Item | None:
        """Return the next bucket. While there is none, complete those whose updates may begin before all are there."""
        while ending and self._summed is not None and self._queue.empty():
            self._complete(ending.popleft())
        return self._queue.get()

    def _go_through(self, item: Item, ending: deque[Item]) -> None:
        """Do the rounds of an exchange, up to the begin of the last one."""
        position, course, works = item
        while course is not None and not course.is_last and self._finish(works):
            try:
                works = self.group.start(*course.next())
            except BaseException as e:  # raised again by ``finish``, in the training thread
                self._error = self._error or e
                return
        ending.append((position, course, works))

    def _finish(self, works: list[Any]) -> bool:
        """Wait for receives, even after an error: none may be left that still writes. Returns whether to go on."""
        try:
            self.group.finish(works)
        except BaseException as e:
            self._error = self._error or e
        return self._error is None and not self._stopping

    def _complete(self, item: Item) -> None:
        """Wait for the last round of a bucket's exchange. Tell ``summed`` that its gradients are the whole sum."""
        position, course, works = item
        if not self._finish(works):
            return
        try:
            if course is not None:
                self._sums[position] = course.total
            if self._summed is not None:
                self._attach(position)
                self._summed(self.buckets[position])
        except BaseException as e:
            self._error = self._error or e

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
