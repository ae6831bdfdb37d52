"""``holdfast.layers_of``: cuts an existing model into the layers that a ``Run`` executes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from holdfast.engine.hf.families import what_can_be_cut
from holdfast.engine.hf.split import from_transformers, layers_of_transformers
from holdfast.errors import UsageError

# The hint of every refusal.
YOURSELF = "pass layers=[...] yourself: modules, of which each takes what the one before it gives"


@dataclass(frozen=True, kw_only=True)
class CutModel:
    """A model and the layers that it was cut into. The layers' parameters are the model's own."""

    module: nn.Module  # the whole model: names of parameters are those it has here
    layers: list[nn.Module]  # to be run one after the other


def layers_of(model: nn.Module) -> CutModel:
    """Cut a model into layers. All names in its ``state_dict()`` stay as they are.

    An ``nn.Sequential`` or ``nn.ModuleList`` is cut at its items. GPT-2, Llama and BERT of transformers (tested with
    5.0.0, 5.10.4 and 5.22.2) are cut into the embedding, each block, and the final norm with the head. Their first
    layer takes what the data set gives as input: ``input_ids``, or a tuple ``(input_ids, attention_mask)``, or a
    dict with these names (GPT-2 and BERT also know ``token_type_ids``). The last layer gives what the model gives,
    such as logits; as a tuple if that is more than one thing. Tied weights stay tied.

    Raises ``UsageError`` if the model cannot be cut, with the reason.

    >>> cut = layers_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> len(cut.layers), list(cut.module.state_dict())
    (3, ['0.weight', '0.bias', '2.weight', '2.bias'])
    >>> layers_of(nn.Linear(2, 3))  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    holdfast.errors.UsageError: Linear cannot be cut into layers: only nn.Sequential, nn.ModuleList and ...
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"layers_of takes a torch module, not {type(model).__name__}", hint=YOURSELF)
    if from_transformers(model):
        layers = layers_of_transformers(model, hint=YOURSELF)
    elif isinstance(model, nn.Sequential | nn.ModuleList):
        layers = _items(model)
    else:
        raise _refused(model, f"only nn.Sequential, nn.ModuleList and {what_can_be_cut()} of transformers can")
    _check_complete(model, layers)
    return CutModel(module=model, layers=layers)


def _items(model: nn.Sequential | nn.ModuleList) -> list[nn.Module]:
    if isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward:
        raise _refused(model, "its forward is not that of nn.Sequential, and only it knows what it does")
    if not len(model):
        raise _refused(model, "it is empty")
    return list(model)


def _check_complete(model: nn.Module, layers: list[nn.Module]) -> None:
    """Refuse a model with a tensor that is in no layer: it would be neither trained, nor sent to other workers."""
    covered = {id(tensor) for layer in layers for _, tensor in _tensors(layer)}
    missed = [name for name, tensor in _tensors(model) if id(tensor) not in covered]
    if missed:
        raise _refused(model, f"no layer would have {', '.join(missed[:3])}{' …' if len(missed) > 3 else ''}")


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _refused(model: nn.Module, reason: str) -> UsageError:
    return UsageError(f"{type(model).__name__} cannot be cut into layers: {reason}", hint=YOURSELF)
