"""One replica's state under a policy: its contribution to a mean, and how it adopts the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.sync.diloco import DiLoCo
from holdfast.sync.exchange import Ballots
from holdfast.sync.packed import Packed, plain
from holdfast.sync.policy import Context, Decision, Policy

OUTER = "outer_momentum"  # DiLoCo's; it is in the optimizer's state, so that checkpoints and joiners get it


@dataclass
class _Slot:
    """A tensor of an optimizer's state. ``made`` is False if the optimizer has not made it yet: it is zero then."""

    state: dict[str, Any]
    key: str
    tensor: torch.Tensor
    made: bool


class Replica:
    """Parameters, buffers and optimizer state, in an order that is the same on every replica.

    A *contribution* is a copy of them; the mean of all contributions is *adopted*. A full contribution has the
    optimizer's state and the tracker's in it, whatever the policy says, so that replicas are equal afterwards.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        parameters: Sequence[torch.Tensor],
        buffers: Callable[[], Iterable[torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        context: Context,
        device: torch.device | None = None,
    ) -> None:
        """``buffers`` returns the present buffers, because modules may replace them.

        ``device``: where contributions are made; None: where the parameters are.
        """
        self.policy = policy
        self.context = context
        self.parameters = list(parameters)
        self.tracker = policy.tracker(context)
        self._all_buffers = buffers
        self._optimizer = optimizer
        self._device = Packed(self.parameters, device).device
        self._lengths = [len(buffer) for buffer in self._packed.read()]  # parameters come first in every buffer
        self._anchor: list[torch.Tensor] = []  # DiLoCo: the parameters that all had last
        self._anchored = -1  # after which step that was

    @property
    def _packed(self) -> Packed:
        return Packed(self.parameters, self._device)  # made anew: the memory of parameters may move

    @property
    def _buffers(self) -> list[torch.Tensor]:
        return list(self._all_buffers())

    @property
    def has_statistics(self) -> bool:
        """Whether there are buffers. Forward passes may change them, so they differ even after steps together."""
        return bool(self._buffers)

    def begin(self, step: int, state: Sequence[float] | None = None) -> None:
        """Start from equal replicas after ``step`` steps. ``state``: that of the tracker, from a checkpoint."""
        if state is not None:
            self.tracker.load(state)
        if isinstance(self.policy, DiLoCo):
            self._anchor, self._anchored = self._packed.read(), step
        self.tracker.synchronised(step, self.parameters)

    def observe(self, step: int) -> list[float]:
        """Return this replica's ballot, before the update and with its own gradients."""
        return self.tracker.observe(step, self.parameters)

    def decision(self, step: int, ballots: Ballots) -> Decision | None:
        """Return the decision of all replicas at a step, on the oldest ballots; None if no ballots are due yet."""
        if not self.tracker.ballot:
            return self.tracker.decide(step, [], ballots.replicas)
        asked = ballots.oldest
        if asked is None or asked > step - self.policy.delay:
            return None
        return self.tracker.decide(asked, ballots.sums(asked), ballots.replicas)

    # --- averages of the state -------------------------------------------------------------------

    def contribution(self, *, full: bool) -> list[torch.Tensor]:
        """Return a copy of what this replica gives to the mean."""
        return self._all(self._slots(full=full), full=full).read()

    def form(self, *, full: bool) -> list[Any]:
        """Return names, shapes and dtypes of a contribution. They must be the same on all replicas."""
        tensors = [("", tensor) for tensor in (*self.parameters, *self._buffers)]
        tensors += [(slot.key, slot.tensor) for slot in self._slots(full=full)]
        return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]

    def distance(self, mean: Sequence[torch.Tensor], contribution: Sequence[torch.Tensor]) -> float:
        """Return the squared distance between this replica's parameters and the mean's."""
        apart = zip(self._only_parameters(mean), self._only_parameters(contribution), strict=True)
        return sum(float(torch.linalg.vector_norm(b - a, dtype=torch.float64)) ** 2 for a, b in apart)

    @torch.no_grad()
    def adopt(
        self, step: int, mean: Sequence[torch.Tensor], *, full: bool, since: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Take over the mean after ``step`` steps.

        ``since`` is this replica's contribution to a mean that was begun some steps ago: its own updates since then
        are kept. The mean is only read, because others may still be receiving it.
        """
        slots = self._slots(full=full)
        new = self._outer(step, mean) if isinstance(self.policy, DiLoCo) else self._only_parameters(mean)
        parts = self._all(slots, full=full).views(mean)[len(self.parameters) :]
        if since is None:
            self._packed.write(new)
        else:
            old = self._only_parameters(since)
            self._packed.add([b - a for a, b in zip(old, new, strict=True)])
        buffers = self._buffers
        # Statistics are overwritten even if the mean is some steps old: adding a difference could make a variance
        # negative.
        for buffer, part in zip(buffers, parts, strict=False):
            plain(buffer).copy_(part if _is_float(buffer) else part.round())
        self._write_slots(slots, parts[len(buffers) :][: len(slots)], late=since is not None)
        if full:
            self.tracker.load(parts[-1].tolist())
        if self.policy.optimizer_state == "reset" and not full:
            self._reset()
        self.tracker.synchronised(step, self.parameters)

    def _all(self, slots: Sequence[_Slot], *, full: bool) -> Packed:
        tensors = [*self.parameters, *map(_as_float, self._buffers), *(slot.tensor for slot in slots)]
        if full:  # else each tracker goes on with what it has seen itself: data may differ
            tensors.append(torch.tensor(self.tracker.state(), dtype=torch.float64))
        return Packed(tensors, self._device)

    def _only_parameters(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [buffer[:length] for buffer, length in zip(buffers, self._lengths, strict=False)]

    # --- the optimizer's state -------------------------------------------------------------------

    def _slots(self, *, full: bool) -> list[_Slot]:
        """Return the float tensors of the optimizer's state, by parameter and name, if they are averaged."""
        if not full and self.policy.optimizer_state != "average":
            return []
        usual = self._usual_slots()
        return [slot for parameter in self.parameters for slot in self._slots_of(parameter, usual)]

    def _slots_of(self, parameter: torch.Tensor, usual: dict[str, torch.Tensor]) -> list[_Slot]:
        state = self._optimizer.state.get(parameter, {})
        made = {key: value for key, value in state.items() if _is_slot(key, value)}
        if made or not usual:
            return [_Slot(state, key, made[key], True) for key in sorted(made)]
        # This replica has not used the parameter yet, but another may have: all must send the same tensors.
        state = self._optimizer.state[parameter]
        return [
            _Slot(state, key, torch.zeros_like(like if like.dim() == 0 else parameter, dtype=like.dtype), False)
            for key, like in sorted(usual.items())
        ]

    def _usual_slots(self) -> dict[str, torch.Tensor]:
        """Return an example of each float value that the optimizer keeps for a parameter, by name."""
        found: dict[str, torch.Tensor] = {}
        for parameter in self.parameters:
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if _is_slot(key, value) and (value.dim() == 0 or value.shape == parameter.shape):
                    found.setdefault(key, value)
        return found

    def _write_slots(self, slots: Sequence[_Slot], parts: Sequence[torch.Tensor], *, late: bool) -> None:
        """Write averaged values. ``late``: the mean is some steps old; then counters are not written."""
        for slot, part in zip(slots, parts, strict=True):
            value = torch.view_as_complex(part) if slot.tensor.is_complex() else part
            if slot.made and not (late and slot.tensor.dim() == 0):
                slot.tensor.copy_(value)
        used = {id(slot.state) for slot, part in zip(slots, parts, strict=True) if not slot.made and part.any()}
        for slot, part in zip(slots, parts, strict=True):
            if id(slot.state) in used:
                slot.state[slot.key] = slot.tensor.copy_(part)

    def _reset(self) -> None:
        """Let the optimizer begin anew.

        State with DiLoCo's momentum in it is zeroed, not removed: an optimizer takes any state for complete.
        """
        for parameter in self.parameters:
            state = self._optimizer.state.get(parameter, {})
            if OUTER not in state:
                state.clear()
            for key, value in state.items():
                if _is_slot(key, value):
                    value.zero_()

    # --- DiLoCo ----------------------------------------------------------------------------------

    def _outer(self, step: int, mean: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters after an outer step from the last common ones towards the mean."""
        assert isinstance(self.policy, DiLoCo)
        means = self._only_parameters(mean)
        if step == self._anchored:  # no step since: only what an overlap left between replicas
            self._anchor = [part.clone() for part in means]
            return means
        kept = Packed([self._momentum_of(parameter) for parameter in self.parameters], self._device)
        moves = zip(self._anchor, means, kept.read(), strict=True)
        results = [self.policy.outer(anchor, towards, momentum) for anchor, towards, momentum in moves]
        kept.write([momentum for _, momentum in results])
        self._anchor, self._anchored = [new for new, _ in results], step
        return self._anchor

    def _momentum_of(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self._optimizer.state[parameter]
        if OUTER not in state:
            for slot in self._slots_of(parameter, self._usual_slots()):
                state[slot.key] = slot.tensor  # an optimizer takes any state for its own, and complete
            state[OUTER] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state[OUTER]
        return momentum

    # --- averages of gradients -------------------------------------------------------------------

    def gradients(self) -> list[torch.Tensor]:
        """Return a copy of this replica's gradients, and for each parameter whether it has one.

        A missing gradient is zero, because another replica may have one. Raises ``UsageError`` for sparse gradients.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise UsageError("sparse gradients cannot be averaged", hint="sparse=False, or no steps together")
        present = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.float32)
        filled = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return Packed([*filled, present], self._device).read()

    @torch.no_grad()
    def set_gradients(self, buffers: Sequence[torch.Tensor]) -> None:
        """Set the gradient of every parameter that some replica has used.

        The other parameters keep none: with a gradient of zero, weight decay and momentum would act on them.
        """
        form = [*self.parameters, torch.empty(len(self.parameters))]
        *parts, present = Packed(form, self._device).views(buffers)
        for parameter, part, share in zip(self.parameters, parts, present.tolist(), strict=True):
            if share != 0:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                plain(parameter.grad).copy_(part)


def _is_slot(key: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and key != OUTER and _is_float(value)


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _as_float(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer as it is averaged. Counters and masks are: the mean is rounded, and equal ones stay as they are.

    Floats of 32 bits hold integers of 16 exactly, those of 64 bits all counters below 2**53.
    """
    if _is_float(buffer):
        return buffer
    return buffer.to(torch.float32 if buffer.element_size() <= 2 else torch.float64)
