"""The update: clipping, the optimizer, the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import UsageError

Schedule = Callable[[Optimizer], LRScheduler] | Callable[[int], float]


class Update:
    """Applies a step's gradients. ``schedule`` is a torch scheduler factory or a function of the step.

    >>> p = nn.Parameter(torch.ones(1))
    >>> update = Update([p], lambda ps: torch.optim.SGD(ps, lr=1.0), schedule=lambda step: 0.5)
    >>> p.grad = torch.ones(1); update.apply(step=0); p.item()
    0.5
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
        *,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
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
        self.scheduler, self._rate = _read_schedule(schedule, self.optimizer)

    def norms(self) -> torch.Tensor:
        """The norm of each parameter's gradient, zero where there is none here."""
        found = torch.zeros(len(self.parameters), dtype=torch.float64, device=self.parameters[0].device)
        for number, p in enumerate(self.parameters):
            if p.grad is not None:
                # In one order of memory: a gradient that was sent lies as others do not.
                found[number] = torch.linalg.vector_norm(p.grad.contiguous())
        return found

    def apply(self, *, step: int, norms: torch.Tensor | None = None) -> None:
        """The update with the gradients that are there. ``norms`` are everybody's, if some parameters are elsewhere."""
        if self._rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(step)
        if self.clip_norm is not None:
            self._clip(self.norms() if norms is None else norms, self.clip_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _clip(self, norms: torch.Tensor, most: float) -> None:
        """Norms of single tensors, combined in the parameters' order: the same on every layout."""
        factor = (most / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
        for p in self.parameters:
            if p.grad is not None:
                p.grad.mul_(factor.to(p.grad.dtype))

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
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        scheduler = None if self.scheduler is None else _plain(self.scheduler.state_dict())
        return {"groups": groups, "scheduler": scheduler}

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
