"""DiLoCo (Douillard et al., arXiv 2311.08105): long ways apart, then an outer step along what replicas agree on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from holdfast.checks import between, whole
from holdfast.sync.periodic import Periodic
from holdfast.sync.policy import Context, Policy


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Policy):
    """Every ``every`` steps the way from the last common parameters to the mean is taken as a gradient.

    The outer optimizer is SGD with Nesterov momentum. Meant for AdamW inside and very slow networks; the defaults
    are the paper's. With ``outer_lr=1`` and ``outer_momentum=0`` it is ``LocalSGD``.
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
        """The new parameters and momentum, both new tensors; ``anchor``: the parameters after the last outer step.

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
