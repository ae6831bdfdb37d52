"""Sends the state to those who lack it, part by part, the load spread over all who hold it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast import codec
from holdfast.cluster import faults
from holdfast.cluster.group import Group
from holdfast.engine.state import State

LENGTH_TAG, TEXT_TAG, TENSOR_TAG = 1, 2, 3


def sender_of(part: int, holders: Sequence[int]) -> int:
    """Which holder sends a part.

    >>> [sender_of(part, [0, 2]) for part in range(3)]
    [0, 2, 0]
    """
    return holders[part % len(holders)]


def copy_state(group: Group, state: State, *, holders: Sequence[int], receivers: Sequence[int]) -> int:
    """Every member calls this; returns the bytes that came. What is sent must stay as it is until the next vote."""
    if group.rank in receivers:
        senders = [sender_of(part, holders) for part in range(len(state))]
        return sum(_receive(group, state, part, sender) for part, sender in enumerate(senders))
    for part in range(len(state)):
        if sender_of(part, holders) == group.rank:
            faults.point("copy")
            for receiver in receivers:
                _send(group, state, part, receiver)
    return 0


def _send(group: Group, state: State, part: int, receiver: int) -> None:
    text, tensors = codec.flatten(state.read(part))
    device = state.model.device
    header = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    length = torch.tensor([len(text)], device=device)
    flat = [tensor.to(device).contiguous() for tensor in tensors if tensor.numel()]
    sends = [(receiver, length, LENGTH_TAG), (receiver, header, TEXT_TAG)]
    group.start([*sends, *((receiver, tensor, TENSOR_TAG) for tensor in flat)], [])


def _receive(group: Group, state: State, part: int, sender: int) -> int:
    device = state.model.device
    length = torch.zeros(1, dtype=torch.int64, device=device)
    group.finish(group.start([], [(sender, length, LENGTH_TAG)]))
    header = torch.zeros(int(length), dtype=torch.uint8, device=device)
    group.finish(group.start([], [(sender, header, TEXT_TAG)]))
    text = header.cpu().numpy().tobytes()
    tensors = [tensor.to(device) for tensor in codec.empty_tensors(text)]
    faults.point("copy")
    group.finish(group.start([], [(sender, tensor, TENSOR_TAG) for tensor in tensors if tensor.numel()]))
    state.write(part, codec.unflatten(text, tensors))
    return len(text) + sum(tensor.nbytes for tensor in tensors)
