"""Sends a micro-batch through the model with every boundary cut, and measures each layer.

A pass is a real one, forward through all layers and backward through all of them, as the stages of a pipeline would
compute it: each layer gets a copy of its input that is cut off from the layer before, and the gradient of that copy is
what the backward pass of the layer before begins with. So time can be read, and bytes counted, at every boundary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from holdfast.data.fetch import pair, to_device
from holdfast.engine.boundary import tensors_in
from holdfast.engine.engine import Engine
from holdfast.errors import UsageError
from holdfast.rng import seed_of, seed_torch
from holdfast.words import a_kind

# What a layer may give beside tensors: it can be sent to another worker.
Plain = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def micro_batch(engine: Engine) -> tuple[Any, Any]:
    """Return inputs and targets of the run's first micro-batch, which always has its full size."""
    if engine.takes_model:
        raise UsageError(
            "a model that its loss calls is one layer: there is nothing to plan",
            hint="layers= with loss(output, target)",
        )
    return pair(to_device(engine.feed.read(0, 0), engine.model.device))


@dataclass(kw_only=True)
class Crossing:
    """A boundary that was cut: the tensors that the layer before gave, and those that the next one gets."""

    given: list[Tensor]
    leaves: list[Tensor]  # the same values, cut off; their gradients are what goes back over the boundary
    inputs: Any  # copies, because a layer may write into its input

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.given)

    @property
    def gradient_bytes(self) -> int:
        return sum(leaf.grad.nbytes for leaf in self.leaves if leaf.grad is not None)

    @property
    def goes_back(self) -> bool:
        """Whether a gradient can come back over the boundary. Behind integers and frozen layers none does."""
        return any(tensor.requires_grad for tensor in self.given)


def cut(value: Any) -> Crossing:
    """Cut what one layer hands to the next.

    >>> given = torch.ones(3, requires_grad=True) * 2
    >>> crossing = cut((given, torch.tensor([7])))
    >>> crossing.inputs[0].sum().backward(); crossing.bytes, crossing.gradient_bytes, given.grad_fn is None
    (20, 12, False)
    """
    given = tensors_in(value)
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
    copies = {id(tensor): leaf.clone() for tensor, leaf in zip(given, leaves, strict=True)}
    return Crossing(given=given, leaves=leaves, inputs=tree_map(lambda leaf: copies.get(id(leaf), leaf), value))


@dataclass(kw_only=True)
class Pass:
    """The measurements of one pass, one entry for each layer in each list."""

    forward: list[float] = field(default_factory=list)  # seconds
    backward: list[float] = field(default_factory=list)  # seconds; 0: no gradient came back to the layer
    output_bytes: list[int] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)


# Makes a context around a layer's forward pass, given the layer's number and its inputs.
Watch = Callable[[int, Any], AbstractContextManager[Any]]


class Passes:
    """Sends one micro-batch of a run through its model as often as asked. No weight is changed."""

    def __init__(self, engine: Engine, inputs: Any, targets: Any) -> None:
        self._engine = engine
        self._inputs = inputs
        self._targets = targets
        self._model = engine.model
        self._last = len(engine.model.layers) - 1
        self._weight = engine.order.micro_batch / engine.order.batch_size(0)  # of the loss, in its step
        engine.model.module.train()

    def one(self, watch: Watch = lambda number, inputs: nullcontext()) -> Pass:
        """Compute one pass, with time read at every boundary. The loss belongs to the last layer.

        Gradients of parameters are added to those of the pass before, as those of a step's micro-batches are. ``watch``
        makes a context around each layer's forward pass. Raises ``UsageError`` if a layer gives what cannot be sent,
        has no backward pass of its own, or if the loss depends on no parameter.
        """
        record = Pass()
        crossings = [cut(self._inputs)]
        for number in range(self._last + 1):
            inputs = crossings[-1].inputs
            with self._autocast(), watch(number, inputs):
                begin = self._now()
                output = self._layer(number, inputs)
                record.forward.append(self._now() - begin)
            self._check(number, output)
            crossings.append(cut(output))
            record.output_bytes.append(crossings[-1].bytes if number < self._last else 0)
        if not crossings[-1].goes_back:
            raise UsageError("the loss does not depend on any parameter", hint="check requires_grad, and detach()")
        crossings[-1].leaves[0].grad = torch.full_like(crossings[-1].leaves[0], self._weight)
        while len(crossings) > 1:
            number = len(crossings) - 2
            behind = crossings.pop()
            record.gradient_bytes.append(behind.gradient_bytes if number < self._last else 0)
            record.backward.append(self._backward(number, behind))
        record.gradient_bytes.reverse()
        record.backward.reverse()
        return record

    def _layer(self, number: int, inputs: Any) -> Any:
        seed_torch(seed_of(self._model.seed, 0, 0, number), self._model.device)
        output = self._model.layers[number](inputs)
        if number < self._last:
            return output
        assert self._engine.loss is not None
        loss = self._engine.loss(output, self._targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("loss must give one number, the mean over the samples", hint="reduction='mean'")
        return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss

    def _backward(self, number: int, behind: Crossing) -> float:
        pairs = zip(behind.given, behind.leaves, strict=True)
        known = [(tensor, leaf.grad) for tensor, leaf in pairs if tensor.requires_grad and leaf.grad is not None]
        if not known:
            return 0.0
        begin = self._now()
        try:
            torch.autograd.backward([tensor for tensor, _ in known], [gradient for _, gradient in known])
        except RuntimeError as e:
            raise UsageError(
                f"layer {number} ({type(self._model.layers[number]).__name__}) has no backward pass of its own: "
                f"{str(e).splitlines()[0][:200]}",
                hint="layers may share nothing but what one gives to the next, and weights",
            ) from e
        return self._now() - begin

    def _check(self, number: int, output: Any) -> None:
        odd = next((leaf for leaf in tree_leaves(output) if not isinstance(leaf, (Tensor, *Plain))), None)
        if odd is not None:
            raise UsageError(
                f"layer {number} ({type(self._model.layers[number]).__name__}) gives {a_kind(odd)}, "
                "which cannot be sent to another worker",
                hint="tensors, numbers and text, in tuples, lists or dicts",
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._engine.autocast
        return torch.autocast(self._model.device.type, dtype, enabled=dtype is not None)

    def _now(self) -> float:
        if self._model.device.type == "cuda":  # untested here
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


def saved_bytes(passes: Passes, engine: Engine) -> tuple[Pass, list[int]]:
    """Compute one pass; return it, and the bytes that each layer keeps for its backward pass (``note_saved``).

    A layer that no gradient comes back to keeps nothing.
    """
    saved: list[dict[int, int]] = []

    def watch(number: int, inputs: Any) -> AbstractContextManager[Any]:
        saved.append({})
        return note_saved(saved[-1], inputs, engine.model.module)

    one = passes.one(watch)
    return one, [sum(mine.values()) if seconds else 0 for mine, seconds in zip(saved, one.backward, strict=True)]


def note_saved(saved: dict[int, int], inputs: Any, module: nn.Module) -> AbstractContextManager[Any]:
    """Within this context around a layer's forward pass, note in ``saved`` what the layer keeps for its backward pass.

    That is its input and all that autograd saves, each storage once: address → bytes. Tensors of ``module`` do not
    count: they are there anyway.
    """
    weights = {storage_of(tensor)[0] for tensor in [*module.parameters(), *module.buffers()]}

    def note(tensor: Tensor) -> Tensor:
        address, size = storage_of(tensor)
        if address not in weights:
            saved[address] = size
        return tensor  # autograd keeps it alive, so no other tensor can get its address meanwhile

    for tensor in tensors_in(inputs):
        note(tensor)
    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's storage and its bytes. A view keeps all of its storage alive."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without one
        return id(tensor), tensor.nbytes
    return storage.data_ptr(), storage.nbytes()
