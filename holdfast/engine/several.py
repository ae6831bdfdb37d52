"""Several optimizers as one: for a ``Loop`` with models that train in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer


class Several(Optimizer):
    """Optimizers by name. Its groups and slots are theirs, one optimizer after the other.

    So whoever carries, saves or hashes the state of an optimizer needs to know nothing of this. Which of them step is
    decided by the ``Update``, which hides the parameters of the others.

    >>> import torch
    >>> a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    >>> both = Several({"a": torch.optim.SGD([a], lr=1.0), "b": torch.optim.SGD([b], lr=0.5)})
    >>> a.grad = b.grad = torch.ones(1)
    >>> both.step(); a.item(), b.item()
    (0.0, 0.5)
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)
        groups = [group for part in self.parts.values() for group in part.param_groups]
        super().__init__([{"params": list(group["params"])} for group in groups], {})
        self.param_groups = groups  # the same objects: users refer to them
        for part in self.parts.values():
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let all of them step."""
        for part in self.parts.values():
            part.step()
