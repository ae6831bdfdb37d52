"""Averages of the weights, ``run.ema``: followed with every update, so that they are committed with the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError

_HALF = (torch.bfloat16, torch.float16)  # too coarse for a small share: their averages are float32


@dataclass(frozen=True, kw_only=True)
class Ema:
    """An exponential moving average of the trained weights, as ``run.ema`` makes it.

    After each step it is ``decay`` times what it was, plus ``1 - decay`` times the new weights. It begins with the
    weights before the first step. Frozen weights and buffers are not averaged.

    >>> Ema(decay=0.999).name
    'ema-0.999'
    """

    decay: float

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0 <= self.decay < 1:
            raise UsageError(f"decay={self.decay!r} is no decay of an average", hint="from 0 to below 1, as 0.999")

    @property
    def name(self) -> str:
        """The name of its slots, and of its section in checkpoints."""
        return f"ema-{float(self.decay)!r}"


class Averages:
    """The averages of the parameters that this worker holds. ``Update`` owns them, and carries them as slots.

    >>> averages = Averages(); ema = averages.add(0.5)
    >>> p = nn.Parameter(torch.zeros(1)); p.grad = torch.ones(1)
    >>> averages.begin([p]); p.data += 1; averages.follow([p]); averages.of(ema, p)
    tensor([0.5000])
    """

    def __init__(self) -> None:
        self.all: list[Ema] = []
        self._slots: dict[nn.Parameter, dict[str, Tensor]] = {}

    def add(self, decay: float) -> Ema:
        """Follow one more average. The same decay twice is one average."""
        ema = Ema(decay=decay)
        if ema not in self.all:
            self.all.append(ema)
        return ema

    @torch.no_grad()
    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin the averages of parameters that are about to be updated for the first time."""
        for p in parameters if self.all else ():
            if p.grad is not None:
                slots = self._slots.setdefault(p, {})
                for ema in self.all:
                    if ema.name not in slots:
                        slots[ema.name] = self.of(ema, p).clone()

    @torch.no_grad()
    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the averages follow an update of the parameters that have gradients."""
        for p in parameters if self.all else ():
            if p.grad is not None:
                for ema in self.all:
                    average = self._slots[p][ema.name]
                    average.lerp_(p.to(average.dtype), 1 - ema.decay)

    def of(self, ema: Ema, p: nn.Parameter) -> Tensor:
        """Return a parameter's average; before the first step, its value. Not a copy."""
        found = self._slots.get(p, {}).get(ema.name)
        return found if found is not None else p.detach().to(average_dtype(p))

    def weights(self, ema: Ema, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return the averages of these parameters in their own dtypes. Raises ``UsageError`` for another run's."""
        if ema not in self.all:
            raise UsageError(f"{ema!r} is not an average of this run", hint="weights=run.ema(decay=0.999)")
        return {p: self.of(ema, p).to(p.dtype) for p in parameters}

    # --- as slots --------------------------------------------------------------------------------

    def slots(self, p: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's averages by name."""
        return dict(self._slots.get(p, {}))

    @torch.no_grad()
    def take(self, p: nn.Parameter, slots: Mapping[str, Any]) -> dict[str, Any]:
        """Take a parameter's averages out of its slots; return the slots that are the optimizer's."""
        names = {ema.name for ema in self.all}
        mine = {name: value for name, value in slots.items() if name in names}
        self._slots.pop(p, None)
        if mine:
            # Laid out as the parameter: operators may round in another way where memory has another order.
            self._slots[p] = {
                name: torch.empty_like(p, dtype=average_dtype(p)).detach().copy_(v) for name, v in mine.items()
            }
        return {name: value for name, value in slots.items() if name not in names}

    def forget(self, p: nn.Parameter) -> None:
        """Drop a parameter's averages."""
        self._slots.pop(p, None)

    def copy(self, ema: Ema, p: nn.Parameter) -> Tensor:
        """Return a parameter's average for a checkpoint, in memory that is not the parameter's."""
        found = self.of(ema, p)
        return found.clone() if found.data_ptr() == p.data_ptr() else found

    def room(self, ema: Ema, p: nn.Parameter) -> Tensor:
        """Return memory for a parameter's average, into which a checkpoint is about to be read."""
        slots = self._slots.setdefault(p, {})
        if ema.name not in slots:
            slots[ema.name] = torch.empty_like(p, dtype=average_dtype(p), requires_grad=False)
        return slots[ema.name]

    def drop(self, ema: Ema) -> None:
        """Forget an average's values: it begins again with the next step."""
        for slots in self._slots.values():
            slots.pop(ema.name, None)


def average_dtype(p: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's averages."""
    return torch.float32 if p.dtype in _HALF else p.dtype
