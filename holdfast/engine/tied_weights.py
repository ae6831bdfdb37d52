"""Weights that several layers share.

``tied`` is the user's way to say that a layer has the weight of another one. ``alias_shared`` prepares such a model for
training: each layer gets a leaf of its own of the shared weight, so that its gradient can be told apart.

Why leaves: the gradient of a shared weight is the sum of its uses' gradients, and the layers that use it may be on
different workers. Sums of floating-point numbers depend on their order, so the order is fixed: each use is summed
over the micro-batches by itself, and the uses are added in the order of the layers (``tied_gradients.py``), on every
layout and in one process too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from torch import nn

from holdfast.errors import UsageError
from holdfast.words import a_kind

Module = TypeVar("Module", bound=nn.Module)
Aliases = list[tuple[nn.Parameter, nn.Parameter]]  # (the later layer's own leaf, the weight that it stands for)
# A hint: how to name the parameter of another layer.
BY_NAME = "layer number and name, as in '0.weight'"


@dataclass(frozen=True, kw_only=True)
class Tied:
    """A function that makes a layer, and the names of the parameters that the layer shares."""

    make: Callable[[], nn.Module]
    shared: dict[str, str]  # name in the layer → name in the model

    def __call__(self) -> nn.Module:
        return self.make()


@overload
def tied(layer: Module, /, **shared: nn.Parameter | str) -> Module: ...
@overload
def tied(layer: Callable[[], nn.Module], /, **shared: nn.Parameter | str) -> Tied: ...
def tied(layer: Any, /, **shared: nn.Parameter | str) -> Any:
    """Tie parameters of a layer to those of another one, in training and in every layout.

    ``layer`` is a module, or a function that makes one. Each keyword is the name of a parameter in it. The value is the
    parameter that takes its place:

    >>> embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    >>> head = tied(head, weight=embedding.weight)
    >>> head.weight is embedding.weight
    True

    or that parameter's name in the model: the number of its layer, and its name there. So a layer can be tied that is
    given as a function, and made only where it is needed. Names with dots go in as ``**{"score.weight": ...}``.

    >>> head = tied(lambda: nn.Linear(4, 7, bias=False), weight="0.weight")
    >>> shared_names(head)
    {'weight': '0.weight'}

    Returns the layer; for a function, another function that makes it. Raises ``UsageError`` if a name is unknown, or if
    shape or type do not fit.
    """
    if not shared:
        raise UsageError("tied needs the names of parameters to share", hint="tied(head, weight=embedding.weight)")
    for name, value in shared.items():
        if isinstance(value, str) and not re.fullmatch(r"\d+(\.\w+)+", value):
            raise UsageError(f"'{name}' is tied to '{value}', which names no layer's parameter", hint=BY_NAME)
        if not isinstance(value, nn.Parameter | str):
            raise UsageError(f"'{name}' is tied to {a_kind(value)}", hint="a parameter, or the name of one")
    if isinstance(layer, nn.Module):
        return _tie_module(layer, shared)
    if not callable(layer):
        raise UsageError(
            f"tied takes a layer, not {type(layer).__name__}", hint="a module, or a function that makes it"
        )
    names = {name: value for name, value in shared.items() if isinstance(value, str)}
    if len(names) < len(shared):
        raise UsageError("a function's layer can share parameters by their names only", hint=BY_NAME)
    return Tied(make=layer, shared={**shared_names(layer), **names})


def _tie_module(module: nn.Module, shared: dict[str, nn.Parameter | str]) -> nn.Module:
    """Tie parameters that are given now; note names for ``LayeredModel``, which knows the other layers."""
    later = shared_names(module)
    for name, value in shared.items():  # all are checked before one is changed
        if isinstance(value, str):
            _owner(module, name)
            later[name] = value
        else:
            _check_fit(module, name, value)
    for name, value in shared.items():
        if isinstance(value, nn.Parameter):
            share(module, name, value)
    if later:
        module.holdfast_shared = later  # type: ignore[assignment]
    return module


def shared_names(layer: Any) -> dict[str, str]:
    """Return what a layer, or a function that makes it, shares by name: name in the layer → name in the model.

    >>> shared_names(nn.Linear(1, 1))
    {}
    """
    if isinstance(layer, Tied):
        return dict(layer.shared)
    return dict(getattr(layer, "holdfast_shared", {}))


def share(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put another layer's parameter in the place of a module's own. Raises ``UsageError`` if it does not fit.

    >>> share(nn.Linear(2, 3), "weight", nn.Parameter(nn.Linear(3, 2).weight))
    Traceback (most recent call last):
    holdfast.errors.UsageError: 'weight' of Linear has shape (3, 2), the parameter it is tied to (2, 3)
    """
    _check_fit(module, name, parameter)
    _owner(module, name)[0]._parameters[name.rpartition(".")[2]] = parameter


def _check_fit(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    own = _owner(module, name)[1]
    facts = {"shape": (tuple(own.shape), tuple(parameter.shape)), "dtype": (own.dtype, parameter.dtype)}
    for what, (mine, other) in facts.items():
        if mine != other:
            kind = type(module).__name__
            raise UsageError(f"'{name}' of {kind} has {what} {mine}, the parameter it is tied to {other}")


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, nn.Parameter]:
    """Return the submodule that has the parameter ``name``, and the parameter. Raises ``UsageError``."""
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
        parameter = owner._parameters[last]
    except (AttributeError, KeyError):
        parameter = None
    if parameter is None:
        names = [each for each, _ in module.named_parameters()]
        listed = f"it has {', '.join(names[:6])}{' …' if len(names) > 6 else ''}" if names else "it has none"
        raise UsageError(f"{type(module).__name__} has no parameter '{name}'", hint=listed)
    return owner, parameter


# --- leaves of shared weights ---------------------------------------------------------------------


def alias_shared(whole: nn.Module, layers: list[nn.Module]) -> Aliases:
    """Give every layer but the first one that uses a parameter a leaf of its own, in the same memory.

    Returns the leaves with the parameters that they stand for. A module that is in several layers is copied, but not
    its tensors; ``layers`` and ``whole`` are changed to have the copies.

    >>> block = nn.Linear(2, 2)
    >>> whole = nn.Sequential(block, nn.ReLU(), block)
    >>> layers = list(whole)
    >>> [(alias, weight)] = alias_shared(whole, layers)[:1]
    >>> weight is block.weight, alias is layers[2].weight, alias.data_ptr() == weight.data_ptr()
    (True, True, True)
    """
    aliases: Aliases = []
    seen: dict[int, int] = {}  # id of a parameter → the first layer that has it
    modules: set[int] = set()  # ids of the modules of earlier layers
    for number in range(len(layers)):
        layers[number] = _apart(whole, layers[number], number, modules)
        modules.update(id(m) for m in layers[number].modules() if next(m.parameters(), None) is not None)
        fresh: dict[int, nn.Parameter] = {}  # id of a shared parameter → this layer's leaf
        for module in layers[number].modules():
            for name, p in list(module._parameters.items()):
                if p is None or seen.setdefault(id(p), number) == number:
                    continue
                if id(p) not in fresh:
                    fresh[id(p)] = nn.Parameter(p.data, requires_grad=p.requires_grad)
                    aliases.append((fresh[id(p)], p))
                module._parameters[name] = fresh[id(p)]
    return aliases


def _apart(whole: nn.Module, layer: nn.Module, number: int, earlier: set[int]) -> nn.Module:
    """Return the layer with copies in the place of modules that ``earlier`` layers have too."""
    if id(layer) in earlier:
        twin = _twin(layer, whole)
        for name, child in list(whole._modules.items())[number : number + 1]:
            if child is layer:
                whole._modules[name] = twin
        return twin
    _replace(layer, earlier, whole)
    return layer


def _replace(module: nn.Module, earlier: set[int], whole: nn.Module) -> None:
    for name, child in module._modules.items():
        if child is not None and id(child) in earlier:
            module._modules[name] = _twin(child, whole)
        elif child is not None:
            _replace(child, earlier, whole)


def _twin(module: nn.Module, whole: nn.Module) -> nn.Module:
    """Copy a module, but not its tensors, nor others of the model that it may refer to."""
    kept = {id(tensor): tensor for part in (whole, module) for tensor in [*part.parameters(), *part.buffers()]}
    return copy.deepcopy(module, kept)
