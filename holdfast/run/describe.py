"""Settings, functions, modules and optimizers as short text that is the same in every process.

Two workers with the same code and settings get the same text: no address, no hash of Python's, no order of a set and
no path goes in. What cannot be compared between machines is left out, and so are attributes whose names begin with an
underscore. (``engine/profile/sight.py`` goes deeper: it may tell too many things apart, because it refuses nobody.)
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.engine.profile.sight import Sight, origin
from holdfast.words import count

DIGITS = 8  # hexadecimal digits of a digest: 32 bits, enough for differences that nobody contrives
LONG = 120  # letters of a value that is shown whole; a longer one is cut, and its digest added
DEPTH = 5  # values inside values; a deeper one is not compared, so that circles end
ENTRIES = 1000  # of a container that is compared; of a larger one, such as a vocabulary, only the number is
MOST = 500  # modules of a model that are named one by one; those of a larger model are joined
OF_A_MODULE = frozenset(vars(nn.Module()))
OF_AN_OPTIMIZER = frozenset({"defaults", "state", "param_groups"})


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def shortened(text: str) -> str:
    """Return a text in one line; the end of a long one is replaced by a digest of the whole.

    >>> shortened("Linear(2, 1)"), shortened("x" * 200)[-12:]
    ('Linear(2, 1)', 'xx… aa20c23e')
    """
    text = " ".join(text.split())
    return text if len(text) <= LONG else f"{text[: LONG - DIGITS - 2]}… {digest(text)}"


def describe(value: Any, depth: int = DEPTH) -> str | None:
    """Return a setting as text; None if it cannot be compared between machines, as a path cannot.

    Numbers that are equal have equal text. A function is described by its code, an object that is called as one by its
    class and settings, any other object by its class.

    >>> describe(1.0), describe(1), describe((0.9, None)), describe({"b": torch.float32, "a": "/tmp/x"})
    ('1', '1', '[0.9, None]', '{b: float32}')
    """
    if depth == 0:
        return None
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and not value.dim() and not value.is_meta):
        value = value.item()
    if isinstance(value, str | PurePath):
        return None if isinstance(value, PurePath) or "/" in value or "\\" in value else value
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | bytes | range | slice):
        return str(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)
    if isinstance(value, torch.device):
        return value.type  # its number differs from worker to worker
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return _tensor(value)
    return _code(value, depth) or _container(value, depth) or type(value).__qualname__


def _tensor(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {'x'.join(map(str, tensor.shape))}{' trained' if tensor.requires_grad else ''}".replace("  ", " ")


def _container(value: Any, depth: int) -> str | None:
    """Describe what is in a container; None if the value is none."""
    if isinstance(value, Mapping | list | tuple | set | frozenset) and len(value) > ENTRIES:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        found = {describe(key, depth - 1): describe(one, depth - 1) for key, one in value.items()}
        return "{" + ", ".join(sorted(f"{k}: {v}" for k, v in found.items() if k is not None and v is not None)) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        all_of_it = [str(describe(one, depth - 1)) for one in value]
        return "[" + ", ".join(sorted(all_of_it) if isinstance(value, set | frozenset) else all_of_it) + "]"
    return None


def _code(value: Any, depth: int) -> str | None:
    """Describe a function, or an object that is called as one; None if the value is none."""
    if isinstance(value, FunctionType):
        return _function(value, depth)
    if isinstance(value, type | BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, MethodType):
        return f"{describe(value.__func__, depth - 1)} of {describe(value.__self__, depth - 1)}"
    if isinstance(value, functools.partial):
        given = [describe(part, depth - 1) for part in (value.func, value.args, value.keywords)]
        return f"partial({', '.join(map(str, given))})"
    if depth < DEPTH:  # an object inside another value may have that in it: its class will do
        return None
    if isinstance(value, nn.Module):
        return ", ".join(module_text(each, depth - 1) for each in value.modules())
    return settings_text(value, depth=depth - 1) if callable(value) and hasattr(value, "__dict__") else None


def _function(function: FunctionType, depth: int) -> str:
    """Describe a function by its name and a digest of its code, defaults and closure.

    Its line numbers, and the globals that it uses, are no part of that: the files of code are compared too.
    """
    if origin(str(function.__globals__.get("__name__", ""))) in ("python", "torch"):  # their versions are compared
        return function.__qualname__
    given = [function.__defaults__, function.__kwdefaults__, *map(_content, function.__closure__ or ())]
    code = [Sight().see(function.__code__), *[describe(one, depth - 1) for one in given]]
    return f"{function.__qualname__} {digest(json.dumps(code))}"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a cell that is not filled yet
        return None


# --- modules --------------------------------------------------------------------------------------


def settings_text(owner: object, leave_out: Iterable[str] = (), depth: int = DEPTH) -> str:
    """Return an object's class and its public attributes, as far as they can be compared."""
    left_out = set(leave_out)
    kept = {name: one for name, one in vars(owner).items() if name[:1] != "_" and name not in left_out}
    texts = {name: describe(one, depth - 1) for name, one in sorted(kept.items())}
    shown = ", ".join(f"{name}={text}" for name, text in texts.items() if text is not None)
    return f"{type(owner).__qualname__}({shown})"


def module_text(module: nn.Module, depth: int = DEPTH) -> str:
    """Return a module's class, settings, and its own parameters and buffers, without the modules in it.

    >>> module_text(nn.Dropout(0.2))
    'Dropout(inplace=False, p=0.2)'
    """
    own = {**module._parameters, **module._buffers}
    tensors = [f"{name} {_tensor(tensor)}" for name, tensor in own.items() if tensor is not None]
    return "; ".join([settings_text(module, OF_A_MODULE, depth), *tensors])


def modules_of(model: nn.Module, most: int = MOST) -> dict[str, str]:
    """Return the structure of a model: the name of each module, with its text.

    A model of more than ``most`` modules is described by those further up, each with a digest of what is in it.

    >>> modules_of(nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))
    {'': 'Sequential()', '0': 'ReLU(inplace=False)', '1': 'Dropout(inplace=False, p=0.5)'}
    """
    texts = {name: module_text(module) for name, module in model.named_modules()}
    groups = {name: [name] for name in texts}  # the names of the modules that are described together
    for depth in range(max(name.count(".") for name in texts), -1, -1):
        if len(groups) <= most:
            break
        groups = {}
        for name in texts:
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    return {name: _joined({each: texts[each] for each in group}) for name, group in groups.items()}


def _joined(texts: dict[str, str]) -> str:
    first, *others = texts.values()
    if not others:
        return shortened(first)
    return f"{shortened(first)} with {count(len(others), 'module')} in it, {digest(json.dumps(texts))}"


# --- optimizers -----------------------------------------------------------------------------------


def optimizer_settings(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> dict[str, str]:
    """Return an optimizer's class and the values of its groups by name. ``parameters``: all that are trained, in order.

    >>> p = nn.Parameter(torch.zeros(1))
    >>> optimizer_settings(torch.optim.SGD([p], lr=0.1), [p])["lr"]
    '0.1'
    """
    numbers = {p: number for number, p in enumerate(parameters)}
    found = {"class": shortened(settings_text(optimizer, OF_AN_OPTIMIZER))}
    groups = optimizer.param_groups
    for name in sorted({name for group in groups for name in group} - {"params"}):
        values = [str(describe(group.get(name))) for group in groups]
        found[name] = shortened(values[0] if len(set(values)) == 1 else ", ".join(values))
    places = [[numbers.get(p, -1) for p in group["params"]] for group in groups]
    found["groups"] = f"{', '.join(str(len(group)) for group in places)} parameters, {digest(json.dumps(places))}"
    return {name: shortened(text) for name, text in found.items()}
