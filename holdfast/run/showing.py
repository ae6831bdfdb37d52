"""Reports of how far a training is: to the agent, which shows them, or to a bar that the script has asked for."""

from __future__ import annotations

import time

from holdfast.bar import Bar, Pace
from holdfast.cluster import lifeline
from holdfast.run.script import Step

REPORT_SECONDS = 0.25  # between two reports: a bar that moves four times a second looks alive


class Showing:
    """The reports of one loop over steps, on one worker. ``total``: of the steps; None: the data decide.

    ``asked``: True or False, or None if the script did not say: then ``holdfast run`` shows the progress, and a script
    of one process shows nothing.
    """

    def __init__(self, total: int | None, *, asked: bool | None, has_agent: bool) -> None:
        self._total = total
        self._to_agent = has_agent and asked is not False
        self._bar = Bar() if asked and not has_agent else None
        self._pace = Pace()
        self._told = 0.0

    def step(self, step: Step) -> None:
        """Report a step, unless the last report was just now. The first worker reports."""
        now = time.monotonic()
        is_last = step.number + 1 == self._total
        if not step.is_first_worker or (now - self._told < REPORT_SECONDS and not is_last):
            return
        self._told = now
        done = step.number + 1
        facts = {"step": done, "total": self._total, "rate": self._pace.at(done, now)}
        facts |= {"loss": step.loss, "lr": step.lr, "workers": step.workers}
        if self._bar is not None:
            self._bar.show(facts)
        elif self._to_agent:
            lifeline.report("progress", **facts)

    def close(self) -> None:
        """End the reports: the loop is over, or was left."""
        if self._bar is not None:
            self._bar.close()
