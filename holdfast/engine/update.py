"""The update of a step: gradient clipping, the optimizer, and the learning rate's schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.engine.averages import Averages
from holdfast.engine.outside import Outside, content_of_groups, mark_of_groups, needs_closure
from holdfast.engine.shards import local, split_as
from holdfast.errors import UsageError

MakeOptimizer = Callable[[Any], Optimizer]  # of the parameters, or of pairs of name and parameter
Schedule = Callable[[Optimizer], LRScheduler] | Callable[[int], float]


class Inverse(Protocol):
    """A function that undoes the step of an optimizer that used these gradients.

    ``first``: parameters that had no step before it.
    """

    def __call__(
        self, optimizer: Optimizer, grads: Mapping[nn.Parameter, torch.Tensor], *, first: Collection[nn.Parameter]
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a step's update: enough to repeat it with the same gradients."""

    groups: list[dict[str, Any]]  # hyper-parameters of the optimizer's groups
    norm: float | None  # norm of all gradients, before they are clipped; None: not known
    total: float | None = None  # what gradients are divided by: their weights together; None: they are not


class Update:
    """Applies a step's gradients.

    ``optimizer``: a function of the parameters that makes the optimizer; of pairs of name and parameter, if the name of
    its argument begins with ``named``. ``names``: of the parameters, for that. ``schedule``: a function of the
    optimizer that makes a torch scheduler, or a function of the step that returns the learning rate. ``clip_norm``: the
    largest norm of all gradients together. With ``inverse`` a step may also be applied in parts, and undone. Raises
    ``UsageError`` for an optimizer or a schedule that is none of these, and in a step for an optimizer that keeps
    something outside its parameters' state and its groups.

    >>> p = nn.Parameter(torch.ones(1))
    >>> update = Update([p], lambda ps: torch.optim.SGD(ps, lr=1.0), schedule=lambda step: 0.5)
    >>> p.grad = torch.ones(1); _ = update.apply(step=0); p.item()
    0.5
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: MakeOptimizer,
        *,
        names: Sequence[str] = (),
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        inverse: Inverse | None = None,
    ) -> None:
        self.parameters = list(parameters)
        given: Any = list(zip(names, self.parameters, strict=True)) if wants_names(optimizer) else self.parameters
        try:
            made = None if isinstance(optimizer, Optimizer) else optimizer(given)
        except Exception as e:
            kind = "pairs of name and parameter" if given is not self.parameters else "parameters"
            e.add_note(f"optimizer was called with a list of {kind}: of pairs if its argument is called named…")
            raise
        if not isinstance(made, Optimizer):
            raise UsageError(
                "optimizer must be a function that makes an optimizer",
                hint="pass lambda params: torch.optim.AdamW(params, lr=3e-4)",
            )
        if needs_closure(made):
            raise UsageError(
                f"{type(made).__name__} computes the loss several times in a step, but a run computes it once",
                hint="use an optimizer whose step() takes no argument",
            )
        self.optimizer = made
        self.clip_norm = clip_norm
        self.inverse = inverse
        groups = enumerate(made.param_groups)
        self._group_of = {p: number for number, group in groups for p in group["params"]}
        if self._group_of.keys() - set(self.parameters):
            raise UsageError(
                f"optimizer {type(made).__name__} has parameters that are not the model's: nobody sums their gradients",
                hint="put them into a layer, and give the optimizer the parameters that it is called with",
            )
        self.scheduler, self._rate = _read_schedule(schedule, self.optimizer)
        self._outside = Outside(made)
        self.averages = Averages()
        self.chosen: Sequence[nn.Parameter] | None = None  # the parameters that the next step updates; None: all
        self._before: list[dict[str, Any]] = []  # values of the groups before the update of a step
        self._changed = ""  # the values that the last update has changed, in words

    def norms(self) -> torch.Tensor:
        """Return the norm of each parameter's gradient, zero where there is none here."""
        found = torch.zeros(len(self.parameters), dtype=torch.float64, device=self.parameters[0].device)
        for number, p in enumerate(self.parameters):
            if p.grad is not None:
                # Contiguous, because the sum's rounding depends on the memory order, and a gradient that was sent may
                # have another order than one that was computed here.
                found[number] = torch.linalg.vector_norm(local(p.grad).contiguous())
        return found

    def apply(self, *, step: int, norms: torch.Tensor | None = None, total: float | None = None) -> Terms:
        """Update all parameters that have gradients; return the terms, with which ``repeat`` does the same again.

        ``norms``: of all parameters' gradients, if some are on other workers. ``total``: what gradients are divided by
        first, because they are sums with weights.
        """
        self.begin(step)
        terms = self.terms(norm=self.norm(norms, total), total=total)
        self._step(terms)
        self.end()
        return terms

    def begin(self, step: int) -> None:
        """Set the learning rate of a step, if the schedule is a function of the step."""
        if self._rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(step)
        self._outside.begin()
        self._before = content_of_groups(self._groups())

    def terms(self, *, norm: float | None = None, total: float | None = None) -> Terms:
        """Return the terms of the current step. Tensors are copied: a scheduler may write into a learning rate."""
        return Terms(groups=[_copied(group) for group in self._groups()], norm=norm, total=total)

    def end(self) -> None:
        """Let the scheduler go on to the next step: all parameters are updated.

        Raises ``UsageError`` if the optimizer has changed what a run does not carry.
        """
        self._outside.refuse_changes()
        self._changed = self._changed_in_groups()
        if self.inverse is not None and self._changed:
            raise UsageError(
                f"optimizer {type(self.optimizer).__name__} changes {self._changed} in its step, but there is one step "
                "for each layer with update='eager'",
                hint="keep it in state[parameter], or update='commit'",
            )
        if self.scheduler is not None:
            self.scheduler.step()

    def choose(self, parameters: Sequence[nn.Parameter] | None, *, clip_norm: float | None) -> None:
        """Let the next step update these parameters only (None: all), with their gradients clipped to this norm."""
        self.chosen, self.clip_norm = parameters, clip_norm

    def forget_others(self) -> None:
        """Drop the gradients of parameters that the next step does not update: they are neither clipped nor counted."""
        if self.chosen is not None:
            chosen = set(self.chosen)
            for p in self.parameters:
                if p not in chosen:
                    p.grad = None

    def repeat(self, terms: Terms) -> None:
        """Repeat an update for parameters that were lost since. The optimizer keeps the settings of that step."""
        for group, values in zip(self.optimizer.param_groups, terms.groups, strict=True):
            group.update(_copied(values))  # a step may write into a tensor, and the terms may be needed again
        self._outside.begin()
        self._step(terms)
        self._outside.refuse_changes()

    def _changed_in_groups(self) -> str:
        """Return in words which values of the groups this step has changed; "" if it has changed none."""
        pairs = enumerate(zip(self._before, content_of_groups(self._groups()), strict=True))
        found = [(place, key) for place, (old, new) in pairs for key in new if old.get(key) != new[key]]
        return ", ".join(f"param_groups[{place}]['{key}']" for place, key in found)

    def mark(self) -> int:
        """Return a small number that stands for the values of the groups. They must be equal on all workers."""
        return mark_of_groups(self._groups())

    def other_groups(self) -> UsageError:
        """Return the error of groups whose values are not the same on all workers."""
        return UsageError(
            f"optimizer {type(self.optimizer).__name__} has different values in {self._changed or 'param_groups'} on "
            "workers that hold different layers, or train apart",
            hint="keep it in state[parameter], or give every worker all layers, and sync='every-step'",
        )

    def _step(self, terms: Terms) -> None:
        if terms.total is not None:
            for p in self.parameters:
                if p.grad is not None:
                    local(p.grad).div_(terms.total)
        if terms.norm is not None and self.clip_norm is not None:
            self._clip(terms.norm, self.clip_norm)
        self.averages.begin(self.parameters)
        with nullcontext() if self.chosen is None else self._only(self.chosen):
            self.optimizer.step()
        self.averages.follow(self.parameters)

    def norm(self, norms: torch.Tensor | None, total: float | None) -> float:
        """Return the norm of all gradients, before they are clipped. The arguments are those of ``apply``.

        It combines the norms of single tensors in the parameters' order, so it is the same in every layout.
        """
        norm = float(torch.linalg.vector_norm(self.norms() if norms is None else norms))
        return norm if total is None else norm / total

    def _clip(self, norm: float, most: float) -> None:
        factor = (most / (torch.tensor(norm, dtype=torch.float64) + 1e-6)).clamp(max=1.0)
        for p in self.parameters:
            if p.grad is not None:
                local(p.grad).mul_(factor.to(p.grad.dtype))

    def some(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update these parameters only. Gradients of others may be written at the same time."""
        with self._only(parameters):
            self.optimizer.step()

    def undo(self, parameters: Sequence[nn.Parameter], *, first: Collection[nn.Parameter]) -> None:
        """Undo the update of these parameters. Gradients and learning rate must still be those that it used."""
        assert self.inverse is not None
        known = [p for p in parameters if p in self._group_of]
        grads = {p: p.grad for p in known if p.grad is not None}
        self.inverse(self.optimizer, grads, first={p for p in known if p in first})

    @contextmanager
    def _only(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Hide all other parameters from the optimizer. Its groups stay the same objects: schedulers refer to them."""
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
        """Drop the slots of parameters that have moved to other workers."""
        for p in parameters:
            self.optimizer.state.pop(p, None)
            self.averages.forget(p)

    def slots(self, parameters: Sequence[nn.Parameter], *, split: bool = True) -> list[dict[str, Any]]:
        """Return the optimizer's slots of these parameters, and their averages.

        ``split``: of slots that a team has split this rank's part.
        """
        found = [{**self.optimizer.state.get(p, {}), **self.averages.slots(p)} for p in parameters]
        if not split:
            return found
        return [{key: local(value) if torch.is_tensor(value) else value for key, value in one.items()} for one in found]

    def set_slots(self, parameters: Sequence[nn.Parameter], slots: Sequence[dict[str, Any]]) -> None:
        """Take over what ``slots`` returned on another worker."""
        for p, given in zip(parameters, slots, strict=True):
            slot = self.averages.take(p, given)
            if slot:
                self.optimizer.state[p] = {key: _like(value, p) for key, value in slot.items()}
            else:
                self.optimizer.state.pop(p, None)

    def settings(self) -> dict[str, Any]:
        """Return the hyper-parameters of each group, the scheduler's state, and which averages there are."""
        scheduler = None if self.scheduler is None else _plain(self.scheduler.state_dict())
        return {"groups": self._groups(), "scheduler": scheduler, "averages": self._averages()}

    def _averages(self) -> list[str]:
        return sorted(ema.name for ema in self.averages.all)

    def _groups(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def group_values(self) -> list[dict[str, Any]]:
        """Return a copy of the hyper-parameters of each group, for ``set_group_values``."""
        return [_copied(group) for group in self._groups()]

    def set_group_values(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Give the groups the hyper-parameters that they had once."""
        for group, known in zip(self.optimizer.param_groups, values, strict=True):
            for key, value in _copied(known).items():
                mine = group.get(key)
                if torch.is_tensor(mine) and torch.is_tensor(value):
                    mine.copy_(value)  # a scheduler may refer to it
                else:
                    group[key] = value

    def set_settings(self, settings: dict[str, Any]) -> None:
        """Take over what ``settings`` returned on another worker, or earlier.

        Raises ``UsageError`` if that worker follows other averages.
        """
        if (theirs := settings["averages"]) != self._averages():
            raise UsageError(
                f"averages of the weights are {theirs} on one worker and {self._averages()} on another",
                hint="call run.ema on every worker, before run.steps",
            )
        for group, values in zip(self.optimizer.param_groups, settings["groups"], strict=True):
            group.update(values)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(settings["scheduler"])


def wants_names(make: MakeOptimizer) -> bool:
    """Return whether a user's function takes named parameters, which it says by the name of its first argument.

    >>> wants_names(lambda named: None), wants_names(lambda params: None), wants_names(torch.optim.SGD)
    (True, False, False)
    """
    try:
        first = next(iter(inspect.signature(make).parameters), "")
    except (TypeError, ValueError):  # a function of C has no signature
        return False
    return first.startswith("named")


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in group.items()}


def _like(value: Any, p: nn.Parameter) -> Any:
    """Move a slot that is shaped as the parameter to the parameter's device. Counters stay on the CPU, as in torch."""
    if isinstance(value, torch.Tensor) and value.shape == local(p).shape:
        return split_as(value.to(p.device), p)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a scheduler's state without functions: every worker has these from the script."""
    return {key: value for key, value in state.items() if not callable(value)}


def _read_schedule(
    schedule: Schedule | None, optimizer: Optimizer
) -> tuple[LRScheduler | None, Callable[[int], float] | None]:
    """Return the scheduler, or the function of the step, whichever ``schedule`` gives.

    It is called with the optimizer first: a function of the step then fails, or returns no scheduler.
    """
    if schedule is None:
        return None, None
    unknown: Any = schedule
    made, failure = _try(unknown, optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise UsageError("ReduceLROnPlateau follows a metric, not the step", hint="use a schedule of the step")
    if isinstance(made, LRScheduler):
        return made, None
    first, failure_of_step = _try(unknown, 0)
    if failure_of_step is not None:  # both calls have failed: it was probably meant to make a scheduler
        raise failure or failure_of_step
    if not isinstance(first, int | float) or not math.isfinite(first):
        raise UsageError(
            f"schedule(0) gave {first!r}", hint="return a learning rate, or a torch scheduler for an optimizer"
        )
    return None, unknown


def _try(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Exception | None]:
    """Return a function's result, or the exception that it raises."""
    try:
        return function(argument), None
    except Exception as e:
        return None, e
