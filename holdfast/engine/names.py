"""The names of a model's tensors, and which of them are here: every worker knows all names, and holds some layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from holdfast.engine.model import LayeredModel, Unit

Held = Callable[[Unit], bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class Named:
    """What a name stands for. A tied weight has several names, and is the same ``tensor`` under each of them.

    ``layers`` are those that need it: whoever holds one of them has it. None: it belongs to no layer,
    and everybody has it.
    """

    value: Any
    tensor: Tensor | None  # None: a module's extra state, which is something else
    layers: frozenset[int]
    held: bool


class Names:
    """Finds for every name of the whole module the layers that it belongs to. Who asks says which units are held.

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
        """What the module's ``state_dict`` lists, in its order."""
        listed = self._model.module.state_dict(keep_vars=True)
        return {name: self._named(name, value, held) for name, value in listed.items()}

    def transient(self, held: Held) -> dict[str, Named]:
        """Buffers that the module does not want to be saved."""
        saved = self._model.module.state_dict(keep_vars=True)
        buffers = self._model.module.named_buffers()
        return {name: self._named(name, buffer, held) for name, buffer in buffers if name not in saved}

    def extra(self) -> dict[int, list[str]]:
        """What modules save beside their tensors (extra state), by the unit that it goes with."""
        found: dict[int, list[str]] = {}
        for name, value in self._model.module.state_dict(keep_vars=True).items():
            if id(self._primaries.get(id(value), value)) not in self._units and (layers := self._layers_with(name)):
                found.setdefault(min(layers), []).append(name)
        return found

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer has, in its order, each by the first of its names."""
        names: dict[int, str] = {}
        for name, p in self._model.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(self._primaries.get(id(p), p)), name)
        return {names[id(p)]: p for p in self._model.trainable}

    def has(self, p: Tensor, held: Held) -> bool:
        """Whether a parameter of the optimizer's is held; what belongs to no layer is, by everybody."""
        unit = self._units.get(id(p))
        return unit is None or held(unit)

    def _named(self, name: str, value: Any, held: Held) -> Named:
        tensor = self._primaries.get(id(value), value)
        unit = self._units.get(id(tensor))
        layers = self._layers_with(name) if unit is None else unit.layers
        # Of what is no tensor of a layer's, whoever holds the layer's own tensors has it.
        owners = [unit] if unit is not None else [self._model.units[layer] for layer in layers]
        here = any(map(held, owners)) or not owners
        return Named(value=value, tensor=tensor if isinstance(tensor, Tensor) else None, layers=layers, held=here)

    def _layers_with(self, name: str) -> frozenset[int]:
        """The layers whose module gives a name that is no tensor of theirs, such as extra state."""
        path = name.split(".")[:-1]
        for length in range(len(path), -1, -1):
            try:
                owner = self._model.module.get_submodule(".".join(path[:length]))
            except AttributeError:  # a name that a module's hook made up
                continue
            layers = enumerate(self._model.layers)
            if found := frozenset(number for number, layer in layers if any(m is owner for m in layer.modules())):
                return found
        return frozenset()
