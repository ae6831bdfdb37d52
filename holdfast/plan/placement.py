"""``Placement``: a user's settings of where layers go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.checks import by_name, whole
from holdfast.errors import UsageError
from holdfast.words import parse_size


@by_name
@dataclass(frozen=True, kw_only=True)
class Placement:
    """Settings of where a run's layers go. By default every worker holds the whole model.

    - ``stages``: how each pipeline is cut. An int is its number of stages, a list the number of layers of each
      stage. "auto": the planner chooses, from what it measures at the start. None: "auto" if ``memory`` or ``profile``
      is given, else 1: every worker holds the whole model.
    - ``tolerate``: how many workers may be lost at once: more than so many hold each layer. None: one, if there are
      enough workers.
    - ``memory``: memory of a worker that the planner may fill, in bytes, or text such as "2GB". None: no limit on a
      CPU, and the device's own memory elsewhere.
    - ``profile``: path of a profile made by ``holdfast profile``. None: the run measures one when it starts.

    Raises ``UsageError`` for values that are none of these, and if ``memory`` or ``profile`` is given although
    ``stages`` leaves nothing to plan.

    >>> Placement(stages=2, memory="2GB").memory_bytes
    2000000000
    """

    stages: int | Sequence[int] | Literal["auto"] | None = None
    tolerate: int | None = None
    memory: int | str | None = None
    profile: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        stages, is_list = self.stages, isinstance(self.stages, list | tuple)
        counts = list(stages) if isinstance(stages, list | tuple) else [stages]
        if stages not in (None, "auto") and (not counts or any(type(n) is not int or n < 1 for n in counts)):
            raise UsageError(
                f"stages={stages!r} is neither a number of stages nor the layers of each", hint="2, [3, 3, 4] or 'auto'"
            )
        if self.tolerate is not None:
            whole("tolerate", self.tolerate, least=0)
        if not isinstance(self.memory, int | str | None) or (self.memory is not None and (self.memory_bytes or 0) < 1):
            raise UsageError(f"memory={self.memory!r} is no memory to plan with", hint="bytes, or text as in '2GB'")
        if not isinstance(self.profile, str | os.PathLike | None):
            raise UsageError(f"profile={self.profile!r} is no path", hint="the file that holdfast profile has written")
        if (self.memory is not None or self.profile is not None) and (stages == 1 or is_list):
            raise UsageError(f"with stages={stages!r} there is nothing to plan", hint="leave out memory= and profile=")

    @classmethod
    def of(cls, given: object) -> Placement:
        """Return the settings that a user means by ``placement=given``. None means the defaults."""
        if given is None:
            return cls()
        if not isinstance(given, Placement):
            raise UsageError(f"placement={given!r} is no placement", hint="as in holdfast.Placement(stages=2)")
        return given

    @property
    def cut(self) -> int | Sequence[int] | None:
        """How pipelines are cut: their number of stages, or the layers of each; None: the planner chooses."""
        if self.stages is None:
            return 1 if self.memory is None and self.profile is None else None
        return None if isinstance(self.stages, str) else self.stages

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a worker in bytes."""
        return parse_size(self.memory) if isinstance(self.memory, str) else self.memory
