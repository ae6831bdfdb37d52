"""Weights that several layers share: each layer gets a leaf of its own, so that its gradient can be told apart.

The gradient of a shared weight is the sum of its uses' gradients, and the layers that use it may be on
different workers. Sums of floating-point numbers depend on their order, so the order is fixed: each use is
summed over the micro-batches by itself, and the uses are added in the order of the layers, on every layout and in
one process too.
"""

from __future__ import annotations

import copy

from torch import nn

Aliases = list[tuple[nn.Parameter, nn.Parameter]]  # (the later layer's own leaf, the weight that it stands for)


def alias_shared(whole: nn.Module, layers: list[nn.Module]) -> Aliases:
    """Gives every layer but the first that uses a parameter a leaf of its own, in the same memory.

    A module that is in several layers is copied but for its tensors; ``layers`` and ``whole`` get the copies.

    >>> block = nn.Linear(2, 2)
    >>> whole = nn.Sequential(block, nn.ReLU(), block)
    >>> layers = list(whole)
    >>> [(alias, weight)] = alias_shared(whole, layers)[:1]
    >>> weight is block.weight, alias is layers[2].weight, alias.data_ptr() == weight.data_ptr()
    (True, True, True)
    """
    aliases: Aliases = []
    seen: dict[int, int] = {}  # parameter → the first layer that has it
    modules: set[int] = set()  # of earlier layers
    for number in range(len(layers)):
        layers[number] = _apart(whole, layers[number], number, modules)
        modules.update(id(m) for m in layers[number].modules() if next(m.parameters(), None) is not None)
        fresh: dict[int, nn.Parameter] = {}
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
    """The layer without modules that earlier layers have too: copies of those stand in for them."""
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
    """Another module with the same tensors, and with those of others that it may refer to."""
    kept = {id(tensor): tensor for part in (whole, module) for tensor in [*part.parameters(), *part.buffers()]}
    return copy.deepcopy(module, kept)
