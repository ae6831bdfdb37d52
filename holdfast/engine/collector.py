"""Hands the gradients that a backward pass makes to their reduction, each as soon as it is whole."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from holdfast.engine.boundary import unshared
from holdfast.engine.model import LayeredModel
from holdfast.engine.reduce import Reduction
from holdfast.engine.shards import local, split_as
from holdfast.errors import Broken, UsageError


class Collector:
    """Listens to all trained parameters of a model, and tells a reduction when their gradients are there.

    Outside of ``begin`` and ``end`` nothing is collected.
    """

    def __init__(self, model: LayeredModel) -> None:
        self.reduction: Reduction | None = None
        self._position: dict[int, int] = {}  # id of a parameter → the position of its bucket
        self._last = False  # whether the current micro-batch is the last one of this worker's share
        self._ready: set[int] = set()  # ids of parameters whose gradient of the current micro-batch is there
        self.seen: set[int] = set()  # ids of parameters that have got a gradient in this attempt
        self._slices = Slices()  # of memory that gradients of the current micro-batch have
        self._passing = True  # a gradient that comes now is one of a backward pass of the step
        # Python's collector does not see through such hooks: one that kept this object would keep the run for ever.
        this = weakref.ref(self)
        for layer in model.layers:
            for p in layer.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(_tell, this))  # type: ignore[no-untyped-call]

    def begin(self, reduction: Reduction) -> None:
        """Collect for this reduction from now on."""
        self.reduction, self._passing = reduction, True
        self.seen.clear()
        buckets = enumerate(reduction.buckets)
        self._position = {id(p): place for place, bucket in buckets for p in bucket.parameters}

    def micro_batch(self, *, last: bool) -> None:
        """Prepare for the backward pass of the next micro-batch. With the ``last`` one, sums are complete."""
        self._last, self._passing = last, True
        self._ready.clear()
        self._slices = Slices()

    def between(self) -> None:
        """Refuse gradients until the next ``micro_batch``: none of the step's backward passes runs."""
        self._passing = False

    def stop(self) -> None:
        """Stop the reduction; its gradients stay."""
        if self.reduction is not None:
            self.reduction.stop()

    def end(self) -> None:
        """End the reduction and give up its gradients, whether it ended well or broke."""
        reduction, self.reduction = self.reduction, None
        if reduction is not None:
            reduction.release()

    def _gradient_ready(self, p: torch.Tensor) -> None:
        """Called by autograd when a parameter has its gradient. Raises out of the backward pass what is wrong."""
        reduction = self.reduction
        if reduction is None:
            return
        if not self._passing:
            raise UsageError(
                "a backward pass ran beside that of the step: its gradients would be counted on some workers only",
                hint="add the losses up, and step.backward(loss) once for each batch, in place of loss.backward()",
            )
        if reduction.group.team.size == 1:  # ranks of a team compute to the end of the pass: their mates do
            reduction.group.check()  # raises ``Broken`` when the generation is over: no need to compute the rest
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise UsageError("a sparse gradient cannot be summed with others'", hint="nn.Embedding(…, sparse=False)")
        if id(p) in self._ready:
            raise UsageError(
                "a parameter gets its gradient in several parts within one backward pass",
                hint="torch.utils.checkpoint with use_reentrant=False gives it whole",
            )
        if p.grad is not None and not (isinstance(p.grad, DTensor) and self._slices.take(local(p.grad))):
            p.grad = _unshared(p.grad)
        self._ready.add(id(p))
        self.seen.add(id(p))
        if self._last:
            try:
                reduction.gradient_ready(self._position[id(p)])
            except Broken:  # it is raised again at the end of the passes
                if reduction.group.team.size == 1:
                    raise


def _tell(collector: weakref.ref[Collector], p: torch.Tensor) -> None:
    """Tell a collector of a gradient, if it is still there."""
    listener = collector()
    if listener is not None:
        listener._gradient_ready(p)


def _unshared(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in memory of its own, as ``unshared`` does, also of a tensor that a team has split."""
    part = local(gradient)
    mine = unshared(part)
    return gradient if mine is part or mine is None else split_as(mine, gradient)


class Slices:
    """Memory that gradients of one backward pass have. Several may have one storage, if each has a slice to itself.

    FSDP2 puts the gradients of a module one behind the other into one buffer, and to copy each of them costs time.

    >>> memory, slices = torch.zeros(8), Slices()
    >>> slices.take(memory[:4]), slices.take(memory[4:]), slices.take(memory[3:5])
    (True, True, False)
    """

    def __init__(self) -> None:
        self._taken: dict[int, tuple[int, int]] = {}  # storage → its first and last address that are taken

    def take(self, gradient: torch.Tensor) -> bool:
        """Take a gradient's memory; return False if another one may have some of it, or it is not in one piece."""
        if not gradient.is_contiguous():
            return False
        begin = gradient.data_ptr()
        end = begin + gradient.nbytes
        storage = gradient.untyped_storage()._cdata
        low, high = self._taken.get(storage, (begin, begin))
        if begin < high and end > low:
            return False
        self._taken[storage] = (min(low, begin), max(high, end))
        return True
