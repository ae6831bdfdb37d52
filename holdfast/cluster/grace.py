"""The grace of a preemption notice: how long workers have to leave, how far they are, and how it ended.

One plan covers everything between the notice and the end of the agent: the way to the step boundary, the last
checkpoint, and a margin to say what was not saved. It has no clock and no sockets: the time is an argument.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from holdfast.cluster.membership import Message

DEFAULT_SECONDS = 30.0  # what Kubernetes and SLURM (KillWait) give if nobody has changed it
MARGIN_SECONDS = 2.0  # of the grace, at most: to kill workers that are late, to say so, and to end
LONGEST_NOTICE = 65535.0  # seconds: the most that SLURM's --signal takes
NOT_SAVED = 5  # exit code: the workers had to leave, and the last steps are lost


def seconds_of(number: int, environment: Mapping[str, str], now: float) -> float:
    """Return the grace after a signal, in seconds, as far as the scheduler's environment tells.

    ``now``: the time of day, in seconds since 1970. SIGUSR1 and SIGUSR2 are what SLURM's ``--signal`` sends some time
    before the end of the job, and SLURM_JOB_END_TIME says when that is. SIGTERM comes at the end, or out of turn;
    HOLDFAST_SIGTERM_GRACE is what ``slurm.notice_of`` has found.

    >>> seconds_of(signal.SIGUSR1, {"SLURM_JOB_END_TIME": "1120"}, now=1000.0)
    120.0
    >>> seconds_of(signal.SIGTERM, {"SLURM_JOB_END_TIME": "1120"}, now=1000.0)
    30.0
    """
    end = environment.get("SLURM_JOB_END_TIME", "")
    if number in (signal.SIGUSR1, signal.SIGUSR2) and end.isdigit() and 0 < int(end) - now <= LONGEST_NOTICE:
        return int(end) - now
    wait = environment.get("HOLDFAST_SIGTERM_GRACE", "")
    return float(wait) if number == signal.SIGTERM and wait.isdigit() else DEFAULT_SECONDS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a departure has ended: the agent's exit code, and a sentence. ``is_loss``: work was lost against the plan."""

    code: int
    text: str
    saved: int | None = None  # step of the checkpoint that was saved
    is_loss: bool = False


@dataclass(kw_only=True)
class Departure:
    """The plan of an agent whose workers were asked to leave, and what they have reported so far.

    >>> plan = Departure(signal=signal.SIGTERM, seconds=30.0, begin=100.0, begun=True)
    >>> plan.hear("0.0", {"report": "saving", "step": 120, "done": 43, "size": 100})
    >>> plan.line(102.0)
    'SIGTERM: leaving; 28 s of grace left; saving step 120: 43 %'
    """

    signal: int
    seconds: float  # from the notice to the end of the grace
    begin: float  # time of the notice
    begun: bool  # training had begun: there is something to lose
    has_run: bool = True  # the script has a ``Run``, as far as known; else the signal is passed on to it
    _saving: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # by worker: step, bytes done, all bytes
    _saved: int | None = None  # step of the last checkpoint
    _unsaved: Message | None = None  # report of a last checkpoint that was not to be
    _idle: set[str] = field(default_factory=set)  # workers that were not in training
    _left: set[str] = field(default_factory=set)  # workers that have left in order

    @property
    def name(self) -> str:
        """The name of the signal."""
        return signal.Signals(self.signal).name

    @property
    def plan(self) -> str:
        """What the workers are asked to do."""
        return "leaving at the next step boundary" if self.has_run else "passed on to the workers: none has made a Run"

    @property
    def deadline(self) -> float:
        """When workers that are still there are killed: before the end of the grace, so that the agent can say so."""
        return self.begin + self.seconds - min(MARGIN_SECONDS, self.seconds / 4)

    def hear(self, worker: str, report: Message) -> None:
        """Take in a worker's report (``lifeline.report``)."""
        kind = report["report"]
        if kind == "saving":
            self._saving[worker] = (report["step"], report["done"], report["size"])
        elif kind == "saved":
            self._saved, self._unsaved = report["step"], None
        elif kind == "unsaved":
            self._unsaved = report
        elif kind == "idle":
            self._idle.add(worker)

    def ended(self, worker: str, code: int) -> None:
        """Note that a worker has ended."""
        if code == 0:
            self._left.add(worker)

    def line(self, now: float) -> str:
        """Return a line that shows how far the workers are."""
        left = max(0.0, self.begin + self.seconds - now)
        return f"{self.name}: leaving; {left:.0f} s of grace left; {self._doing()}"

    def _doing(self) -> str:
        if self._saved:
            return f"step {self._saved} is saved; ending"
        if not self.has_run:
            return "waiting for the script to end"
        waiting = "on the way to a step boundary" if self.begun else "training has not begun yet"
        return self._written("saving step {step}: {percent} %") or waiting

    def _written(self, text: str) -> str:
        """Fill in the step and the percentage of the checkpoint that is being written; "" if none is."""
        if not self._saving:
            return ""
        step = max(step for step, _, _ in self._saving.values())
        done, size = (sum(saving[i] for saving in self._saving.values() if saving[0] == step) for i in (1, 2))
        return text.format(step=step, percent=100 * done // max(1, size))

    def outcome(self, late: Collection[str] = ()) -> Outcome:
        """Return how it has ended, now that no worker is left but those that are ``late``."""
        code = 128 + self.signal
        if self._saved is not None:
            text = f"left; step {self._saved} is saved" if self._saved else "left; nothing was trained yet"
            return Outcome(code=code, text=text, saved=self._saved)
        if self._unsaved is not None:
            step, reason, wanted = self._unsaved["step"], self._unsaved["reason"], self._unsaved["wanted"]
            text = f"left; nothing is saved of the {step} steps that were trained: {reason}"
            return Outcome(code=NOT_SAVED if wanted else code, text=text, is_loss=wanted)
        if not self.has_run:
            return Outcome(code=code, text="left; no worker has made a Run, so saving was left to the script")
        if not self.begun:
            return Outcome(code=code, text="left before training began: there was nothing to save")
        if self._left and not late and self._left <= self._idle:
            return Outcome(code=code, text="left; its workers were waiting to join, and had nothing to save")
        if self._left and not late:
            return Outcome(code=code, text="left; the other workers train on, so nothing had to be saved here")
        return Outcome(code=NOT_SAVED, text=self._lost(late), is_loss=True)

    def _lost(self, late: Collection[str]) -> str:
        over = f"the grace of {self.seconds:g} s is over" if late else "no worker is left"
        hint = "(set --grace to what the scheduler gives; save more often to lose less)"
        if saving := self._written("step {step} is not saved: {percent} % of it is written"):
            return f"{over}, and {saving} {hint}"
        who = f"workers {', '.join(late)} had" if late else "none had"
        lost = "what was trained since the last checkpoint is lost, unless workers elsewhere hold it"
        return f"{over}, and {who} not come to a step boundary: {lost} {hint}"
