"""The ledger of an eager update: what a step has begun to change, and what it has finished changing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer


class Ledger:
    """Parameter by parameter: untouched, begun, or done, since the last step that was committed or taken back.

    An entry is opened before its parameters change and closed after. What stops in between leaves it open: those
    parameters are *torn*, neither old nor new.

    >>> import torch
    >>> p, q = (nn.Parameter(torch.ones(1)) for _ in range(2))
    >>> optimizer, ledger = torch.optim.SGD([p, q], lr=0.1), Ledger()
    >>> with ledger.entry([p], optimizer): pass
    >>> ledger.done == [p], ledger.torn, ledger.first == {p}
    (True, [], True)
    """

    def __init__(self) -> None:
        self._begun: dict[nn.Parameter, None] = {}  # in order
        self._done: set[nn.Parameter] = set()
        self.first: set[nn.Parameter] = set()  # those of which the optimizer kept nothing before

    @contextmanager
    def entry(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> Iterator[None]:
        """Around the change of these parameters, each at most once a step."""
        assert not any(p in self._begun for p in parameters), "a parameter is updated twice in one step"
        self.first.update(p for p in parameters if not optimizer.state.get(p))
        self._begun.update(dict.fromkeys(parameters))
        yield
        self._done.update(parameters)

    @property
    def begun(self) -> list[nn.Parameter]:
        return list(self._begun)

    @property
    def done(self) -> list[nn.Parameter]:
        return [p for p in self._begun if p in self._done]

    @property
    def torn(self) -> list[nn.Parameter]:
        return [p for p in self._begun if p not in self._done]

    def clear(self) -> None:
        """The step is committed, or taken back."""
        self._begun.clear()
        self._done.clear()
        self.first.clear()
