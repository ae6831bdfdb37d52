"""What goes from one layer to the next: made such that it does not matter whether a wire is between them.

Operators may take another way, with another last bit, for a tensor that lies differently in memory. So in
exact mode every tensor at a boundary lies as it would after having been sent, and so does its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

ALIGNMENT = 64  # bytes; what torch gives to a tensor of its own


def settled(value: Any) -> Any:
    """The value with each tensor dense, aligned and in memory of its own, and its gradient brought into its order.

    >>> x = torch.arange(6.0).view(2, 3).expand(4, 2, 3)
    >>> settled((x, "mask"))[0].stride()
    (6, 3, 1)
    """
    if isinstance(value, Tensor):
        return _settled(value, apart=False)
    known: dict[int, Tensor] = {}  # a tensor that is there twice stays one
    memory: set[int] = set()

    def settle(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            address = _address(leaf)
            known[id(leaf)] = _settled(leaf, apart=address in memory)  # a view of another one is sent by itself
            memory.add(address)
        return known[id(leaf)]

    return tree_map(settle, value)


def _settled(tensor: Tensor, *, apart: bool) -> Tensor:
    if apart or tensor._is_view() or not lies_well(tensor):  # a write into a view would go into what it is a view of
        tensor = tensor.clone()  # keeps the order of dimensions where the tensor is dense
    if tensor.requires_grad and not tensor.is_leaf:
        stride = tensor.stride()
        tensor.register_hook(lambda gradient: like(gradient, stride))  # type: ignore[no-untyped-call]
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def lies_well(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps, from an aligned address on."""
    if tensor.layout is not torch.strided:
        return True
    if tensor.data_ptr() % ALIGNMENT or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def like(gradient: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The gradient, lying as its tensor does."""
    if gradient.layout is not torch.strided:
        return gradient
    if gradient.stride() == stride and gradient.data_ptr() % ALIGNMENT == 0:
        return gradient
    room = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)
    return room.copy_(gradient)


def unshared(gradient: Tensor | None) -> Tensor | None:
    """A gradient in memory of its own.

    Autograd may give several gradients the same memory (of x and weight in x + weight.view(x.shape)), and would
    add the next micro-batch's to all of them at once, even while one is still being sent, or kept.
    """
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    users = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return gradient if users <= 2 else gradient.clone()  # the gradient itself, and who counts
