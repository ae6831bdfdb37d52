"""Recording of the tensors that a stage sends across logged boundaries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import Tensor

from holdfast.plan.log_records import Direction as Direction
from holdfast.plan.log_records import Key as Key

# A value as JSON text and its distinct tensors, as ``pipe.describe`` gives them.
Message = tuple[str, list[Tensor]]


class RecordKeeper(Protocol):
    """The part of a log that the engine writes to."""

    def begin(self, step: int) -> None:
        """Begin an attempt of a step: forget the records of it and of later ones."""

    def keep(self, key: Key, message: Message) -> None:
        """Keep a record, whose tensors nobody writes into any more. The training thread waits for it: be quick."""

    def note(self, step: int, terms: Any) -> None:
        """Keep how a step was applied: the optimizer's settings, and the norm of all gradients."""


class Recorder:
    """Gives a log the records of one step after the other, each under its key.

    ``logged``: the boundaries whose records are kept.
    """

    def __init__(self, log: RecordKeeper, logged: Collection[int]) -> None:
        self._log = log
        self.logged = frozenset(logged)
        self._step = 0
        self._share: Sequence[int] = ()

    def at(self, step: int, share: Sequence[int]) -> None:
        """Record this step from now on. ``share``: the micro-batches of the stage's pipeline."""
        self._step, self._share = step, share

    def forward(self, boundary: int, number: int, message: Message, given: Sequence[Tensor]) -> None:
        """Record activations. ``given``: the tensors as the layer returned them, to see which share memory with it."""
        if boundary in self.logged:
            text, sent = message
            mine = [lasting(tensor, original) for tensor, original in zip(sent, given, strict=True)]
            self._keep(boundary, self._share[number], Direction.FORWARD, (text, mine))

    def backward(self, boundary: int, number: int, message: Message) -> None:
        """Record gradients. They need no copy: nobody uses them after they were sent."""
        if boundary in self.logged:
            text, sent = message
            mine = [tensor.clone() if _has_more_memory(tensor) else tensor for tensor in sent]
            self._keep(boundary, self._share[number], Direction.BACKWARD, (text, mine))

    def tie(self, layer: int, weight: int, message: Message) -> None:
        """Record one layer's gradient of a shared weight. It is copied, because its memory is used again."""
        text, sent = message
        self._keep(layer, weight, Direction.TIE, (text, [tensor.clone() for tensor in sent]))

    def _keep(self, boundary: int, micro_batch: int, direction: Direction, message: Message) -> None:
        key = Key(step=self._step, boundary=boundary, micro_batch=micro_batch, direction=direction)
        self._log.keep(key, message)


def lasting(sent: Tensor, given: Tensor) -> Tensor:
    """Return ``sent``, or a copy if its memory may change later: that of a parameter, a buffer, or a data set.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(16))
    >>> lasting(weight.detach(), weight).data_ptr() == weight.data_ptr()
    False
    """
    if sent.data_ptr() != given.data_ptr():
        return sent
    changes = given.grad_fn is None or given._is_view() or _has_more_memory(sent)
    return sent.clone() if changes else sent


def _has_more_memory(tensor: Tensor) -> bool:
    """Whether keeping the tensor would keep more memory than its own elements (64 bytes are for alignment)."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes + 64
