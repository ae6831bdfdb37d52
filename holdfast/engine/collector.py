"""Hands the gradients that a backward pass makes to their reduction, each as soon as it is whole."""

from __future__ import annotations

import torch

from holdfast.engine.boundary import unshared
from holdfast.engine.model import LayeredModel
from holdfast.engine.reduce import Reduction
from holdfast.errors import UsageError


class Collector:
    """Listens to all trained parameters of a model. Without a reduction nothing is collected."""

    def __init__(self, model: LayeredModel) -> None:
        self.reduction: Reduction | None = None
        self._position: dict[int, int] = {}  # parameter → the place of its bucket
        self._last = False
        self._ready: set[int] = set()  # parameters whose gradient of the current micro-batch is there
        for layer in model.layers:
            for p in layer.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]

    def begin(self, reduction: Reduction) -> None:
        self.reduction = reduction
        buckets = enumerate(reduction.buckets)
        self._position = {id(p): place for place, bucket in buckets for p in bucket.parameters}

    def micro_batch(self, *, last: bool) -> None:
        """The backward pass of the next micro-batch comes; with the last one, gradients are whole."""
        self._last = last
        self._ready.clear()

    def stop(self) -> None:
        """Nothing happens any more in the last reduction; its gradients stay."""
        if self.reduction is not None:
            self.reduction.stop()

    def end(self) -> None:
        """Gives up the gradients of the last reduction, whether it ended well or broke."""
        reduction, self.reduction = self.reduction, None
        if reduction is not None:
            reduction.release()

    def _gradient_ready(self, p: torch.Tensor) -> None:
        reduction = self.reduction
        if reduction is None:
            return
        reduction.group.check()  # leaves the backward pass at once when the generation is over
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise UsageError("a sparse gradient cannot be summed with others'", hint="nn.Embedding(…, sparse=False)")
        if id(p) in self._ready:
            raise UsageError(
                "a parameter gets its gradient in several parts within one backward pass",
                hint="torch.utils.checkpoint with use_reentrant=False gives it whole",
            )
        p.grad = unshared(p.grad)
        self._ready.add(id(p))
        if self._last:
            reduction.gradient_ready(self._position[id(p)])
