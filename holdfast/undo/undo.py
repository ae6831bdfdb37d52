"""Undo of an optimizer's last step, from the gradients that it used. No copy of the state is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from holdfast.errors import UsageError
from holdfast.undo import rules as undo_rules
from holdfast.undo.lamb import Lamb
from holdfast.undo.rules import Group, Part, UndoRule

Gradients = Mapping[Parameter, Tensor] | Sequence[Tensor | None]
HINT = "use SGD, Adam, AdamW, Adagrad or Lamb, or give the optimizer a method undo(p, grad, state, group)"

RULES: dict[type[Optimizer], UndoRule] = {
    SGD: undo_rules.SGD,
    Adam: undo_rules.ADAM,
    AdamW: undo_rules.ADAM,
    Adagrad: undo_rules.ADAGRAD,
    Lamb: undo_rules.LAMB,
}

_UNWRITTEN = "no inverse of its step has been written"
# Optimizers of torch whose steps cannot be undone, and why.
REFUSED = {
    "LBFGS": "one step evaluates the model several times along a line, and what it tried is not kept",
    "SparseAdam": "it updates the rows that a sparse gradient names, and does not keep which",
    "Rprop": "it cuts its step sizes off at limits, and what was cut off is gone",
    "Adamax": "it keeps the maximum of old and new, and the smaller of them is gone",
    "Adafactor": "it keeps sums over rows and columns, and scales by norms of the update that are gone",
    "Muon": "it orthogonalises the update, and no inverse of its step has been written",
    "ASGD": "it overwrites its average, and no inverse of its step has been written",
    "Adadelta": _UNWRITTEN,
    "NAdam": _UNWRITTEN,
    "RAdam": _UNWRITTEN,
    "RMSprop": _UNWRITTEN,
}
# Options with which no optimizer's step can be undone, and why.
OPTIONS = {
    "amsgrad": "it keeps the maximum of old and new, and the smaller of them is gone",
    "capturable": "its counters live in a graph on the device",
    "differentiable": "its steps are part of a graph",
}


def check(optimizer: Optimizer) -> None:
    """Raise UsageError if the optimizer's steps cannot be undone. Call it when the optimizer is made.

    >>> p = Parameter(torch.ones(2))
    >>> check(torch.optim.AdamW([p]))
    >>> check(torch.optim.RMSprop([p]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    holdfast.errors.UsageError: steps of RMSprop cannot be undone: no inverse of its step has been written (use SGD, ...
    """
    name = type(optimizer).__name__
    if _own(optimizer) is not None:
        return
    if _rule(optimizer) is None:
        raise UsageError(f"steps of {name} cannot be undone: {_why_unknown(optimizer)}", hint=HINT)
    if getattr(optimizer, "_optimizer_step_post_hooks", None):
        raise UsageError(
            f"steps of {name} cannot be undone: a hook runs after them, and what it does is not known",
            hint="do after the step what the hook does, and undo it yourself",
        )
    for group in optimizer.param_groups:
        for option, reason in OPTIONS.items():
            if group.get(option):
                raise UsageError(
                    f"steps of {name} with {option}=True cannot be undone: {reason}", hint=f"use {option}=False"
                )
        for p in group["params"]:
            if p.dtype not in (torch.float32, torch.float64):
                raise UsageError(
                    f"steps of {name} on {str(p.dtype).removeprefix('torch.')} parameters cannot be undone",
                    hint="keep the parameters in float32 and compute in the other type, as autocast does",
                )


def undo_step(optimizer: Optimizer, grads: Gradients, *, first: Collection[Parameter] | None = None) -> None:
    """Undo the ``step()`` that used these gradients, up to rounding (docs/undo.md has the bounds).

    ``grads``: a mapping by parameter, or a sequence in the order of the optimizer's parameters, with None for a
    parameter that the step did not update. Pass the gradients as the step left them in ``p.grad``, or copies made
    before it. The hyper-parameters in ``param_groups`` must be those of that step: undo a scheduler's step first.
    ``first``: the parameters for which it was the very first step: their state is removed. None: find out from it.
    Raises UsageError if the step cannot be undone; then nothing has changed.

    >>> p = Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = torch.optim.AdamW([p], lr=0.5)
    >>> p.grad = torch.tensor([0.25, -4.0]); optimizer.step(); p.tolist()
    [0.49500006437301636, 2.490000009536743]
    >>> undo_step(optimizer, [p.grad]); p.tolist(), dict(optimizer.state)
    ([1.0, 2.0], {})
    """
    check(optimizer)
    with torch.no_grad():
        parts = [_part(optimizer, *each) for each in _given(optimizer, grads)]
        own, rule = _own(optimizer), _rule(optimizer)
        if own is not None:
            for part in parts:
                own(part.p, part.grad, part.state, part.group)
                if not part.state:
                    optimizer.state.pop(part.p, None)
            return
        assert rule is not None
        for part in parts:
            _look_over(part, rule)
        told = None if first is None else {id(p) for p in first}
        fresh = _worked_out(parts, rule) if told is None else [_told(part, rule, told) for part in parts]
        for part, is_first in zip(parts, fresh, strict=True):
            _undo(optimizer, part, rule, is_first=is_first)


def _undo(optimizer: Optimizer, part: Part, rule: UndoRule, *, is_first: bool) -> None:
    """Undo the step of one parameter, with the counter and the state that a first step has made."""
    rule.undo(part)
    if is_first and not isinstance(optimizer, Adagrad):  # Adagrad makes its state before the first step
        optimizer.state.pop(part.p, None)
    elif "step" in part.state:
        part.state["step"] -= 1


def _rule(optimizer: Optimizer) -> UndoRule | None:
    """Return the rule of the optimizer's class, or of the class whose step it inherits. None: there is none.

    A subclass that replaces one of the methods in ``_INNER`` changes the step, so the rule does not hold for it.
    """
    step = _unwrapped(getattr(optimizer.step, "__func__", optimizer.step))
    for known, rule in RULES.items():
        if isinstance(optimizer, known) and step is _unwrapped(known.step):
            pairs = [(getattr(type(optimizer), name, None), getattr(known, name, None)) for name in _INNER]
            return rule if all(_unwrapped(mine) is _unwrapped(theirs) for mine, theirs in pairs) else None
    return None


def _unwrapped(function: Any) -> Any:
    """Return the function as it was written. Profiling and torch.compile wrap the methods of each class separately."""
    while function is not None:
        inner = getattr(function, "__wrapped__", None) or getattr(function, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        function = inner
    return function


_INNER = ("_init_group", "_update")  # methods that the steps of the known optimizers call


def _own(optimizer: Optimizer) -> Callable[..., None] | None:
    """Return the optimizer's own ``undo`` method, if the user gave it one."""
    own = getattr(optimizer, "undo", None)
    return own if callable(own) else None


def _why_unknown(optimizer: Optimizer) -> str:
    """Return why there is no rule for an optimizer."""
    for known in RULES:
        if isinstance(optimizer, known):
            return f"it changes what {known.__name__} does in a step"
    for each in type(optimizer).__mro__:
        if each.__module__.startswith("torch.optim") and each.__name__ in REFUSED:
            return REFUSED[each.__name__]
    return "it is not an optimizer whose step has a known inverse"


def _given(optimizer: Optimizer, grads: Gradients) -> list[tuple[Parameter, Tensor, Group]]:
    """Return each updated parameter with its gradient and group. Raises UsageError if they do not belong together."""
    places = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    if isinstance(grads, Mapping):
        known = {p for p, _ in places}
        if strangers := sum(p not in known for p in grads):
            raise UsageError(f"{strangers} of the gradients belong to parameters that the optimizer does not have")
        return [(p, grads[p], group) for p, group in places if grads.get(p) is not None]
    if len(grads) != len(places):
        raise UsageError(
            f"{len(grads)} gradients for an optimizer of {len(places)} parameters",
            hint="give None for a parameter that the step did not update",
        )
    return [(p, grad, group) for (p, group), grad in zip(places, grads, strict=True) if grad is not None]


def _part(optimizer: Optimizer, p: Parameter, grad: Tensor, group: Group) -> Part:
    """Return everything that undoing one parameter needs. Raises UsageError for a gradient of another shape or type."""
    if grad.is_sparse or (grad.shape, grad.dtype, grad.device) != (p.shape, p.dtype, p.device):
        raise UsageError(f"{_words(grad)} is not a gradient of {_words(p)}")
    return Part(
        p=p,
        grad=grad,
        state=optimizer.state.get(p, {}),
        group=group,
        initial=float(optimizer.defaults.get("initial_accumulator_value", 0.0)),
        overwritten=_overwritten(p, grad, group),
    )


def _look_over(part: Part, rule: UndoRule) -> None:
    """Raise UsageError if a part cannot be undone. All parts are looked over before any is changed."""
    p, grad, state, group = part.p, part.grad, part.state, part.group
    slots = rule.slots(group)
    if any(state.get(slot) is None for slot in slots) or (rule is not undo_rules.SGD and float(state["step"]) < 1):
        raise UsageError(f"the optimizer has no step to undo for {_words(p)}", hint="give None for its gradient")
    if group.get("fused") and p.grad is not None and _order(p.grad) != _order(p):
        _refuse(part, "its gradient lies in another memory order, and the fused kernel goes by memory")
    if not all(_finite(tensor) for tensor in (p, grad, *(state[slot] for slot in slots))):
        _refuse(part, "not all numbers of parameter, gradient and state are finite")
    _refuse(part, rule.refusal(part))


def _worked_out(parts: Sequence[Part], rule: UndoRule) -> list[bool]:
    """Return for which parts it was the first step. A part that does not show it is taken to be like the others."""
    seen = [rule.is_first(part) for part in parts]
    others = False not in seen
    return [others if each is None else each for each in seen]


def _told(part: Part, rule: UndoRule, first: Collection[int]) -> bool:
    """Return whether the caller said that it was a part's first step. Raises UsageError if the counter denies it."""
    told = id(part.p) in first
    if told and "step" in part.state and not rule.is_first(part):
        _refuse(part, f"it is said to be the first step, but the state counts {float(part.state['step']):g}")
    return told


def _overwritten(p: Tensor, grad: Tensor, group: Group) -> bool:
    """Whether the step has overwritten the gradient.

    torch's foreach kernel of Nesterov momentum adds the buffer into ``p.grad`` itself, unless it had to copy it.
    """
    if not group.get("nesterov") or group["weight_decay"] != 0 or group["maximize"] or p.grad is None:
        return False
    foreach = group["foreach"]
    if foreach is None and group["fused"] is None:
        _, foreach = _default_to_fused_or_foreach([p], differentiable=False, use_fused=False)
    # A version of 0 means that nobody has ever written into this tensor: it is a copy made before the step.
    return bool(foreach) and grad.data_ptr() == p.grad.data_ptr() and grad._version > 0


def _refuse(part: Part, reason: str) -> None:
    """Raise UsageError if there is a reason."""
    if reason:
        raise UsageError(f"the step of {_words(part.p)} cannot be undone: {reason}")


def _finite(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or all(math.isfinite(float(end)) for end in torch.aminmax(tensor.detach()))


def _order(tensor: Tensor) -> list[int]:
    """Return the strides that matter: a dimension of size 1 may have any."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _words(tensor: Any) -> str:
    kind = "parameter" if isinstance(tensor, Parameter) else "tensor"
    shape = " by ".join(str(size) for size in tensor.shape) or "one number"
    return f"a {kind} of {shape} ({str(tensor.dtype).removeprefix('torch.')}, {tensor.device})"
