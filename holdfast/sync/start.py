"""The start of a user's own loop: replicas check that they hold the same tensors, and become equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.cluster import tags
from holdfast.codec import empty_tensors, flatten, unflatten
from holdfast.sync.exchange import Ballots
from holdfast.sync.packed import Packed, mark_of, refuse_other_forms
from holdfast.sync.peers import Peers

CPU = torch.device("cpu")  # Gloo sends from its memory


def agree(ballots: Ballots, step: int, form: object) -> None:
    """Raise ``UsageError`` on all replicas unless all would send tensors of the same form."""
    mark = mark_of(form)
    ballots.cast(step, [mark, mark**2])
    marks, squares = ballots.sums(step)
    ballots.drop()  # a replica that refuses leaves at once, and others may not have its ballot yet
    refuse_other_forms(marks, squares, ballots.replicas)


def copy_from_first(peers: Peers, tensors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Give all replicas rank 0's tensors and optimizer state. Settings, such as a learning rate, stay as they are."""
    _copy_tensors(peers, tensors)
    own = optimizer.state_dict()
    text, values = flatten(own["state"])  # as JSON and tensors: no pickle crosses a wire
    text = _copy_text(peers, text)
    if peers.rank != 0:
        values = empty_tensors(text)
    _copy_tensors(peers, values)
    if peers.rank != 0:
        first = unflatten(text, values)
        if first or own["state"]:
            optimizer.load_state_dict({**own, "state": first})


def _copy_tensors(peers: Peers, tensors: Sequence[torch.Tensor]) -> None:
    packed = Packed(tensors, CPU)
    buffers = packed.read()
    _copy(peers, buffers)
    if peers.rank != 0:
        packed.write(buffers)


def _copy_text(peers: Peers, text: bytes) -> bytes:
    length = torch.tensor([len(text)])
    _copy(peers, [length])
    content = torch.zeros(int(length), dtype=torch.uint8)
    if peers.rank == 0:
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    _copy(peers, [content])
    return content.numpy().tobytes()


def _copy(peers: Peers, buffers: Sequence[torch.Tensor]) -> None:
    """Overwrite everybody's buffers with rank 0's. Gloo cannot send empty ones."""
    filled = [buffer for buffer in buffers if buffer.numel()]
    if peers.rank == 0:
        peers.start([(rank, buffer, tags.AVERAGE) for rank in range(1, peers.size) for buffer in filled], [])
    else:
        peers.finish(peers.start([], [(0, buffer, tags.AVERAGE) for buffer in filled]))
