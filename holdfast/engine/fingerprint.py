"""Fingerprints of tensors: which of their bytes have changed, whatever has changed them.

torch counts writes into a tensor (``_version``), but not those through ``.data``. A fingerprint sees every write: it is
a checksum of the bytes, as fast as memory is read (XXH3, 64 bits).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

PIECE = 1 << 20  # bytes of a piece: a large tensor is looked at piece by piece


def mark(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's memory is, and how often it was written by operations that torch counts.

    >>> x = torch.zeros(2); before = mark(x)
    >>> x.data.add_(1); mark(x) == before
    tensor([1., 1.])
    True
    >>> x.add_(1); mark(x) == before
    tensor([2., 2.])
    False
    """
    return (tensor.data_ptr() if is_plain(tensor) else id(tensor), 0 if tensor.is_inference() else tensor._version)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes can be read: it is ordinary, and has memory."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and not tensor.is_inference()
    )


def fingerprint(tensor: Tensor) -> Any:
    """Return dtype, shape and checksum of a tensor, or its mark if its bytes cannot be read.

    >>> x = torch.zeros(2); before = fingerprint(x)
    >>> x.data[0] = 1; fingerprint(x) == before
    False
    """
    content = checksums(tensor) if is_plain(tensor) else mark(tensor)
    return str(tensor.dtype), tuple(tensor.shape), content


def checksums(tensor: Tensor) -> list[int]:
    """Return the checksum of each piece of a tensor whose bytes can be read."""
    content = _bytes(tensor)
    return [xxhash.xxh3_64_intdigest(content[at : at + PIECE].data) for at in range(0, len(content), PIECE)]


def checksum(tensor: Tensor, piece: int) -> int:
    """Return the checksum of one piece."""
    return xxhash.xxh3_64_intdigest(_bytes(tensor)[piece * PIECE : (piece + 1) * PIECE].data)


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a tensor's bytes, without a copy where it lies densely in the CPU's memory."""
    flat = tensor.detach()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    if flat.dim() == 4 and flat.is_contiguous(memory_format=torch.channels_last):
        flat = flat.permute(0, 2, 3, 1)
    flat = flat.contiguous().view(-1)
    found: np.ndarray[Any, np.dtype[np.uint8]] = flat.view(torch.uint8).cpu().numpy()
    return found
