"""DiLoCo (Douillard et al., arXiv 2311.08105): many steps apart, then an outer step towards the mean of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from holdfast.checks import between, by_name, whole
from holdfast.sync.periodic import Periodic
from holdfast.sync.policy import Context, Policy


@by_name
@dataclass(frozen=True, kw_only=True)
class DiLoCo(Policy):
    """Policy that makes an outer optimizer step every ``every`` steps.

    Its gradient is the difference between the parameters after the last outer step and the mean of the replicas. The
    outer optimizer is SGD with rate ``outer_lr`` and Nesterov momentum ``outer_momentum``. The paper, whose defaults
    these are, has AdamW inside and very slow networks. With ``outer_lr=1`` and ``outer_momentum=0`` it is ``LocalSGD``.
    Raises ``UsageError`` for a setting that is out of its range.

    >>> DiLoCo(every=100).outer_lr
    0.7
    """

    every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("every", self.every, least=1)
        between("outer_lr", self.outer_lr, 0, 10)
        if self.outer_momentum != 0:
            between("outer_momentum", self.outer_momentum, 0, 0.9999)

    def tracker(self, context: Context) -> Periodic:
        return Periodic(self.every, warmup=self.warmup)

    def outer(self, anchor: Tensor, mean: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new parameters and the new momentum. ``anchor``: the parameters after the last outer step.

        >>> import torch
        >>> start = torch.tensor([1.0])
        >>> DiLoCo(outer_lr=0.5, outer_momentum=0.5).outer(start, torch.tensor([0.0]), torch.tensor([0.0]))
        (tensor([0.2500]), tensor([1.]))
        """
        way = anchor - mean
        momentum = self.outer_momentum * momentum + way
        if self.outer_lr == 1 and self.outer_momentum == 0:
            return mean.clone(), momentum  # anchor - (anchor - mean) would be rounded
        return anchor - self.outer_lr * (way + self.outer_momentum * momentum), momentum
