"""The update: clipping, the optimizer, the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import UsageError

Schedule = Callable[[Optimizer], LRScheduler] | Callable[[int], float]


class Inverse(Protocol):
    """Takes back the step of an optimizer that used these gradients; ``first`` had no step before it."""

    def __call__(
        self, optimizer: Optimizer, grads: Mapping[nn.Parameter, torch.Tensor], *, first: Collection[nn.Parameter]
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a step was applied: what the optimizer was told, and the norm that gradients were clipped by."""

    groups: list[dict[str, Any]]
    norm: float | None


class Update:
    """Applies a step's gradients. ``schedule`` is a torch scheduler factory or a function of the step.

    With ``inverse`` a step may also be applied in parts, and taken back.

    >>> p = nn.Parameter(torch.ones(1))
    >>> update = Update([p], lambda ps: torch.optim.SGD(ps, lr=1.0), schedule=lambda step: 0.5)
    >>> p.grad = torch.ones(1); _ = update.apply(step=0); p.item()
    0.5
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
        *,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        inverse: Inverse | None = None,
    ) -> None:
        self.parameters = list(parameters)
        made = None if isinstance(optimizer, Optimizer) else optimizer(self.parameters)
        if not isinstance(made, Optimizer):
            raise UsageError(
                "optimizer must be a function that makes an optimizer",
                hint="pass lambda params: torch.optim.AdamW(params, lr=3e-4)",
            )
        self.optimizer = made
        self.clip_norm = clip_norm
        self.inverse = inverse
        groups = enumerate(made.param_groups)
        self._group_of = {p: number for number, group in groups for p in group["params"]}
        self.scheduler, self._rate = _read_schedule(schedule, self.optimizer)

    def norms(self) -> torch.Tensor:
        """The norm of each parameter's gradient, zero where there is none here."""
        found = torch.zeros(len(self.parameters), dtype=torch.float64, device=self.parameters[0].device)
        for number, p in enumerate(self.parameters):
            if p.grad is not None:
                # In one order of memory: a gradient that was sent lies as others do not.
                found[number] = torch.linalg.vector_norm(p.grad.contiguous())
        return found

    def apply(self, *, step: int, norms: torch.Tensor | None = None) -> Terms:
        """The update with the gradients that are there; returns what it takes to do it once more with the same ones.

        ``norms`` are everybody's, if some parameters are elsewhere.
        """
        self.begin(step)
        terms = self.terms(norm=self._total(norms))
        self._step(terms.norm)
        self.end()
        return terms

    def begin(self, step: int) -> None:
        """The learning rate of a step."""
        if self._rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(step)

    def terms(self, *, norm: float | None = None) -> Terms:
        """Copies: a scheduler may write into a learning rate that is a tensor."""
        groups = [{k: v.clone() if torch.is_tensor(v) else v for k, v in group.items()} for group in self._groups()]
        return Terms(groups=groups, norm=norm)

    def end(self) -> None:
        """All parameters are updated: the scheduler goes on to the next step."""
        if self.scheduler is not None:
            self.scheduler.step()

    def repeat(self, terms: Terms) -> None:
        """An update that was applied before, for parameters that were lost since; settings stay as they were then."""
        for group, values in zip(self.optimizer.param_groups, terms.groups, strict=True):
            group.update(values)
        self._step(terms.norm)

    def _step(self, norm: float | None) -> None:
        if norm is not None and self.clip_norm is not None:
            self._clip(norm, self.clip_norm)
        self.optimizer.step()

    def _total(self, norms: torch.Tensor | None) -> float | None:
        """Norms of single tensors, combined in the parameters' order: the same on every layout."""
        if self.clip_norm is None:
            return None
        return float(torch.linalg.vector_norm(self.norms() if norms is None else norms))

    def _clip(self, norm: float, most: float) -> None:
        factor = (most / (torch.tensor(norm, dtype=torch.float64) + 1e-6)).clamp(max=1.0)
        for p in self.parameters:
            if p.grad is not None:
                p.grad.mul_(factor.to(p.grad.dtype))

    def some(self, parameters: Sequence[nn.Parameter]) -> None:
        """Updates these parameters with their gradients. Those of others may be written at the same time."""
        with self._only(parameters):
            self.optimizer.step()

    def undo(self, parameters: Sequence[nn.Parameter], *, first: Collection[nn.Parameter]) -> None:
        """Takes back the update of these parameters: gradients and learning rate must still be those that it used."""
        assert self.inverse is not None
        known = [p for p in parameters if p in self._group_of]
        grads = {p: p.grad for p in known if p.grad is not None}
        self.inverse(self.optimizer, grads, first={p for p in known if p in first})

    @contextmanager
    def _only(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Lets the optimizer see no others; its groups stay the objects that they are, for schedulers hold them."""
        groups = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        for p in parameters:
            if p in self._group_of:  # a user's optimizer may leave some out
                groups[self._group_of[p]]["params"].append(p)
        try:
            yield
        finally:
            for group, whole in zip(groups, everything, strict=True):
                group["params"] = whole

    def forget(self, parameters: Sequence[nn.Parameter]) -> None:
        """Drops what the optimizer keeps for parameters that have gone elsewhere."""
        for p in parameters:
            self.optimizer.state.pop(p, None)

    def slots(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """What the optimizer keeps for these parameters."""
        return [dict(self.optimizer.state.get(p, {})) for p in parameters]

    def set_slots(self, parameters: Sequence[nn.Parameter], slots: Sequence[dict[str, Any]]) -> None:
        for p, slot in zip(parameters, slots, strict=True):
            if slot:
                self.optimizer.state[p] = {key: _like(value, p) for key, value in slot.items()}
            else:
                self.optimizer.state.pop(p, None)

    def settings(self) -> dict[str, Any]:
        """Hyper-parameters of each group and the scheduler's state."""
        scheduler = None if self.scheduler is None else _plain(self.scheduler.state_dict())
        return {"groups": self._groups(), "scheduler": scheduler}

    def _groups(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def set_settings(self, settings: dict[str, Any]) -> None:
        for group, values in zip(self.optimizer.param_groups, settings["groups"], strict=True):
            group.update(values)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(settings["scheduler"])


def _like(value: Any, p: nn.Parameter) -> Any:
    """Slots shaped as the parameter live where it lives; counters stay on the CPU, as torch keeps them."""
    if isinstance(value, torch.Tensor) and value.shape == p.shape:
        return value.to(p.device)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without functions, which every worker has from the script."""
    return {key: value for key, value in state.items() if not callable(value)}


def _read_schedule(
    schedule: Schedule | None, optimizer: Optimizer
) -> tuple[LRScheduler | None, Callable[[int], float] | None]:
    if schedule is None:
        return None, None
    unknown: Any = schedule
    made, failure = _try(unknown, optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise UsageError("ReduceLROnPlateau follows a metric, not the step", hint="use a schedule of the step")
    if isinstance(made, LRScheduler):
        return made, None
    first, failure_of_step = _try(unknown, 0)
    if failure_of_step is not None:  # neither: then the factory's own complaint is the one that helps
        raise failure or failure_of_step
    if not isinstance(first, int | float) or not math.isfinite(first):
        raise UsageError(
            f"schedule(0) gave {first!r}", hint="return a learning rate, or a torch scheduler for an optimizer"
        )
    return None, unknown


def _try(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Exception | None]:
    """A function of the step stumbles over an optimizer in its own way, and the other way round."""
    try:
        return function(argument), None
    except Exception as e:
        return None, e
