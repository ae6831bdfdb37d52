"""The models and optimizers of a ``Loop``: one, or several by name; checked, and made one for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint.objects import clean
from holdfast.engine.several import Several
from holdfast.engine.update import MakeOptimizer, wants_names
from holdfast.errors import UsageError
from holdfast.sync.policy import Policy
from holdfast.words import a_kind


def check_names(model: object, optimizer: object, schedule: object, sync: object) -> tuple[str, ...]:
    """Return the names of several optimizers; none for one. Raises ``UsageError`` if they do not fit the models."""
    if not isinstance(optimizer, Mapping):
        _refuse_frozen(optimizer, "optimizer")
        return ()
    if not isinstance(model, Mapping) or set(optimizer) - set(model):
        raise UsageError(
            "optimizers have the names of models", hint="model={'g': g, 'd': d}, optimizer={'g': …, 'd': …}"
        )
    if schedule is not None or isinstance(sync, Policy):
        raise UsageError(
            "schedule= and a policy for sync= are for one optimizer",
            hint="a torch scheduler in state=, or set group['lr'] yourself; and sync='every-step'",
        )
    for name, part in optimizer.items():
        if not isinstance(part, Optimizer) and not callable(part):
            raise UsageError(
                f"optimizer[{name!r}] is {a_kind(part)}", hint="an optimizer, or a function that makes one"
            )
        _refuse_frozen(part, f"optimizer[{name!r}]")
    _refuse_shared(model, optimizer)
    return tuple(optimizer)


def _refuse_frozen(optimizer: object, what: str) -> None:
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    if any(not p.requires_grad for group in groups for p in group["params"]):
        raise UsageError(
            f"{what} has parameters that are frozen",
            hint="give it [p for p in model.parameters() if p.requires_grad], or a function of the parameters",
        )


def _refuse_shared(models: Mapping[str, nn.Module], optimizers: Mapping[str, Any]) -> None:
    """Refuse a parameter that two optimizers would step."""
    owners: dict[nn.Parameter, str] = {}
    for name, optimizer in optimizers.items():
        for p in _parameters(optimizer, models[name]):
            if owners.setdefault(p, name) != name:
                raise UsageError(
                    f"optimizers {owners[p]!r} and {name!r} have a parameter in common",
                    hint="each parameter belongs to one optimizer",
                )


def _parameters(optimizer: object, model: nn.Module) -> Iterator[nn.Parameter]:
    if isinstance(optimizer, Optimizer):
        yield from (p for group in optimizer.param_groups for p in group["params"])
    else:
        yield from (p for p in model.parameters() if p.requires_grad)


def one_module(model: nn.Module | Mapping[str, nn.Module]) -> nn.Module:
    """Return the models as one module, whose parts are the models themselves."""
    return nn.ModuleDict(dict(model)) if isinstance(model, Mapping) and not isinstance(model, nn.Module) else model


def one_maker(model: Any, optimizer: Any) -> MakeOptimizer:
    """Return a function that makes the optimizer, as ``Update`` wants it."""
    if isinstance(optimizer, Mapping):
        return lambda params: Several({name: _made(part, model[name]) for name, part in optimizer.items()})
    return (lambda params: optimizer) if isinstance(optimizer, Optimizer) else optimizer


def _made(part: Optimizer | MakeOptimizer, model: nn.Module) -> Optimizer:
    if isinstance(part, Optimizer):
        return part
    named = [(clean(name), p) for name, p in model.named_parameters() if p.requires_grad]
    return part(named if wants_names(part) else [p for _, p in named])


def parts_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that one consists of, by name; "" for one alone."""
    return optimizer.parts if isinstance(optimizer, Several) else {"": optimizer}


def refuse_lost_schedulers(optimizer: Optimizer, own: LRScheduler | None, state: Mapping[str, Any]) -> None:
    """Refuse a torch scheduler that no joiner would get: it is neither ``schedule=`` nor in ``state``."""
    kept = {id(own.optimizer)} if own is not None else set()
    kept |= {id(each.optimizer) for each in _schedulers_in(list(state.values()))}
    for part in parts_of(optimizer).values():
        if hasattr(part.step, "_wrapped_by_lr_sched") and id(part) not in kept:
            raise UsageError(
                "a scheduler of the optimizer is not in state=: a worker that joins would begin it anew",
                hint="Loop(state={'scheduler': scheduler, …}), or schedule=lambda optimizer: …",
            )


def _schedulers_in(value: Any) -> Iterator[LRScheduler]:
    if isinstance(value, LRScheduler):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _schedulers_in(item)


class ByHand:
    """Refuses steps of an optimizer that the loop did not ask for: the weights of workers would differ."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._is_allowed = False
        for part in parts_of(optimizer).values():
            part.register_step_pre_hook(self._refuse)

    def _refuse(self, *_: Any) -> None:
        if not self._is_allowed:
            raise UsageError("the optimizer was stepped by hand", hint="step.commit() sums gradients and steps it")

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let the optimizer step in this context."""
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False


def parameters_of(optimizer: Optimizer, names: Sequence[str]) -> list[nn.Parameter] | None:
    """Return the parameters of the optimizers of these names; None for all."""
    if not names:
        return None
    parts = parts_of(optimizer)
    return [p for name in names for group in parts[name].param_groups for p in group["params"]]
