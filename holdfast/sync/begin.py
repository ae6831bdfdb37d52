"""How replicas begin equal, and make sure that they send each other the same things."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.sync.exchange import Ballots
from holdfast.sync.packed import Packed
from holdfast.sync.peers import AVERAGE_TAG, Peers

CPU = torch.device("cpu")  # Gloo sends from there


def mark_of(form: object) -> int:
    """A number that tells forms apart, and whose square is exact in a sum of many."""
    return zlib.crc32(repr(form).encode()) % 2**20


def refuse_other_forms(marks: float, squares: float, replicas: int) -> None:
    """From the sum of everybody's mark and the sum of their squares: if sizes differ, Gloo ends the process.

    >>> refuse_other_forms(3 + 3, 9 + 9, 2)
    >>> refuse_other_forms(3 + 4, 9 + 16, 2)
    Traceback (most recent call last):
    holdfast.errors.UsageError: replicas hold different tensors (the same model everywhere; and an optimizer that has \
made no step with gradients has no state, where others have one)
    """
    if marks**2 != squares * replicas:
        raise UsageError(
            "replicas hold different tensors",
            hint="the same model everywhere; and an optimizer that has made no step with gradients has no state, "
            "where others have one",
        )


def agree(ballots: Ballots, step: int, form: object) -> None:
    """Before tensors travel: whether all would send such ones."""
    mark = mark_of(form)
    ballots.cast(step, [mark, mark**2])
    marks, squares = ballots.sums(step)
    ballots.drop()  # who refuses, and goes, may have been heard by nobody yet
    refuse_other_forms(marks, squares, ballots.replicas)


def copy_from_first(peers: Peers, tensors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Tensors and the optimizer's state become rank 0's; its settings (a learning rate) are everybody's own."""
    packed = Packed(tensors, CPU)
    buffers = packed.read()
    _send_to_all(peers, buffers)
    own = optimizer.state_dict()
    state = _bytes_of(own["state"])
    length = torch.tensor([len(state)])
    _send_to_all(peers, [length])
    if peers.rank != 0:
        state = torch.empty(int(length), dtype=torch.uint8)
    _send_to_all(peers, [state])
    if peers.rank != 0:
        packed.write(buffers)
        first = torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True)
        if first or own["state"]:
            optimizer.load_state_dict({**own, "state": first})


def _send_to_all(peers: Peers, buffers: Sequence[torch.Tensor]) -> None:
    """Rank 0's values, into everybody's memory."""
    if peers.rank == 0:
        peers.start([(rank, buffer, AVERAGE_TAG) for rank in range(1, peers.size) for buffer in buffers], [])
    else:
        peers.finish(peers.start([], [(0, buffer, AVERAGE_TAG) for buffer in buffers]))


def _bytes_of(state: dict[Any, Any]) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
