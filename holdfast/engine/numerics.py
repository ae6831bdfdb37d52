"""``Numerics``: a user's settings of how a worker computes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from holdfast.checks import by_name, one_of
from holdfast.errors import UsageError


@by_name
@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Settings of how a worker computes.

    - ``mode``: "exact" gives weights that do not depend on how many workers there are or what happened to them.
      "fast" may differ in the last bits.
    - ``autocast``: the dtype of ``torch.autocast`` in the forward pass, such as ``torch.bfloat16``. None: none.
    - ``update``: when the optimizer steps. "commit": once all workers have voted that the step's gradients are
      complete. "eager": each layer as soon as its own gradient is, before the vote. If the step breaks, it is undone
      from the gradients, without a copy, up to rounding (docs/undo.md).
    - ``check_every``: steps after which workers compare digests of what must be equal on all of them. If something is
      not, the run ends with its name. "auto": about every hundred steps, or as seldom as it takes to spend at most a
      thousandth of the time on it. None: never.
    - ``device``: the device to compute on, as ``torch.device`` takes it. None: a GPU for each worker of a host if
      there are any, else the CPU.

    Raises ``UsageError`` for values that are none of these.

    >>> Numerics(autocast=torch.bfloat16).is_exact
    True
    """

    mode: Literal["exact", "fast"] = "exact"
    autocast: torch.dtype | None = None
    update: Literal["commit", "eager"] = "commit"
    check_every: int | Literal["auto"] | None = "auto"
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        one_of("numerics mode", self.mode, ("exact", "fast"))
        one_of("update", self.update, ("commit", "eager"))
        if self.check_every not in ("auto", None) and (type(self.check_every) is not int or self.check_every < 1):
            raise UsageError(
                f"check_every={self.check_every!r} is no number of steps", hint="1 or more, 'auto' or None"
            )
        if self.autocast is not None and not getattr(self.autocast, "is_floating_point", False):
            raise UsageError(f"autocast={self.autocast!r} is no dtype of numbers", hint="torch.bfloat16, or None")
        try:
            self.choose_device()
        except (RuntimeError, TypeError) as e:
            raise UsageError(f"device={self.device!r} is not known to torch", hint="'cpu', 'cuda:0' …") from e

    @classmethod
    def of(cls, given: object) -> Numerics:
        """Return the settings that a user means by ``numerics=given``: a mode alone, or all of them."""
        if isinstance(given, Numerics):
            return given
        return cls(mode=given)  # type: ignore[arg-type]  # checked there

    @property
    def is_exact(self) -> bool:
        """Whether the same bits come out on any number of workers."""
        return self.mode == "exact"

    @property
    def is_eager(self) -> bool:
        """Whether layers are updated before the vote."""
        return self.update == "eager"

    def choose_device(self) -> torch.device:
        """Return the device that this worker computes on."""
        if self.device is not None:
            return torch.device(self.device)
        if torch.cuda.is_available():  # untested here
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cpu")
