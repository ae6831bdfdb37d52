"""Parcels: batches on their way from a loader to its worker, in memory that both can map.

A parcel is one anonymous file (``memfd_create``): a table, the bytes of all tensors and arrays, and the rest of the
batch as ``pickle`` writes it. It goes from a child process to the one that has forked it, as in torch's DataLoader, and
is never written to a disk or sent over a network. The worker maps it and copies nothing. ``/dev/shm`` is not used, so
its size does not matter.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGN = 64  # bytes, as torch aligns memory: some kernels give other bits for data that lies differently
Bytes = npt.NDArray[np.uint8]


def pack(value: Any) -> int:
    """Return the descriptor of a parcel with this value. Raises what ``pickle`` raises for values that it refuses."""
    text, parts = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(text, protocol=5, buffer_callback=parts.append).dump(value)
    views = [np.frombuffer(text.getbuffer(), np.uint8), *(np.asarray(part.raw()) for part in parts)]
    table, end = [len(views)], 8 * (1 + 2 * len(views))
    for view in views:
        end += -end % ALIGN + view.ctypes.data % ALIGN
        table += [end, view.nbytes]
        end += view.nbytes
    file = os.memfd_create("holdfast-batch")
    try:
        os.truncate(file, end)
        _write(file, np.array(table, "<i8").view(np.uint8), 0)
        for place, view in zip(table[1::2], views, strict=True):
            _write(file, view, place)
    except BaseException:
        os.close(file)
        raise
    return file


def unpack(file: int) -> Any:
    """Return the value of a parcel, and close its descriptor. Tensors and arrays lie in the mapped memory."""
    try:
        size = os.fstat(file).st_size
        mapped = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", shared=True, nbytes=size)
    finally:
        os.close(file)
    whole: Any = torch.empty(0, dtype=torch.uint8).set_(mapped).numpy()  # type: ignore[arg-type]
    count = int(whole[:8].view("<i8")[0])
    table = whole[8 : 8 * (1 + 2 * count)].view("<i8").reshape(-1, 2).tolist()
    text, *parts = (memoryview(whole[place : place + length]) for place, length in table)
    return pickle.loads(text, buffers=parts)


class _Packer(pickle.Pickler):
    """A pickler that leaves the memory of tensors outside, as pickle itself does for arrays."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        # The memory from the first element to the last: strides stay as they are, and the rest of a large tensor that
        # this one is a view of stays behind.
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        span: Any = value.detach().as_strided((last + 1,), (1,)).view(torch.uint8).numpy()
        known = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
        return _tensor, (pickle.PickleBuffer(span), *known)


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is described by dtype, shape and strides. Pickle knows how to take others apart."""
    strided = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
    return strided and value.numel() > 0 and value.is_leaf and not (value.is_conj() or value.is_neg())


def _tensor(
    span: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    return torch.frombuffer(span, dtype=dtype).as_strided(shape, stride).requires_grad_(requires_grad)


def _write(file: int, view: Bytes, place: int) -> None:
    rest = memoryview(view.data)
    while rest:
        written = os.pwrite(file, rest, place)
        rest, place = rest[written:], place + written
