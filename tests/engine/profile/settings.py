"""What a layer may keep in an attribute, and what it might keep instead."""

from __future__ import annotations

import argparse
import enum
import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from holdfast.engine.profile.sight import ENTRIES


class Norm(enum.Enum):
    LAYER = 1
    BATCH = 2


@dataclass
class Inner:
    sizes: tuple[int, ...] = (4, 8)
    norm: Norm = Norm.LAYER


@dataclass
class Config:
    repeats: int = 1
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True, slots=True)
class Slotted:
    repeats: int


class Plain:
    def __init__(self, repeats: int) -> None:
        self._repeats = repeats


class Hidden:
    __slots__ = ("__repeats",)

    def __init__(self, repeats: int) -> None:
        self.__repeats = repeats


class Size(int):
    pass


class Dict(dict[str, Any]):
    repeats = 1


Pair = namedtuple("Pair", "first second")


def repeated(x: Tensor, times: int = 1) -> Tensor:
    return x * times


def closure(value: Any) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        return x * value

    return inner


def with_attribute(value: Dict) -> Dict:
    value.repeats = 2
    return value


def circle(value: Any) -> list[Any]:
    inside: dict[str, Any] = {"value": value}
    inside["self"] = inside
    return [inside, inside]


def deep(value: Any) -> Any:
    for _ in range(20):
        value = [value]
    return value


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dataclass": (Config, lambda: Config(repeats=2)),
    "nested": (Config, lambda: Config(inner=Inner(sizes=(4, 9)))),
    "enum": (Config, lambda: Config(inner=Inner(norm=Norm.BATCH))),
    "slots": (lambda: Slotted(1), lambda: Slotted(2)),
    "private": (lambda: Plain(1), lambda: Plain(2)),
    "private slots": (lambda: Hidden(1), lambda: Hidden(2)),
    "namespace": (lambda: SimpleNamespace(n=1), lambda: SimpleNamespace(n=2)),
    "arguments": (lambda: argparse.Namespace(n=1), lambda: argparse.Namespace(n=2)),
    "tuple": (lambda: (1, 2), lambda: (1, 3)),
    "list": (lambda: [1, [2]], lambda: [1, [3]]),
    "dict": (lambda: {"n": 1}, lambda: {"n": 2}),
    "keys": (lambda: {(1, 2): 0}, lambda: {(1, 3): 0}),
    "set": (lambda: {"a", "b"}, lambda: {"a", "c"}),
    "set of tuples": (lambda: {("a", 1), ("b", 2)}, lambda: {("a", 1), ("b", 3)}),
    "named tuple": (lambda: Pair(1, 2), lambda: Pair(1, 3)),
    "kind of dict": (lambda: Dict(n=1), lambda: Dict(n=2)),
    "attribute of a dict": (lambda: Dict(n=1), lambda: with_attribute(Dict(n=1))),
    "kind of integer": (lambda: Size(1), lambda: Size(2)),
    "type": (lambda: 1, lambda: True),
    "none": (lambda: None, lambda: torch.float64),
    "dtype": (lambda: torch.float32, lambda: torch.float64),
    "class": (lambda: nn.ReLU, lambda: nn.GELU),
    "own class": (lambda: Config, lambda: Slotted),
    "builtin": (lambda: torch.relu, lambda: torch.erfinv),
    "function": (lambda: mse_loss, lambda: nn.functional.l1_loss),
    "own function": (lambda: repeated, lambda: closure),
    "method of a tensor": (lambda: torch.Tensor.relu, lambda: torch.Tensor.exp),
    "ufunc": (lambda: np.exp, lambda: np.sin),
    "bound method": (lambda: [1].append, lambda: [2].append),
    "lambda": (lambda: lambda x: x, lambda: lambda x: x * 2),
    "closure": (lambda: closure(1), lambda: closure(2)),
    "closure of a closure": (lambda: closure(closure((1,))), lambda: closure(closure((2,)))),
    "partial": (lambda: functools.partial(repeated, times=1), lambda: functools.partial(repeated, times=2)),
    "partial's function": (lambda: functools.partial(repeated), lambda: functools.partial(closure)),
    "array": (lambda: np.arange(3), lambda: np.arange(1, 4)),
    "shape": (lambda: torch.zeros(3), lambda: torch.zeros(4)),
    "indices": (lambda: torch.arange(3), lambda: torch.arange(1, 4)),
    "numpy's number": (lambda: np.float32(1), lambda: np.float32(2)),
    "path": (lambda: Path("a"), lambda: Path("b")),
    "unregistered module": (lambda: [nn.Dropout(0.1)], lambda: [nn.Dropout(0.2)]),
    "circle": (lambda: circle(1), lambda: circle(2)),
    "deep": (lambda: deep(1), lambda: deep(2)),
    "many": (lambda: [0] * (ENTRIES + 1), lambda: [0] * (ENTRIES + 2)),
}
