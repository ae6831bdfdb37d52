"""Drift: workers compare digests of what must be equal, now and then, and end the run if it is not.

Replicas of a layer, the optimizer's settings and the script's state are the same on every worker by design. They are
not if memory or a processor is faulty, or if a script changes something on some workers only.
"""

from __future__ import annotations

import json
import math
import time
from typing import Literal

import xxhash

from holdfast.cluster.group import Group
from holdfast.cluster.texts import Texts
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import Kind, Operation
from holdfast.engine.agreement import MODEL, SETTINGS, refuse_to_drift
from holdfast.engine.state import State
from holdfast.errors import Drift

FIRST = 100  # steps to the first check, and between two at least: a check costs at most about as much as a step
SHARE = 0.001  # of the time of training, for checks whose interval is chosen


def steps_to_next(*, seconds: float, step_seconds: float) -> int:
    """Return after how many steps the next check comes, so that checks take at most ``SHARE`` of the time.

    ``seconds``: what a check takes. ``step_seconds``: what a step takes.

    >>> steps_to_next(seconds=0.01, step_seconds=0.1), steps_to_next(seconds=1.0, step_seconds=0.1)
    (100, 10000)
    """
    return max(FIRST, math.ceil(seconds / (SHARE * max(step_seconds, 1e-6))))


class DriftWatch:
    """Decides when workers compare what they hold. ``every``: steps between two checks; "auto": chosen; None: never."""

    def __init__(self, every: int | Literal["auto"] | None, state: State) -> None:
        self._every, self._state = every, state
        self._since: tuple[int, float] | None = None  # step and time of the last check, or of the begin

    def look(self, cohort: Cohort) -> None:
        """Compare if it is time for that. Called after each step. Raises ``Drift`` on all workers."""
        step, now = self._state.progress.step, time.monotonic()
        if self._every is None or cohort.size == 1:
            return
        since = self._since = self._since or (step - 1, now)
        if self._every == "auto":
            due = self._state.progress.check = self._state.progress.check or step - 1 + FIRST
        else:
            due = step if step % self._every == 0 else step + 1
        if step < due:
            return
        took = (now - since[1]) / max(1, step - since[0])
        chosen = cohort.commit(CompareDigests(self._state, step_seconds=took))
        self._since = (step, time.monotonic())
        if self._every == "auto":
            self._state.progress.check = step + int(chosen)


class CompareDigests(Operation):
    """The operation in which workers compare digests of what they hold. Its value: steps to the next one."""

    kind: Kind = "check"

    def __init__(self, state: State, *, step_seconds: float) -> None:
        self._state, self._step_seconds = state, step_seconds

    def attempt(self, group: Group) -> list[float]:
        begin = time.monotonic()
        state, model = self._state, self._state.model
        mine = state.digests(new=xxhash.xxh3_128, of_team=False) | state.digest_of_settings(xxhash.xxh3_128)
        said = [json.loads(text) for text in Texts(group, model.device).exchange(json.dumps(mine).encode())]
        # Modules may keep what they like as extra state: a run has never promised that it is the same everywhere.
        names = [name for name in state.names() if not (name.startswith(MODEL) and name.endswith("._extra_state"))]
        try:
            refuse_to_drift([*names, SETTINGS], said, group.generation.workers)
        except Drift as e:
            raise Drift(f"after step {state.progress.step}: {e}") from None
        chosen = steps_to_next(seconds=time.monotonic() - begin, step_seconds=self._step_seconds)
        return [float(chosen) if group.is_first else 0.0]
