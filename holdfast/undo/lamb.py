"""The optimizer LAMB. It keeps the trust ratio of the last step: without the ratio a step cannot be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.errors import UsageError


class Lamb(Optimizer):
    """LAMB as in the paper (You et al., 2020): Adam direction with bias correction, trust ratio |p|/|u|.

    For each tensor: u = m̂ / (√v̂ + eps) + weight_decay · p, then p ← p − lr · (|p| / |u|) · u. The ratio is 1 where
    either norm is 0. It is kept as ``trust_ratio`` beside m and v, one number a tensor, and is 0 after an undo.

    ``params``: as for any torch optimizer. Raises UsageError for a negative rate, eps or decay, or betas not in [0, 1).

    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = Lamb([p], lr=0.1)
    >>> p.grad = torch.tensor([1.0, -1.0]); optimizer.step()
    >>> round(float(optimizer.state[p]["trust_ratio"]), 3)  # |(3, 4)| / |(1, -1)|
    3.536
    >>> [round(x, 3) for x in p.tolist()]
    [2.646, 4.354]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0:
            raise UsageError(f"Lamb: lr={lr}, eps={eps}, weight_decay={weight_decay}", hint="none may be negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"Lamb: betas={betas}", hint="both lie in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what ``closure``, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        grad, state = p.grad, self.state[p]
        assert grad is not None
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        t = float(state["step"])
        denominator = state["exp_avg_sq"].sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
        u = (state["exp_avg"] / (1 - beta1**t)).div_(denominator)
        u.add_(p, alpha=group["weight_decay"])
        of_p, of_u = torch.linalg.vector_norm(p), torch.linalg.vector_norm(u)
        state["trust_ratio"] = torch.where((of_p > 0) & (of_u > 0), of_p / of_u, 1.0)
        p.sub_(u.mul_(float(group["lr"]) * state["trust_ratio"]))
