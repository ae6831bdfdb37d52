"""The tensors at a boundary between two layers, laid out in memory as if they had been sent to another worker.

Operators may compute in another way, with another last bit, for a tensor with other strides or another alignment. So in
exact mode every tensor at a boundary gets the layout that it would have after having been sent, and so does its
gradient: then it does not matter which boundaries are between two workers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

ALIGNMENT = 64  # bytes; torch aligns the memory of every new tensor like this, vector instructions need it


def tensors_in(value: Any) -> list[Tensor]:
    """Return the distinct tensors in nested tuples, lists and dicts, in order.

    >>> x = torch.zeros(2)
    >>> len(tensors_in({"twice": (x, x), "mask": torch.ones(2) > 0, "scale": 0.5}))
    2
    """
    return list({id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}.values())


def settled(value: Any) -> Any:
    """Return a layer's output with each tensor dense, aligned and in memory of its own, as if it had been received.

    Each tensor's gradient will get the strides of the tensor.

    >>> x = torch.arange(6.0).view(2, 3).expand(4, 2, 3)
    >>> settled((x, "mask"))[0].stride()
    (6, 3, 1)
    """
    if isinstance(value, Tensor):
        return _settled(value, apart=False)
    known: dict[int, Tensor] = {}  # a tensor that is there twice stays one
    memory: set[int] = set()  # storages that were met: a second tensor in one of them is sent by itself

    def settle(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            address = _address(leaf)
            known[id(leaf)] = _settled(leaf, apart=address in memory)
            memory.add(address)
        return known[id(leaf)]

    return tree_map(settle, value)


def _settled(tensor: Tensor, *, apart: bool) -> Tensor:
    """Return the tensor, or a clone if it lies otherwise than it should, or must be ``apart`` from another one."""
    if apart or tensor._is_view() or not lies_well(tensor):  # writing into a view changes its base
        tensor = tensor.clone()  # keeps the order of dimensions where the tensor is dense
    if tensor.requires_grad and not tensor.is_leaf:
        stride = tensor.stride()
        tensor.register_hook(lambda gradient: like(gradient, stride))  # type: ignore[no-untyped-call]
    return tensor


def _address(tensor: Tensor) -> int:
    """Identify a tensor's storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def lies_well(tensor: Tensor) -> bool:
    """Return whether a tensor is dense (fills its memory without gaps) and begins at an aligned address."""
    if tensor.layout is not torch.strided:
        return True
    if tensor.data_ptr() % ALIGNMENT or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def like(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a gradient with these strides, and aligned: itself if it has them, else a copy."""
    if gradient.layout is not torch.strided:
        return gradient
    if gradient.stride() == stride and gradient.data_ptr() % ALIGNMENT == 0:
        return gradient
    room = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
    return room.copy_(gradient)


def unshared(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient in memory of its own: itself, or a clone if another tensor has the same memory.

    Autograd may give several gradients the same memory (of x and weight in x + weight.view(x.shape)). It would then
    add the next micro-batch's gradient to all of them at once, even while one of them is being sent.
    """
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    users = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)  # the gradient, and the call here
    return gradient if users <= 2 else gradient.clone()
