"""Turns a model's settings, code and shapes into plain data, from which the key of a profile is computed.

Two rules hold. Two processes that run the same script get the same data: no id of an object, no hash and no order of a
set goes in. And two models that differ in anything that may cost time get different data; where that cannot be told,
data differ too often rather than too seldom, and the model is only measured once more.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections import deque
from collections.abc import Iterable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 60  # objects inside objects; deeper ones are described by their type alone: Python's stack has an end
ENTRIES = 10_000  # of a container; of a larger one, the first so many and its length: more would take seconds
THINGS = 1_000_000  # objects in all; further ones are described by their type alone, for the same reason
FEW = 64  # integers that an array may have to be taken for settings; a longer one is taken for data

# Types by the way that their values are described.
EXACT = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, slice)
SPOKEN = (  # their repr, and that of subclasses, says everything
    torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic, np.dtype, range, slice, PurePath, Decimal,
    Fraction, datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip
NUMBERS = (int, float, complex, str, bytes)  # that a class may be derived from
CONTAINERS = (dict, MappingProxyType, list, tuple, deque, set, frozenset)
WRAPPERS = (classmethod, staticmethod, property, functools.cached_property)
CODE = (FunctionType, *WRAPPERS)
WRAPPED = ("__func__", "fget", "fset", "func", "__wrapped__")
# Attributes that are left out.
OF_A_MODULE = frozenset(vars(nn.Module()))  # torch's own: tensors and submodules are described apart, hooks never
OF_A_COMPILER = "_torchdynamo"  # how the names of torch.compile's notes begin, which have ids in them
OF_A_CLASS = frozenset(
    {"__module__", "__qualname__", "__doc__", "__annotations__", "__firstlineno__", "__static_attributes__"}
    | {"__dataclass_fields__", "__dataclass_params__", "__dict__", "__weakref__"}
)

Origin = Literal["python", "torch", "library", "own"]


def origin(module: str) -> Origin:
    """Return whose code a module has, by its name.

    >>> origin("collections.abc"), origin("torch.nn"), origin("numpy"), origin("__main__")
    ('python', 'torch', 'library', 'own')
    """
    top = module.partition(".")[0]
    if top == "__main__":
        return "own"
    if top in sys.stdlib_module_names:
        return "python"
    if top == "torch":
        return "torch"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "library" if {"site-packages", "dist-packages"} & set(Path(file).parts) else "own"


class Sight:
    """Describes values. An object that was described before is only named by its number, so circles end.

    >>> Sight().see({"sizes": (3, 4), "act": torch.relu})
    ['dict', [["'act'", ['relu', None]], ["'sizes'", ['tuple', ['3', '4']]]]]
    """

    def __init__(self, depth: int = DEPTH) -> None:
        self._numbers: dict[int, int] = {}  # id of an object → its number
        self._met: list[Any] = []  # kept alive, so that no other object can get the id of one of these
        self._depth = depth
        self._things = THINGS

    def see(self, value: Any) -> Any:
        """Return the description of a value: text, or lists of lists and text."""
        flat = _flat(value)
        if flat is not None:
            return flat
        # A tuple has no number: two that are equal may be one object in a process that compiled the script, and two
        # in one that read the compiled file.
        if type(value) not in (tuple, frozenset, CodeType):
            if id(value) in self._numbers:
                return f"#{self._numbers[id(value)]}"
            self._numbers[id(value)] = len(self._met)
            self._met.append(value)
        if not self._depth or not self._things:
            return _kind(value)
        self._depth -= 1
        self._things -= 1
        try:
            return self._compound(value)
        finally:
            self._depth += 1

    def _compound(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            few = value.size <= FEW and value.dtype.kind in "iub"
            return [str(value.dtype), list(value.shape), value.tolist() if few else None]
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, CodeType):
            return [value.co_code.hex(), list(value.co_names), [self.see(constant) for constant in value.co_consts]]
        if isinstance(value, MethodType):
            return [self.see(value.__func__), self.see(value.__self__)]
        if isinstance(value, BuiltinFunctionType):  # torch.relu is one, and so is [].append
            return [value.__name__, None if _is_home(value.__self__) else self.see(value.__self__)]
        if isinstance(value, functools.partial | functools.partialmethod):
            return ["partial", self.see(value.func), self.see(value.args), self.see(value.keywords)]
        return self._object(value)

    # --- tensors and modules ----------------------------------------------------------------------

    def _tensor(self, tensor: Tensor, *, registered: bool = False) -> list[Any]:
        few = not registered and tensor.numel() <= FEW and not tensor.is_floating_point() and not tensor.is_complex()
        return [str(tensor.dtype), list(tensor.shape), tensor.requires_grad, tensor.tolist() if few else None]

    def _module(self, module: nn.Module) -> list[Any]:
        kept = [name for name in vars(module) if name not in OF_A_MODULE and not name.startswith(OF_A_COMPILER)]
        own = {name: vars(module)[name] for name in kept}
        tensors = {**module._parameters, **module._buffers}
        parts = [[name, self.see(part)] for name, part in module._modules.items()]
        return [self.see(type(module)), self._named(own), self._registered(tensors), parts]

    def _registered(self, tensors: dict[str, Any]) -> list[Any]:
        """Describe parameters and buffers, but not their values: training changes those.

        A shared one is described where it is met first, and named by its number elsewhere.
        """
        seen = []
        for name, tensor in tensors.items():
            if tensor is None or id(tensor) in self._numbers:
                seen.append([name, self.see(tensor)])
                continue
            self._numbers[id(tensor)] = len(self._met)
            self._met.append(tensor)
            seen.append([name, self._tensor(tensor, registered=True)])
        return seen

    # --- code -------------------------------------------------------------------------------------

    def _function(self, function: FunctionType) -> list[Any]:
        """Describe a function by its code, its defaults and closure, and the globals that it uses.

        Comments and line numbers are not part of that.
        """
        whose = origin(str(function.__globals__.get("__name__", "")))
        if whose in (
            "python",
            "torch",
        ):  # torch's version is in the key; but what a decorator of torch wraps may be anybody's
            wrapped = getattr(function, "__wrapped__", None)
            return [function.__module__, function.__qualname__, self.see(wrapped)]
        given = [self.see(function.__defaults__), self.see(function.__kwdefaults__)]
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        reached = {name: function.__globals__[name] for name in _names(function.__code__) & function.__globals__.keys()}
        elsewhere = self._named(reached) if whose == "own" else []
        return [function.__qualname__, self.see(function.__code__), given, cells, elsewhere]

    def _cell(self, cell: CellType) -> Any:
        try:
            return self.see(cell.cell_contents)
        except ValueError:  # the cell is empty
            return None

    def _class(self, cls: type) -> list[Any]:
        whose = origin(cls.__module__)
        if whose in ("python", "torch"):
            return [cls.__module__, cls.__qualname__]
        members = {
            name: member
            for name, member in vars(cls).items()
            if name not in OF_A_CLASS and (whose == "own" or isinstance(member, CODE))  # a library keeps caches there
        }
        return [cls.__qualname__, [self.see(base) for base in cls.__bases__], self._named(members)]

    # --- objects ----------------------------------------------------------------------------------

    def _object(self, value: Any) -> list[Any]:
        """Describe a container by its content, anything else by its class and attributes."""
        content = self._content(value) if isinstance(value, CONTAINERS) else []
        if type(value) in CONTAINERS:
            return [type(value).__name__, *content]
        attributes = _attributes(value)
        whose = origin(type(value).__module__)
        if whose == "torch" or type(value).__module__.partition(".")[0] == "holdfast":  # has caches
            attributes = {name: one for name, one in attributes.items() if _flat(one) is not None}
        elif whose == "python" and not isinstance(value, SimpleNamespace | argparse.Namespace):  # a lock, a file
            attributes = {name: getattr(value, name) for name in WRAPPED if hasattr(value, name)}
        named = getattr(value, "__name__", None)
        return [self.see(type(value)), named if isinstance(named, str) else None, self._named(attributes), *content]

    def _content(self, value: Any) -> list[Any]:
        more = [len(value)] if len(value) > ENTRIES else []
        if isinstance(value, dict | MappingProxyType):
            keys = self._sorted(value)[:ENTRIES]
            return [[[self.see(key), self.see(value[key])] for key in keys], *more]
        if isinstance(value, set | frozenset):
            return [[self._alone(one) for one in self._sorted(value)[:ENTRIES]], *more]
        return [[self.see(one) for _, one in zip(range(ENTRIES), value, strict=False)], *more]

    def _sorted(self, values: Iterable[Any]) -> list[Any]:
        """Sort by description: sets have another order in every process, and keys of a dict may not be comparable."""
        return sorted(values, key=lambda value: json.dumps(self._alone(value)))

    def _alone(self, value: Any) -> Any:
        """Describe a value as if nothing had been described before it.

        Elements of a set are sorted by this. Objects' numbers cannot be used for that: they depend on the order of
        meeting them, and that order is being decided here.
        """
        flat = _flat(value)
        return Sight(max(0, self._depth - 1)).see(value) if flat is None else flat

    def _named(self, attributes: dict[str, Any]) -> list[Any]:
        """Describe named values, sorted by name."""
        return [[name, self.see(attributes[name])] for name in sorted(attributes)]


def _flat(value: Any) -> str | None:
    """Return the description of a value that has no parts; None for other values."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name} {_flat(value.value)}"
    if type(value) in EXACT or isinstance(value, SPOKEN):
        return repr(value)
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    return None


def _attributes(value: Any) -> dict[str, Any]:
    """An object's attributes, also those in slots; and its own number or text, if its class is derived from one."""
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    kept = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    number = [base.__repr__(value) for base in NUMBERS if isinstance(value, base)]
    return {**kept, **getattr(value, "__dict__", {}), **({"": number} if number else {})}


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = f"_{cls.__name__.lstrip('_')}"  # Python prefixes names that begin with two underscores
    return tuple(f"{private}{name}" if name[:2] == "__" else name for name in names)


def _names(code: CodeType) -> set[str]:
    """All names that a function's code may look up, also in functions inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _kind(value: Any) -> str:
    return type(value).__qualname__


def _is_home(owner: Any) -> bool:
    """Return whether the owner of a builtin function is a module or a class, and not a value whose method it is."""
    return owner is None or isinstance(owner, ModuleType | type)
