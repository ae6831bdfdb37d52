"""The inverse of one optimizer step on one parameter, for each optimizer that has one.

All arithmetic is in float64. Each scalar is first rounded as the kernel rounded it, and each result is rounded once,
so for float32 the error is no more than what the step itself lost. Work goes block by block, so that a large tensor
needs no temporaries of its size.

Each optimizer has three functions: ``_x_refusal`` returns why a part cannot be undone ("" if it can), ``_x_undo``
undoes it in place, and ``_x_scalars`` returns the rounded hyper-parameters that both use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 15  # elements worked on at a time: temporaries of 256 kB each, which stay in the cache
Group = dict[str, Any]
Blocks = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One parameter that a step has updated, with the gradient that it used."""

    p: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: Group
    initial: float = 0.0  # Adagrad: the first value of the sum of squares
    overwritten: bool = False  # the kernel has written g + momentum * buffer over the gradient


@dataclass(frozen=True, kw_only=True)
class UndoRule:
    """The inverse of an optimizer's step."""

    slots: Callable[[Group], tuple[str, ...]]  # names of the state tensors, shaped as the parameter, that it needs
    refusal: Callable[[Part], str]  # why a part cannot be undone, or ""; changes nothing
    undo: Callable[[Part], None]  # undoes parameter and slots; the caller undoes counters, and a first step's state
    is_first: Callable[[Part], bool | None]  # whether it was the part's first step; None: it cannot be told


def rounded(value: float | Tensor, p: Tensor) -> float:
    """Return a scalar as the kernel used it, in the parameter's precision.

    >>> rounded(0.1, torch.zeros(1, dtype=torch.float32))
    0.10000000149011612
    """
    return float(torch.tensor(float(value), dtype=p.dtype))


def rate(group: Group) -> float | Tensor:
    """Return the learning rate as it enters the scalar arithmetic. Fused kernels turn a tensor into a number first."""
    lr: float | Tensor = group["lr"]
    if isinstance(lr, Tensor):
        return float(lr) if group.get("fused") else lr.detach().cpu().squeeze()
    return lr


def signed(part: Part) -> float:
    """Return the sign that the step gives the gradient: -1 with ``maximize``."""
    return -1.0 if part.group.get("maximize") else 1.0


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of corresponding blocks, cut along the longest dimension. Any memory order will do."""
    shape = tensors[0].shape
    if tensors[0].numel() <= BLOCK:
        yield tensors
        return
    longest = max(range(len(shape)), key=lambda dim: shape[dim])
    rows = max(1, BLOCK * shape[longest] // tensors[0].numel())
    yield from zip(*(torch.split(tensor, rows, longest) for tensor in tensors), strict=True)


def rewrite(targets: list[Tensor], inputs: list[Tensor], inverse: Blocks) -> None:
    """Overwrite the targets with ``inverse(*targets, *inputs)``, block by block."""
    targets, inputs = [t.detach() for t in targets], [t.detach() for t in inputs]
    for block in blocks(*targets, *inputs):
        found = inverse(*block)
        for target, value in zip(block, found, strict=False):
            target.copy_(value)


def as_stored(value: Tensor, p: Tensor) -> Tensor:
    """Return a value rounded to the tensor's dtype: only a rounded weight gives the decay term that the kernel used."""
    return value if p.dtype == torch.float64 else value.to(p.dtype).double()


def singular(factor: float, p: Tensor) -> bool:
    """Whether dividing by the factor would lose more than half of the digits."""
    return abs(factor) < float(torch.finfo(p.dtype).eps) ** 0.5


# --- SGD -------------------------------------------------------------------------------------------------------------


def _sgd_scalars(part: Part) -> tuple[float, float, float, float]:
    group, p = part.group, part.p
    return (
        rounded(group["lr"], p),
        rounded(group["weight_decay"], p),
        rounded(group["momentum"], p),
        rounded(1 - group["dampening"], p),
    )


def _sgd_refusal(part: Part) -> str:
    lr, decay, momentum, _ = _sgd_scalars(part)
    if (momentum == 0 or part.group["nesterov"]) and singular(1 - lr * decay, part.p):
        return f"1 - lr * weight_decay is about 0 (lr={lr:g}, weight_decay={decay:g}): the step wiped out the weights"
    return ""


def _sgd_p(part: Part) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function of (p after the step, gradient, buffer).

    It returns p before the step, and the gradient with its decay term.
    """
    lr, decay, momentum, _ = _sgd_scalars(part)
    sign, nesterov = signed(part), part.group["nesterov"]

    def inverse(p: Tensor, grad: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        p, grad, buffer = p.double(), grad.double(), buffer.double()
        g = grad - momentum * buffer if part.overwritten else sign * grad
        if momentum == 0:
            before = (p + lr * g) / (1 - lr * decay)
        elif nesterov:
            direction = g + momentum * buffer
            before = (p + lr * (direction if decay else as_stored(direction, part.p))) / (1 - lr * decay)
        else:
            before = p + lr * buffer
        return before, as_stored(g + decay * as_stored(before, part.p), part.p) if decay else g

    return inverse


def _sgd_undo(part: Part) -> None:
    _, _, momentum, share = _sgd_scalars(part)
    find = _sgd_p(part)
    if momentum == 0:
        rewrite([part.p], [part.grad], lambda p, g: find(p, g, p)[:1])
        return

    def inverse(p: Tensor, buffer: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        before, g = find(p, grad, buffer)
        return before, finite(as_stored(buffer.double() - share * g, part.p) / momentum, part.p)

    rewrite([part.p, part.state["momentum_buffer"]], [part.grad], inverse)


def _sgd_is_first(part: Part) -> bool | None:
    """Whether the momentum buffer is the gradient itself, as the first step makes it, without dampening.

    None if the buffer is all zeros, which shows nothing. ``slack`` allows for the rounding of the decay term.
    """
    lr, decay, momentum, _ = _sgd_scalars(part)
    if momentum == 0:
        return False
    find, info = _sgd_p(part), torch.finfo(part.p.dtype)
    slack = 8 * info.eps if decay or part.overwritten else 0.0
    tensors = (part.p.detach(), part.state["momentum_buffer"], part.grad.detach())
    for p, buffer, grad in blocks(*tensors):
        before, g = find(p, grad, buffer)
        size = grad.abs() + buffer.abs() + decay * (before.abs() + p.abs() + lr * buffer.abs())
        if bool(((buffer - g).abs() > slack * size + bool(slack) * 8 * info.smallest_normal * info.eps).any()):
            return False
    return True if bool(tensors[1].any()) else None


# --- Adam, AdamW, Lamb -----------------------------------------------------------------------------------------------


def finite(value: Tensor, p: Tensor) -> Tensor:
    """Clamp a value into the dtype's range. Dividing by a tiny momentum may magnify a rounding error beyond it."""
    most = float(torch.finfo(p.dtype).max)
    return value.clamp_(-most, most)


def _counts_one(part: Part) -> bool:
    """Whether the state's counter shows that it was the first step."""
    return float(part.state["step"]) == 1


def _moments(part: Part) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function of (m, v after the step, gradient) that returns m and v before it.

    Both are zero before the first step. They are also set to zero where a beta of 0 has wiped them out: their old
    values are lost, but the next step wipes them out again.
    """
    beta1, beta2 = part.group["betas"]
    share1, share2 = rounded(1 - float(beta1), part.p), rounded(1 - float(beta2), part.p)
    keep1, keep2 = 1 - share1, rounded(float(beta2), part.p)  # lerp has one weight, mul and addcmul have two
    if _counts_one(part):
        keep1 = keep2 = 0.0

    def inverse(m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        m, v, g = m.double(), v.double(), g.double()
        before_m = finite((m - share1 * g) / keep1, part.p) if keep1 else torch.zeros_like(m)
        before_v = finite(as_stored(v - share2 * g * g, part.p) / keep2, part.p) if keep2 else torch.zeros_like(v)
        return before_m, before_v.clamp_(min=0)

    return inverse


def _adam_decay(part: Part) -> float:
    """Return the factor of decoupled weight decay."""
    group = part.group
    if not group["decoupled_weight_decay"] or group["weight_decay"] == 0:
        return 1.0
    return rounded(1 - rate(group) * group["weight_decay"], part.p)


def _adam_refusal(part: Part) -> str:
    if singular(_adam_decay(part), part.p):
        lr, decay = float(part.group["lr"]), part.group["weight_decay"]
        return f"1 - lr * weight_decay is about 0 (lr={lr:g}, weight_decay={decay:g}): the step wiped out the weights"
    return ""


def _adam_undo(part: Part) -> None:
    group, p, t = part.group, part.p, float(part.state["step"])
    beta1, beta2 = group["betas"]
    size = rounded(rate(group) / (1 - beta1**t), p)
    root, eps = rounded((1 - beta2**t) ** 0.5, p), rounded(group["eps"], p)
    factor, sign, moments = _adam_decay(part), signed(part), _moments(part)
    coupled = 0.0 if group["decoupled_weight_decay"] else rounded(group["weight_decay"], p)

    def inverse(after: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        u = size * m / (v.sqrt() / root + eps)  # not in float64: these are the bits that the kernel subtracted
        before = after.double() + u
        if factor != 1:
            before = as_stored(before, p) / factor
        g = sign * grad
        if coupled:
            g = as_stored(g + coupled * as_stored(before, p), p)
        return before, *moments(m, v, g)

    rewrite([p, part.state["exp_avg"], part.state["exp_avg_sq"]], [part.grad], inverse)


def _lamb_scalars(part: Part) -> tuple[float, float]:
    ratio = part.state["trust_ratio"]
    return rounded(float(part.group["lr"]) * ratio, part.p), rounded(part.group["weight_decay"], part.p)


def _lamb_refusal(part: Part) -> str:
    if float(part.state["trust_ratio"]) == 0:
        return "its trust ratio is not there: only the last step can be undone, and once"
    size, decay = _lamb_scalars(part)
    if singular(1 - size * decay, part.p):
        return f"1 - lr * trust ratio * weight_decay is about 0 ({size:g} * {decay:g}): the step wiped out the weights"
    return ""


def _lamb_undo(part: Part) -> None:
    group, p, t = part.group, part.p, float(part.state["step"])
    beta1, beta2 = group["betas"]
    size, decay = _lamb_scalars(part)
    share, moments = rounded(1 - beta1**t, p), _moments(part)
    root, eps = rounded((1 - beta2**t) ** 0.5, p), rounded(group["eps"], p)

    def inverse(after: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        u = m / share / (v.sqrt() / root + eps)
        return (after.double() + size * u) / (1 - size * decay), *moments(m, v, grad)

    rewrite([p, part.state["exp_avg"], part.state["exp_avg_sq"]], [part.grad], inverse)
    part.state["trust_ratio"] = torch.zeros_like(part.state["trust_ratio"])


# --- Adagrad ---------------------------------------------------------------------------------------------------------


def _adagrad_scalars(part: Part) -> tuple[float, float, float]:
    group, p, t = part.group, part.p, float(part.state["step"])
    size = rounded(rate(group) / (1 + (t - 1) * group["lr_decay"]), p)
    return size, rounded(group["weight_decay"], p), rounded(group["eps"], p)


def _adagrad_refusal(part: Part) -> str:
    size, decay, eps = _adagrad_scalars(part)
    if decay == 0:
        return ""
    for (total,) in blocks(part.state["sum"]):
        # The share of each weight that decay leaves. It is smallest where there were hardly any gradients.
        left = 1 - size * decay / (total.double().sqrt() + eps)
        if singular(float(left.abs().min()) if left.numel() else 1.0, part.p):
            return "weight decay took all of some weights (1 - lr * weight_decay / (sqrt(sum) + eps) is about 0)"
    return ""


def _adagrad_undo(part: Part) -> None:
    size, decay, eps = _adagrad_scalars(part)
    sign, first = signed(part), _counts_one(part)

    def inverse(after: Tensor, total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        after, total, g = after.double(), total.double(), sign * grad.double()
        root = total.sqrt() + eps
        before = (after + size * g / root) / (1 - size * decay / root)
        if decay:
            g = as_stored(g + decay * as_stored(before, part.p), part.p)
        if first:
            return before, torch.full_like(total, part.initial)
        return before, (total - g * g).clamp_(min=0)

    rewrite([part.p, part.state["sum"]], [part.grad], inverse)


SGD = UndoRule(
    slots=lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
    refusal=_sgd_refusal,
    undo=_sgd_undo,
    is_first=_sgd_is_first,
)
ADAM = UndoRule(slots=lambda _: ("exp_avg", "exp_avg_sq"), refusal=_adam_refusal, undo=_adam_undo, is_first=_counts_one)
LAMB = UndoRule(slots=lambda _: ("exp_avg", "exp_avg_sq"), refusal=_lamb_refusal, undo=_lamb_undo, is_first=_counts_one)
ADAGRAD = UndoRule(slots=lambda _: ("sum",), refusal=_adagrad_refusal, undo=_adagrad_undo, is_first=_counts_one)
