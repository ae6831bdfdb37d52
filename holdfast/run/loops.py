"""The loops over steps of a script: which of them are over, and the script's state in and after them.

A script has the same loops whenever it runs, so a loop is known by its number and its last step. A loop that the script
has left, by ``break``, is over: workers that join later pass it, and so does a rerun.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from holdfast.engine.progress import Progress
from holdfast.engine.script_state import ScriptState
from holdfast.run.script import Script

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScriptLoop:
    """One loop over steps of the script, until ``total`` steps are committed; None: until the data end."""

    number: int
    total: int | None

    @property
    def name(self) -> str:
        """The name of this loop, the same whenever the script runs.

        >>> ScriptLoop(number=0, total=1000).name
        '0 to 1000'
        """
        return f"{self.number} to {self.total}"


class Loops:
    """The loops of this worker's script, one after the other.

    ``progress`` and ``state`` tell other workers, and later runs, how far the script has come.
    """

    def __init__(self, script: Script, progress: Progress, state: ScriptState) -> None:
        self._script, self._progress, self._state = script, progress, state
        self._count = 0
        self._open: ScriptLoop | None = None
        self._behind: ScriptLoop | None = None  # the loop that the script has come out of last, and is in no other

    @property
    def step(self) -> int:
        """Number of committed steps where the script is: others may be farther than the loops it has passed."""
        return self._progress.step if self._behind is None else self.last_step(self._behind)

    def come_to(self, total: int | None) -> ScriptLoop:
        """Note that the script comes to its next loop."""
        if self._open is not None:  # its iterator was left lying
            self.leave(self._open)
        loop = ScriptLoop(number=self._count, total=total)
        self._count += 1
        self._open, self._behind = loop, None
        self._state.enter(loop.name)
        return loop

    def is_left(self, loop: ScriptLoop) -> bool:
        """Return whether the script has left a loop, now or when it ran before."""
        return loop.name in self._progress.left

    def last_step(self, loop: ScriptLoop) -> int:
        """Return the number of steps after which a loop was over: data may end before it does, or the script leave."""
        step = self._progress.step
        return self._progress.left.get(loop.name, step if loop.total is None else min(loop.total, step))

    def enter(self, loop: ScriptLoop, *, trains: bool, is_first_worker: bool) -> None:
        """Take over the state that belongs here, once this worker knows where the run is.

        ``trains``: the loop has steps to make.
        """
        results, left = self._progress.results, self._progress.left.get(loop.name)
        self._state.catch_up(trains=trains, remembered=results.get(_key(loop)))
        self._progress.loop = loop.name
        if left == self._progress.step and is_first_worker:
            logger.warning(
                "the script has left its loop to step %s after step %d: the loop is over (to train on, give run.steps "
                "another number)",
                loop.total,
                left,
            )

    def begin_again(self) -> None:
        """Note that the run has begun anew while this worker's script was in a loop already: nothing was committed."""
        if self._open is not None:
            self._progress.loop = self._open.name

    def leave(self, loop: ScriptLoop) -> None:
        """Note that the script has left a loop before its last step."""
        if self._open is loop and loop.name not in self._progress.left:
            self._progress.left[loop.name] = self._progress.step
            self._end(loop)

    def end(self, loop: ScriptLoop) -> None:
        """Note that a loop is over: it has come to its end, or was before."""
        self._end(loop)

    def _end(self, loop: ScriptLoop) -> None:
        self._open, self._behind = None, loop
        left = self._progress.left.get(loop.name)
        self._script.move_to(f"after {loop.total}" if left is None else f"after {loop.name}, left at {left}")
        values = self._state.end()
        if values and self._is_new(loop):
            self._progress.results[_key(loop)] = values

    def _is_new(self, loop: ScriptLoop) -> bool:
        return _key(loop) not in self._progress.results

    def forget_what_followed(self) -> None:
        """Forget the results since the last loop, before the last checkpoint: a rerun asks for them again."""
        place = self._script.prefix
        results = self._progress.results
        self._progress.results = {key: value for key, value in results.items() if not key.startswith(place)}


def _key(loop: ScriptLoop) -> str:
    return f"state after {loop.name}"
