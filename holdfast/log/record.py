"""Keeps what a stage sends, where the boundary is one that is logged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import Tensor

from holdfast.plan.log_records import Direction as Direction
from holdfast.plan.log_records import Key as Key

# A value in words and its distinct tensors, as ``pipe.describe`` gives them.
Message = tuple[str, list[Tensor]]


class Keeper(Protocol):
    """What the engine needs of a log."""

    def begin(self, step: int) -> None:
        """A step is attempted (again): what is there of it, or of later ones, is forgotten."""

    def keep(self, key: Key, message: Message) -> None:
        """Nobody writes into the tensors any more. Must cost nothing that matters."""

    def note(self, step: int, terms: Any) -> None:
        """How a step was applied: what the optimizer was told, and the norm of all gradients."""


class Recorder:
    """Gives a log the records of one step after the other, each under its key.

    ``logged`` are the boundaries whose records are kept.
    """

    def __init__(self, log: Keeper, logged: Collection[int]) -> None:
        self._log = log
        self.logged = frozenset(logged)
        self._step = 0
        self._share: Sequence[int] = ()

    def at(self, step: int, share: Sequence[int]) -> None:
        """The records that come are of this step; ``share`` are the micro-batches of the stage's pipeline."""
        self._step, self._share = step, share

    def forward(self, boundary: int, number: int, message: Message, given: Sequence[Tensor]) -> None:
        """What a layer gave, and how it is sent: if that is the same memory, somebody might write into it later."""
        if boundary in self.logged:
            text, sent = message
            mine = [lasting(tensor, original) for tensor, original in zip(sent, given, strict=True)]
            self._keep(boundary, self._share[number], Direction.FORWARD, (text, mine))

    def backward(self, boundary: int, number: int, message: Message) -> None:
        """Gradients, which nobody needs any more once they are sent."""
        if boundary in self.logged:
            text, sent = message
            mine = [tensor.clone() if _has_more_memory(tensor) else tensor for tensor in sent]
            self._keep(boundary, self._share[number], Direction.BACKWARD, (text, mine))

    def tie(self, layer: int, weight: int, message: Message) -> None:
        """A use's gradient, which lies in memory that is used again."""
        text, sent = message
        self._keep(layer, weight, Direction.TIE, (text, [tensor.clone() for tensor in sent]))

    def _keep(self, boundary: int, micro_batch: int, direction: Direction, message: Message) -> None:
        key = Key(step=self._step, boundary=boundary, micro_batch=micro_batch, direction=direction)
        self._log.keep(key, message)


def lasting(sent: Tensor, given: Tensor) -> Tensor:
    """The tensor in memory that stays as it is: not a parameter's or a buffer's, nor that of a data set.

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
    """Whether keeping the tensor would keep more than its own elements."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes + 64
