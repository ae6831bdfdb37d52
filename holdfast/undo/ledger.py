"""The ledger of an eager update: the parameters that a step has begun to change, and has finished changing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer


class Ledger:
    """The state of each parameter since the last step that was committed or undone: untouched, begun, or done.

    An entry is opened before its parameters change and closed after. If the change stops in between, the entry stays
    open, and its parameters are *torn*: neither old nor new.

    >>> import torch
    >>> p, q = (nn.Parameter(torch.ones(1)) for _ in range(2))
    >>> optimizer, ledger = torch.optim.SGD([p, q], lr=0.1), Ledger()
    >>> with ledger.entry([p], optimizer): pass
    >>> ledger.done == [p], ledger.torn, ledger.first == {p}
    (True, [], True)
    """

    def __init__(self) -> None:
        self._begun: dict[nn.Parameter, None] = {}  # in the order of the updates
        self._done: set[nn.Parameter] = set()
        self.first: set[nn.Parameter] = set()  # parameters for which the optimizer had no state before this step

    @contextmanager
    def entry(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> Iterator[None]:
        """Enclose the change of these parameters. Each may change at most once a step."""
        assert not any(p in self._begun for p in parameters), "a parameter is updated twice in one step"
        self.first.update(p for p in parameters if not optimizer.state.get(p))
        self._begun.update(dict.fromkeys(parameters))
        yield
        self._done.update(parameters)

    @property
    def begun(self) -> list[nn.Parameter]:
        """Parameters whose change has begun, finished or not."""
        return list(self._begun)

    @property
    def done(self) -> list[nn.Parameter]:
        """Parameters whose change is finished."""
        return [p for p in self._begun if p in self._done]

    @property
    def torn(self) -> list[nn.Parameter]:
        """Parameters whose change has begun and not finished."""
        return [p for p in self._begun if p not in self._done]

    def clear(self) -> None:
        """Forget all entries: the step is committed, or undone."""
        self._begun.clear()
        self._done.clear()
        self.first.clear()
