"""``Training``: the core of a run. It takes its place among the workers, commits steps, and ends with its process.

What a user calls is in ``run.py``. Whatever surrounds a step is called from here, in one order: journal, checks for
drift, checkpoints, joins and leaves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.places import Place, on_disk
from holdfast.checks import to_whole, truth
from holdfast.cluster import faults, lifeline
from holdfast.cluster.client import Stopped
from holdfast.cluster.events import Events
from holdfast.cluster.membership import GIVEN_UP, Generation, Solo
from holdfast.cluster.pulse import PULSE
from holdfast.commit.cohort import Cohort
from holdfast.commit.operation import End
from holdfast.commit.settle import Settlement
from holdfast.engine.model import in_eval
from holdfast.engine.profile.hook import about_to_train
from holdfast.engine.progress import Progress
from holdfast.engine.scatter import send_parts
from holdfast.engine.script_state import ScriptState
from holdfast.engine.state import State
from holdfast.errors import UsageError
from holdfast.journal.journal import Journal
from holdfast.journal.rows import FACTS
from holdfast.run import process
from holdfast.run.bookkeeper import Bookkeeper
from holdfast.run.drift import DriftWatch
from holdfast.run.label import make_label, make_shape
from holdfast.run.loops import Loops, ScriptLoop
from holdfast.run.parts import make_arranger, make_engine
from holdfast.run.results import Results
from holdfast.run.saver import Saver
from holdfast.run.script import Script
from holdfast.run.script import Step as Step
from holdfast.run.settings import Settings
from holdfast.run.showing import Showing
from holdfast.run.team import find_team, refuse
from holdfast.sync.report import EVERY_STEP, Report, Totals
from holdfast.sync.run_training import RunTraining
from holdfast.words import count

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """When and where a step was begun: time, generation, and what this worker had waited and sent until then."""

    at: float
    generation: int
    waited: float
    sent: int

    def since(self, begun: Begun) -> dict[str, float]:
        """Return what the step has taken, from its begin until now, for the events.

        >>> now = Begun(at=12.5, generation=2, waited=3.0, sent=700)
        >>> now.since(Begun(at=12.0, generation=1, waited=2.75, sent=500))
        {'seconds': 0.5, 'waited': 0.25, 'sent': 200}
        """
        seconds, waited = round(self.at - begun.at, 6), round(self.waited - begun.waited, 6)
        return {"seconds": seconds, "waited": waited, "sent": self.sent - begun.sent}


class Training:
    """Training of one worker among others: its place, its steps, what surrounds them, and its end.

    Raises ``UsageError`` for settings that make no sense.
    """

    def __init__(self, settings: Settings) -> None:
        self._team = find_team()
        self.engine, self._log = make_engine(settings)
        refuse(settings, self.engine, self._team)
        if self._team.size > 1:
            send_parts(self.engine.model.module)
        engine, kept = self.engine, settings.checkpoint
        label = make_label(settings, engine)
        self._progress = Progress(label=label)
        self._state = State(
            engine.model,
            engine.update,
            self._progress,
            holdings=engine.holdings,
            script=ScriptState(settings.state),
            look=engine.look_at,
        )
        self._events = Events(os.environ.get("HOLDFAST_EVENTS") if self._team.leads else None)
        self._saver = Saver(kept, self._state, self._events, self._log) if kept else None
        self._arranger = make_arranger(settings, engine, self._state, self._events, self._saver, self._log)
        self._trace = bool(os.environ.get("HOLDFAST_TRACE"))
        self._script = Script()
        self._loops = Loops(self._script, self._progress, self._state.script)
        self._drift = DriftWatch(settings.check_every, self._state)
        self._said = ""  # about what can be survived
        self._begun_at: int | None = None  # the step with which this worker's script has begun
        self._in_eval = in_eval(engine.model.module)  # until the user is told
        self._last: Step | None = None  # the last one that this process has made
        self._wished = settings.placement.tolerate or 0  # what the user has asked for in so many words
        membership = process.membership(label | make_shape(settings), self._team)
        self._cohort = Cohort(membership, self._arranger, engine.model.device, self._events, team=self._team)
        self._results = Results(engine, self._state, self._cohort, self._script, self._settle)
        self._books = Bookkeeper(engine.feed, self._progress, self._cohort, on_disk(self.folder))
        self._journal = self._make_journal()
        self._apart = None
        if settings.policy is not None:
            parts = (engine, self._state, self._cohort, self._events)
            self._apart = RunTraining(settings.policy, *parts, between=self._between_steps)
        worker = membership.worker
        faults.plan(worker if self._team.size == 1 else f"{worker}.{self._team.rank}")
        if self._saver is not None:
            saver = self._saver
            self._cohort.on_enter(lambda generation, _: saver.enter(generation, worker, leads=self._team.leads))
        self._cohort.on_enter(self._begin)  # after the saver: it needs the lease of the folder
        process.add(self)

    def _make_journal(self) -> Journal:
        """Return the journal, whose file is in the folder of the checkpoints, or in that of the workers' logs."""
        events = os.environ.get("HOLDFAST_EVENTS")
        folder = on_disk(self.folder) or (None if events is None else Path(events).parent)
        check = (lambda: None) if self._saver is None else self._saver.fence.check
        return Journal(
            self._progress,
            is_first=lambda: self._cohort.is_first,
            folder=folder,
            check=check,
            ends_at_exit=not self.has_agent,
        )

    def _begin(self, generation: Generation, settlement: Settlement) -> None:
        """Begin the run, perhaps not for the first time: nothing was committed before.

        Others may have trained meanwhile without this worker, and may be lost, but for a checkpoint. A script that is
        past its first boundary cannot come to where the checkpoint is. So the worker is started anew.
        """
        if settlement.begins is None:
            return
        begins_at = 0 if self._saver is None else self._saver.resumed_at or 0
        if self._begun_at not in (None, begins_at) and not self._state.script.is_waiting:
            logger.warning("others have trained to step %d without this worker: it is started anew", begins_at)
            raise Stopped(GIVEN_UP)
        self._begun_at = begins_at
        self._loops.begin_again()
        self._journal.begin(self._progress.step)
        if self.is_first_worker:
            self._event("journal", path=str(self._journal.path))

    @property
    def folder(self) -> Place | None:
        """The folder of this run's checkpoints."""
        return None if self._saver is None else self._saver.settings.root.absolute()

    @property
    def has_agent(self) -> bool:
        """Whether ``holdfast run`` has started this process."""
        return not isinstance(self._cohort.membership, Solo)

    def fail_if_unsaved(self) -> None:
        """Raise ``CheckpointError`` if the last checkpoint could not be saved."""
        if self._saver is not None:
            self._saver.fail_if_unsaved()

    def release(self) -> None:
        """Write the last rows of the journal, and give the lease of the folder back, if this worker has it."""
        self._journal.end()
        if self._saver is not None:
            self._saver.release()

    # --- training --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of committed steps, where the script is: between two loops, up to the end of the first of them.

        So a worker that joins later, or a rerun, gets there what the others had, and ``run.steps(run.step + 100)``
        means the same loop to all.
        """
        return self._loops.step

    @property
    def last(self) -> Step | None:
        """The last committed step, also where another process has made it; None before the first.

        After a loop it is there even if the loop had nothing left to do: a checkpoint had all steps, or this worker
        has joined late. A checkpoint is read when training begins, so ask for it in the loop or after it. ``workers``
        and ``is_first_worker`` are those of now. ``seconds`` and ``sync`` are known where this process has made it.
        """
        if self._progress.last is None:
            return None
        mine = self._last if self._last is not None and self._last.number == self._progress.last["number"] else None
        return self._made() if mine is None else self._made(mine.sync, mine.seconds)

    @property
    def workers(self) -> int:
        """Number of workers that train at the moment."""
        return self._cohort.size

    @property
    def is_first_worker(self) -> bool:
        """Whether this worker is the first of those that train. Before training begins, none is."""
        return self._cohort.is_first

    def _turn(self, showing: Showing) -> Iterator[Any]:
        """Go once through the body of the script's loop, with what ``steps`` yields there."""
        raise NotImplementedError

    def _steps(self, total: int | None, *, progress: bool | None) -> Iterator[Any]:
        """Yield until ``total`` steps are committed, as ``Run.steps`` and ``Loop.steps`` describe it."""
        if total is not None:
            total = to_whole("total", total, least=0)
        elif not self.engine.feed.ends:
            raise UsageError("these data have no end", hint="run.steps(1000), or holdfast.Stream(…, epochs=1)")
        if progress is not None:
            truth("progress", progress)
        about_to_train(self)  # `holdfast profile` measures instead
        if self._cohort.group is None:
            process.give_way(self)
        self._journal.close()
        loop = self._loops.come_to(total)
        self._boundary()
        self._loops.enter(loop, trains=self._trains(loop), is_first_worker=self.is_first_worker)
        self._say_if_done(total)
        self._say_what_trains()
        showing = Showing(total, asked=progress, has_agent=self.has_agent)
        try:
            while self._trains(loop):
                if not self._progress.commits:  # else a step comes again, of which a part is committed
                    self._save_if_due()  # a log begins with a checkpoint
                yield from self._turn(showing)
        except GeneratorExit:
            self._loops.leave(loop)
            self._journal.after(self._progress.step - 1, is_past=False)
            raise
        finally:
            showing.close()
        self._loops.end(loop)
        reached = self._loops.last_step(loop)
        self._journal.after(reached - 1, is_past=self._progress.step > reached)
        is_here = self._progress.step == reached  # a joiner's script runs through loops that are long over
        if is_here and not self._loops.is_left(loop):
            self._settle("the last step")
            self._save_if_due(last=True)

    @property
    def _is_over(self) -> bool:
        """Whether the data have come to their end."""
        return self.engine.feed.is_over(self._progress.data)

    def _trains(self, loop: ScriptLoop) -> bool:
        """Return whether a loop has steps to make: neither it nor the data are over."""
        begun = self._progress.commits > 0  # a step of several updates is under way
        at_end = (self._is_over and not begun) or (loop.total is not None and self._progress.step - begun >= loop.total)
        return not at_end and not self._loops.is_left(loop)

    def _say_if_done(self, total: int | None) -> None:
        """Say that a loop has nothing left to do, because the checkpoint that this run began with has all its steps."""
        resumed = None if self._saver is None else self._saver.resumed_at
        at = self._progress.step
        is_at_end = self._is_over if total is None else at >= total
        if resumed is not None and resumed == at and is_at_end and self.is_first_worker:
            done = f"all {count(at if total is None else total, 'step')} were trained before"
            hint = "for more, ask for more steps, or take another folder; behind the loop, run.last is the last step"
            logger.warning("%s: this loop has nothing left to train (%s)", done, hint)

    def _say_what_trains(self) -> None:
        """Warn of modules in ``eval()``: a plain loop may have meant to leave them so."""
        if self._in_eval and self.is_first_worker:
            said = "%r was in eval(), and a step puts the whole model into train() (to freeze it: its eval() in loss)"
            logger.warning(said, self._in_eval[0])
        self._in_eval = []

    def _between_steps(self) -> None:
        self._progress.parts = []
        self._journal.close()
        self._drift.look(self._cohort)
        self._save_if_due()
        self._boundary()

    def _boundary(self) -> None:
        """Let workers join and leave here, if some want to. Joiners get the script's state as it is here."""
        cohort = self._cohort
        if cohort.stops:
            self._settle("workers join or leave")
        with self._state.script.waiting(regroups=cohort.group is None or cohort.stops):
            cohort.boundary()

    def finish(self) -> None:
        """End the training: return when all workers have committed the last step. Called at the end of the script.

        A worker whose last vote broke needs somebody to tell it that the step is committed.
        """
        if self._cohort.group is not None:
            self._journal.close()
            self._settle("the end")
            self._loops.forget_what_followed()
            self._save_if_due(last=True)  # the loop may have been left
            if self._saver is not None:
                self._saver.settle(self._cohort)
            self._cohort.commit(End())
            self._books.end()  # the worker that should have written the last record may be lost
            self._cohort.membership.finished()
            self.release()

    def leave(self, *, dismissed: bool = False) -> None:
        """Complete what is being written: return when no checkpoint is any more, and close the log.

        ``dismissed``: the others know that this worker leaves, and train on.
        """
        if self._saver is not None:
            if dismissed:
                self._saver.dismiss()
            self._saver.leave()
        if self._cohort.everybody_leaves:  # else the next first worker takes the lease over
            self.release()
        if self._log is not None:
            self._log.close()

    def _save_if_due(self, *, last: bool = False) -> None:
        if self._saver is not None:
            if self._saver.is_due(self._cohort, last=last):
                self._settle("a checkpoint")
                self._books.sync()
            self._saver.if_due(self._cohort, last=last)
        elif self._cohort.everybody_leaves:
            lifeline.report(
                "unsaved", step=self._progress.step, reason="the run has no checkpoint folder", wanted=False
            )

    def _settle(self, why: str, *, full: bool = True) -> None:
        """Make replicas equal that train apart. ``why`` is for the report; ``full``: the optimizer's state too."""
        if self._apart is not None:
            self._apart.settle(why, full=full)
            self._apart.compute_together()

    def _begun(self) -> Begun:
        """Return when and where a step is begun that begins now."""
        cohort = self._cohort
        return Begun(at=time.monotonic(), generation=cohort.generation, waited=PULSE.waited, sent=cohort.sent)

    def _committed(self, loss: float, report: Report, begun: Begun) -> Step:
        """Note that a step is committed; return it."""
        cohort, now = self._cohort, self._begun()
        seconds = now.at - begun.at
        if self._saver is not None and cohort.generation == begun.generation:  # a recovery is not the cost of a save
            self._saver.costs.step(seconds, saving=self._saver.busy)
        self._books.end()
        step = self._last = self._made(report, seconds)
        self._event("commit", step=step.number, loss=loss, **now.since(begun))
        self._say_what_is_survived()
        if self._progress.commits <= 1:  # a step has one row
            self._journal.write()
            self._journal.open(step=step.number, facts={name: getattr(step, name) for name in FACTS})
        return step

    def _made(self, report: Report = EVERY_STEP, seconds: float = 0.0) -> Step:
        """Return the last committed step. ``report`` and ``seconds``: what only the process that made it knows."""
        assert self._progress.last is not None
        return self._step_of(self._progress.last, report, seconds)

    def _step_of(self, known: Mapping[str, Any], report: Report = EVERY_STEP, seconds: float = 0.0) -> Step:
        cohort = self._cohort
        return Step(
            **known,
            epoch=self.engine.feed.epoch(self._progress.update - 1, self._progress.data),
            workers=cohort.size,
            is_first_worker=cohort.is_first,
            seconds=seconds,
            sync=report,
        )

    @property
    def _traced(self) -> Callable[[list[Any]], None] | None:
        """Of each vote: what notes the samples, if tests ask for that."""
        return (lambda samples: self._event("vote", step=self._progress.step, samples=samples)) if self._trace else None

    def _event(self, event: str, **fields: Any) -> None:
        cohort = self._cohort
        self._events.write(event, worker=cohort.membership.worker, generation=cohort.generation, **fields)

    def _say_what_is_survived(self) -> None:
        """Warn if the workers are too few for the wished tolerance: once for each number of them, not at each step."""
        wished, possible = self._wished, self._arranger.layout.tolerate
        said = f"{count(self.workers, 'worker')} cannot survive the loss of {wished}" if possible < wished else ""
        if said and said != self._said and self.is_first_worker:
            logger.warning(said)
        self._said = said

    @property
    def sync_totals(self) -> Totals:
        """Totals of this worker: steps, synchronisations, bytes sent, and how far replicas were apart."""
        if self._apart is not None:
            return self._apart.totals
        steps = self._progress.step
        return Totals(steps=steps, synchronised=steps, exchanged=steps, sent=self._cohort.sent)
