"""The names of a model's tensors, and which of them this worker has: it knows all names, but holds some layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from holdfast.checkpoint.objects import clean
from holdfast.engine.model import LayeredModel, Unit

Held = Callable[[Unit], bool]  # whether this worker holds a unit


@dataclass(frozen=True, kw_only=True, eq=False)
class Named:
    """A value of the module by its name. A tied weight has several names, and the same ``tensor`` under each.

    Whoever holds one of ``layers`` has it. If these are none, it belongs to no layer, and every worker has it.
    """

    value: Any
    tensor: Tensor | None  # None: no tensor but a module's extra state
    layers: frozenset[int]  # that need it
    held: bool  # whether this worker has it


class Names:
    """Finds the layers that each name of the whole module belongs to. The caller says which units are held.

    Names are those of the plain model, also where ``torch.compile`` has put it, or parts of it, into wrappers.

    >>> import torch
    >>> model = LayeredModel([nn.Linear(1, 1), nn.Linear(1, 1)], seed=0, device=torch.device("cpu"))
    >>> model.release([0])
    >>> {name: one.held for name, one in Names(model).saved(model.is_held).items()}
    {'0.weight': False, '0.bias': False, '1.weight': True, '1.bias': True}
    """

    def __init__(self, model: LayeredModel) -> None:
        self._model = model
        self._primaries = {id(alias): primary for alias, primary in model.aliases}
        self._units = {id(tensor): unit for unit in model.units for tensor in unit.tensors}

    def saved(self, held: Held) -> dict[str, Named]:
        """Return what the module's ``state_dict`` lists, in its order."""
        listed = self._model.module.state_dict(keep_vars=True)
        return {clean(name): self._named(name, value, held) for name, value in listed.items()}

    def transient(self, held: Held) -> dict[str, Named]:
        """Return the buffers that are not in ``state_dict`` (``persistent=False``)."""
        saved = self._model.module.state_dict(keep_vars=True)
        buffers = self._model.module.named_buffers()
        return {clean(name): self._named(name, buffer, held) for name, buffer in buffers if name not in saved}

    def extra(self) -> dict[int, list[str]]:
        """Return the names of extra state, which modules save beside their tensors, by the unit that it moves with.

        They are the keys of the module's ``state_dict``, with what wrappers put into them.
        """
        found: dict[int, list[str]] = {}
        for name, value in self._model.module.state_dict(keep_vars=True).items():
            if id(self._primaries.get(id(value), value)) not in self._units and (layers := self._layers_with(name)):
                found.setdefault(min(layers), []).append(name)
        return found

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer has, in its order, each by the first of its names."""
        names: dict[int, str] = {}
        for name, p in self._model.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(self._primaries.get(id(p), p)), clean(name))
        return {names[id(p)]: p for p in self._model.trainable}

    def has(self, p: Tensor, held: Held) -> bool:
        """Return whether a parameter is held. Every worker holds what belongs to no layer."""
        unit = self._units.get(id(p))
        return unit is None or held(unit)

    def _named(self, name: str, value: Any, held: Held) -> Named:
        tensor = self._primaries.get(id(value), value)
        unit = self._units.get(id(tensor))
        layers = self._layers_with(name) if unit is None else unit.layers
        # Extra state is in no unit. It is held with the unit of its layer, which has the layer's number.
        owners = [unit] if unit is not None else [self._model.units[layer] for layer in layers]
        here = any(map(held, owners)) or not owners
        return Named(value=value, tensor=tensor if isinstance(tensor, Tensor) else None, layers=layers, held=here)

    def _layers_with(self, name: str) -> frozenset[int]:
        """Return the layers that a name without a tensor, such as extra state, belongs to.

        A name is a path of modules and a last word. The innermost of these modules that is part of any layer decides.
        """
        path = name.split(".")[:-1]
        for length in range(len(path), -1, -1):
            try:
                owner = self._model.module.get_submodule(".".join(path[:length]))
            except AttributeError:  # a hook of ``state_dict`` made the name up: no module has it
                continue
            layers = enumerate(self._model.layers)
            if found := frozenset(number for number, layer in layers if any(m is owner for m in layer.modules())):
                return found
        return frozenset()
