"""Optimizers that keep something beside their parameters' state, each in another place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer


class Falling(SGD):
    """Its learning rate falls with each step, by a counter that a subclass keeps somewhere."""

    def count(self) -> float:
        raise NotImplementedError

    def step(self, closure: Any = None) -> None:
        rate = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] / (1 + float(self.count()))
        super().step()
        for group, lr in zip(self.param_groups, rate, strict=True):
            group["lr"] = lr


class InAttribute(Falling):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.k = 0

    def count(self) -> float:
        self.k += 1
        return self.k


class MadeLater(Falling):
    def count(self) -> float:
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls


class FromTheFourthStep(InAttribute):
    """Counts where it is carried, and from the fourth step on also where it is not."""

    def count(self) -> float:
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
        self.k = max(0, self.param_groups[0]["n"] - 3)
        return self.k


class ThroughData(InAttribute):
    """A tensor in a list, written as torch does not count it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.kept = [{"total": torch.zeros(3)}]

    def count(self) -> float:
        return float(self.kept[0]["total"].data.add_(1)[0])


class WithInner(InAttribute):
    """An optimizer inside, with a state of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.inner = Adam(self.param_groups[0]["params"], lr=lr)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Draws(Falling):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.random = random.Random(0)

    def count(self) -> float:
        return self.random.random()


class DrawsFromTorch(Falling):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.generator = torch.Generator().manual_seed(0)

    def count(self) -> float:
        return float(torch.rand((), generator=self.generator))


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class InObject(Falling):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.counter = Slotted()

    def count(self) -> float:
        self.counter.value += 1
        return self.counter.value


class UnderText(Falling):
    def count(self) -> float:
        self.state["k"] = {"n": self.state["k"].get("n", 0) + 1}  # type: ignore[index]
        return float(self.state["k"]["n"])  # type: ignore[index]


class UnderOtherTensor(Falling):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.key = torch.zeros(1)

    def count(self) -> float:
        self.state[self.key]["n"] = self.state[self.key].get("n", 0) + 1
        return float(self.state[self.key]["n"])


class InGroup(Falling):
    """As schedule-free optimizers count: carried."""

    def count(self) -> float:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return float(self.param_groups[0]["k"])


class TensorInGroup(Falling):
    """The same with a tensor that is written in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"] = torch.zeros(())

    def count(self) -> float:
        for group in self.param_groups:
            group["k"].add_(1)
        return float(self.param_groups[0]["k"])


class GradientsInGroup(Falling):
    """As Prodigy estimates its distance: from the gradients of all parameters that are there."""

    def count(self) -> float:
        for group in self.param_groups:
            seen = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["d"] = group.get("d", 0.0) + seen
        return float(self.param_groups[0]["d"])


class InState(Falling):
    """As all should: carried."""

    def count(self) -> float:
        found = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    found = self.state[p]["k"] = self.state[p].get("k", 0) + 1
        return float(found)


class Wrapper(Optimizer):
    """As look-ahead optimizers are made: what is inside shares its state and its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.inner = Adam(params, lr=lr)
        super().__init__(params, {"lr": lr})
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Constant(Adam):
    """Attributes that stay: numbers, NaN, its parameters, tensors, functions."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.rate, self.nothing, self.table = lr, float("nan"), torch.arange(5)
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.by_parameter = {p: i for i, p in enumerate(self.all)}
        self.rule, self.model = (lambda x: x), torch.nn.ParameterList(self.all)
        self.me = self

    def step(self, closure: Any = None) -> None:
        self.table = torch.arange(5)  # made anew, and the same
        super().step()


Make = Callable[[Any], Optimizer]
REFUSED: dict[Make, str] = {
    InAttribute: "'k'",
    MadeLater: "'calls'",
    ThroughData: "'kept'",
    WithInner: "'inner'",
    Draws: "'random'",
    DrawsFromTorch: "'generator'",
    InObject: "'counter'",
    UnderText: "'k' in its state",
    UnderOtherTensor: "'Tensor' in its state",
}
CARRIED: list[Make] = [InGroup, TensorInGroup, InState, Wrapper, Constant]
