"""The fold: takes in a run's events and the rows of its journal one by one, and shows what the run looks like.

It has no files and no clock. Whatever an event says, it raises nothing: files may be damaged, or written by a newer
holdfast. Memory is bounded however long a run is: curves get coarser, of the past the last moments are kept.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.watch.series import Clock, Series
from holdfast.watch.survival import OVER, UNSETTLED, Place, Survival, survival
from holdfast.watch.view import Kind, Moment, Phase, Saved, State, View, WorkerView, slow_ones
from holdfast.words import count, seconds_text, size_text, some_of

MOMENTS = 300  # of each kind that are kept: a page shows fewer
HISTORY = 20_000  # events that show the past again: fifty generations of 200 workers, about 15 MB
GONE = 100  # lost workers that are listed
RECENT = 0.2  # weight of a new step in a worker's recent times: they follow within ten steps
PACE = 32  # steps that the present throughput is taken from
TEXT = 400  # characters of a text that comes from a file
FACTS = ("lr", "grad_norm", "seconds", "tokens", "workers")  # of a row of the journal; losses are in the events
EDGES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, math.inf)  # seconds, of classes of recoveries
CURVES = ("loss", "lr", "grad_norm", "seconds", "samples_rate", "workers")

Event = Mapping[str, Any]


@dataclass(slots=True)
class Worker:
    """A worker as it is known so far."""

    name: str
    host: str = ""
    state: State = "starting"
    pids: dict[int, int] = field(default_factory=dict)  # by rank in the team
    since: float = 0.0
    until: float | None = None
    generation: int = 0
    pipeline: int | None = None
    stage: int | None = None
    first: int = 0
    stop: int = 0
    step: int | None = None
    seconds: float | None = None
    waited: float | None = None
    sent: float | None = None
    received: int = 0
    why: str = ""
    log: str | None = None

    @property
    def computing(self) -> float | None:
        """Recent seconds of a step in its own code."""
        return None if self.seconds is None or self.waited is None else max(0.0, self.seconds - self.waited)

    def view(self, *, slow: bool = False) -> WorkerView:
        """Return it as it is now."""
        own = {name: getattr(self, name) for name in _SHOWN}
        pids = tuple(self.pids[rank] for rank in sorted(self.pids))
        return WorkerView(**own, pids=pids, computing=self.computing, waiting=self.waited, slow=slow)


_SHOWN = (
    *("name", "host", "state", "since", "until", "pipeline", "stage", "first", "stop", "step", "seconds", "sent"),
    *("received", "why", "log"),
)


class Fold:
    """The state of a run, from its events in order.

    >>> fold = Fold()
    >>> fold.hear({"t": 1.0, "event": "started", "worker": "0.0", "host": "a", "pid": 7})
    >>> fold.hear({"t": 2.0, "event": "generation", "number": 1, "workers": ["0.0"], "hosts": ["a"], "reason": "ready"})
    >>> fold.hear({"t": 3.0, "event": "commit", "worker": "0.0", "generation": 1, "step": 0, "loss": 0.5})
    >>> view = fold.view()
    >>> view.phase, view.step, view.loss, [worker.name for worker in view.workers]
    ('training', 1, 0.5, ['0.0'])
    """

    def __init__(self, *, history: int = HISTORY) -> None:
        self._limit = history
        self._base: Fold | None = None  # what the forgotten part of the history comes to
        self._history: list[Event] = []  # all events but commits, to show the past again
        self._workers: dict[str, Worker] = {}
        self._gone: deque[Worker] = deque(maxlen=GONE)
        self._agents: dict[int, None] = {}
        self._agent_pids: dict[int, None] = {}
        self._members: list[str] = []
        self._moments: dict[Kind, deque[Moment]] = {}
        self._counts: Counter[str] = Counter()
        self._saved: deque[Saved] = deque(maxlen=20)
        self._recoveries: deque[float] = deque(maxlen=MOMENTS)
        self.recovery_counts = dict.fromkeys(EDGES, 0)  # recoveries by the least edge, in seconds, that they are within
        self.recovery_seconds = 0.0  # of all recoveries
        self._phase: Phase = "nothing"
        self._why = ""
        self._command: tuple[str, ...] = ()
        self._began: float | None = None
        self._now: float | None = None
        self._generation, self._reason, self._layers = 0, "", 0
        self._step, self._loss = 0, math.nan
        self._row: dict[str, float] = {}  # of the journal, the last one
        self._times: deque[tuple[int, float]] = deque(maxlen=PACE)
        self._logged: tuple[int, ...] = ()
        self._interval: int | None = None
        self._syncs, self._lssr, self._distance = 0, math.nan, math.nan
        self._is_anew = True  # the next commit may be of a step that was trained before
        self._restarts = 0
        self.unread = 0  # events that are not understood
        self.journal: str | None = None  # where the run says that its journal is
        self.curves = {name: Series() for name in CURVES}
        self.clock = Clock()
        self._replayed: tuple[int, str] = (0, "")  # the last replay: each worker says it
        self._hearers: dict[str, Callable[[Event], None]] = {
            name.removeprefix("_on_").replace("_", "-"): getattr(self, name) for name in dir(self) if "_on_" in name[:4]
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Fold:
        """Return a copy that hears for itself."""
        twin = Fold(history=self._limit)
        kept = {name: value for name, value in vars(self).items() if name != "_hearers"}
        vars(twin).update(copy.deepcopy(kept, memo))
        return twin

    # --- what comes in ---------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        """Take in an event."""
        try:
            kind, t = event["event"], float(event["t"])
            hearer = self._hearers.get(kind)
            if hearer is None or not math.isfinite(t):
                return  # of a newer holdfast, or for tests alone
            self._now = t if self._now is None else max(self._now, t)
            hearer(event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.unread += 1
            return
        if kind != "commit":
            self._remember(event)

    def row(self, row: Event) -> None:
        """Take in a row of the journal."""
        try:
            step, after = int(row["step"]), bool(row.get("after"))
            known = {name: _number(row.get(name)) for name in FACTS}
        except (KeyError, TypeError, ValueError, OverflowError):
            self.unread += 1
            return
        if after:
            return
        if known["tokens"] is not None and known["seconds"]:
            known["samples_rate"] = known["tokens"] / known["seconds"]
        self._row = {name: value for name, value in known.items() if value is not None}
        for name in CURVES:
            if name != "loss" and name in self._row:
                self.curves[name].add(step, self._row[name])

    def forget_rows(self) -> None:
        """Forget what the journal has said: another first worker has written it anew."""
        for name in CURVES:
            if name != "loss":
                self.curves[name] = Series()

    def _remember(self, event: Event) -> None:
        """Keep an event to show the past again; of too many, the older half becomes one state."""
        self._history.append(event)
        if len(self._history) > self._limit:
            half = len(self._history) // 2
            base = self._base or Fold(history=0)
            for old in self._history[:half]:
                base.hear(old)
            base._history.clear()
            self._base, self._history = base, self._history[half:]

    def at(self, t: float) -> Fold:
        """Return the state that the run had at a time. Its curves are empty: those of now have it all."""
        past = Fold(history=self._limit) if self._base is None else copy.deepcopy(self._base)
        past._limit = max(self._limit, len(self._history) + 1)
        for event in self._history:
            if float(event["t"]) <= t:
                past.hear(event)
        past._step = self.clock.step_at(t)
        if past._step:
            past._loss = _or_nan(point.last if (point := self.curves["loss"].at(past._step - 1)) else None)
            if past._phase == "starting":
                past._phase = "training"
        for worker in past._workers.values():
            worker.state = "training" if worker.state == "joining" and past._step else worker.state
        return past

    # --- what comes out --------------------------------------------------------------------------

    @property
    def moments(self) -> list[Moment]:
        """What has happened, in order: of each kind the last ones."""
        return sorted((each for kept in self._moments.values() for each in kept), key=lambda moment: moment.t)

    def view(self) -> View:
        """Return what the run looks like now."""
        living = sorted(self._workers.values(), key=lambda worker: _natural(worker.name))
        computing = {each.name: each.computing for each in living if each.computing is not None}
        slow = slow_ones(computing, {each.name: (each.first, each.stop) for each in living})
        is_over = self._phase in ("finished", "stopped")
        return View(
            phase=self._phase,
            why=self._why,
            command=self._command,
            began=self._began,
            now=self._now,
            since=self._since(),
            step=self._step,
            loss=_finite(self._loss),
            lr=self._row.get("lr"),
            grad_norm=self._row.get("grad_norm"),
            rate=self._rate(),
            samples_rate=self._row.get("samples_rate"),
            generation=self._generation,
            reason=self._reason,
            layers=self._layers,
            workers=tuple(worker.view(slow=worker.name in slow) for worker in living),
            gone=tuple(worker.view() for worker in self._gone),
            agents=tuple(self._agents),
            agent_pids=tuple(self._agent_pids),
            survival=OVER if is_over else self._survival(),
            logged=self._logged,
            saved=tuple(self._saved),
            interval=self._interval,
            lssr=_finite(self._lssr),
            distance=_finite(self._distance),
            counts=dict(self._counts),
            restarts=self._restarts,
            recovery_ms=statistics.median(self._recoveries) if self._recoveries else None,
            unread=self.unread,
        )

    def _survival(self) -> Survival:
        members = [self._workers[name] for name in self._members if name in self._workers]
        if any(worker.generation != self._generation for worker in members):
            return UNSETTLED
        held = {each.name: Place(host=each.host, first=each.first, stop=each.stop) for each in members if each.stop}
        saved = self._saved[-1].step if self._saved else None
        return survival(held, log=bool(self._logged), checkpoint=saved)

    def _since(self) -> float | None:
        if self._base is not None:
            return self._base._now
        return float(self._history[0]["t"]) if self._history else None

    def _rate(self) -> float | None:
        if len(self._times) < 2:
            return None
        (first, begin), (last, end) = self._times[0], self._times[-1]
        return (last - first) / (end - begin) if end > begin else None

    # --- processes -------------------------------------------------------------------------------

    def _on_run(self, event: Event) -> None:
        if self._phase in ("nothing", "finished", "stopped"):  # else one more machine of the same run
            self._workers.clear()
            self._agents.clear()
            self._agent_pids.clear()
            self._times.clear()
            self._members, self._is_anew = [], True
            self._phase, self._why, self._began = "starting", "", float(event["t"])
            self._command = tuple(_text(word) for word in event["command"][:20])
            self._note(event, "run", f"started: {' '.join(self._command)}")
        self._agent_pids[int(event["pid"])] = None

    def _on_host(self, event: Event) -> None:
        self._agents[int(event["host"])] = None

    def _on_host_gone(self, event: Event) -> None:
        number, cause = int(event["host"]), _text(event["cause"])
        self._agents.pop(number, None)
        over = self._phase in ("finished", "stopped")
        for name in [name for name in self._workers if name.partition(".")[0] == str(number)]:
            self._bury(name, "ended" if over else "lost", event, f"its machine has gone: {cause}")
        if not over and cause != "it is done":
            self._note(event, "loss", f"machine {number} has gone: {cause}", bad=True)
        if not self._agents and self._phase in ("training", "starting", "recovering"):
            self._phase, self._why = "stopped", cause

    def _on_started(self, event: Event) -> None:
        name = _text(event["worker"])
        rank, pid = int(event.get("rank", 0)), int(event["pid"])
        worker = self._workers.get(name)
        if worker is None or worker.state != "starting" or rank in worker.pids:
            self._restarts += self._generation > 0
            worker = self._workers[name] = Worker(name=name, since=float(event["t"]), host=_text(event["host"]))
        worker.pids[rank] = pid

    def _on_exit(self, event: Event) -> None:
        code, name, cause = int(event["code"]), _text(event["worker"]), _text(event["cause"])
        over = self._phase in ("finished", "stopped")
        self._bury(name, "ended" if code == 0 or over else "lost", event, cause)
        if code and not over and name not in self._members:
            self._note(event, "loss", f"worker {name} has ended: {cause}", bad=True)

    def _on_failure(self, event: Event) -> None:
        name, cause = _text(event["worker"]), _text(event["cause"])
        self._note(event, "loss", f"worker {name} is lost: {cause}", bad=True)
        self._bury(name, "lost", event, cause)
        if event.get("member") and self._phase == "training":
            self._phase, self._why = "recovering", f"worker {name} is lost"

    def _on_stuck(self, event: Event) -> None:
        name = _text(event["worker"])
        if name in self._workers:
            self._workers[name].log = _text(event["log"]) if event.get("log") else None
        at = f" at {_text(event['at'])}" if event.get("at") else ""
        self._note(event, "loss", f"worker {name} hangs: {_text(event['cause'])}{at}", bad=True)

    def _bury(self, name: str, state: State, event: Event, why: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.state, worker.until, worker.why = state, float(event["t"]), why
            self._gone.append(worker)

    # --- generations -----------------------------------------------------------------------------

    def _on_generation(self, event: Event) -> None:
        before, names = self._members, [_text(name) for name in event["workers"]]
        number, reason = int(event["number"]), _text(event["reason"])
        self._members, self._generation, self._reason = names, number, reason
        for name, host in zip(names, event["hosts"], strict=True):
            worker = self._workers.setdefault(name, Worker(name=name, since=float(event["t"])))
            worker.host, worker.state, worker.generation = _text(host), "joining", 0
            worker.received = 0
        for name in self._workers.keys() - set(names):
            self._workers[name].state = "waiting"
        joined = [name for name in names if name not in before]
        if joined and not before:
            self._note(event, "join", f"{count(len(names), 'worker')} begin: {some_of(names)}")
        elif joined:
            self._note(event, "join", f"{some_of(joined)} joins: {count(len(names), 'worker')} train")
        if self._phase not in ("finished", "stopped"):
            self._phase, self._why = ("starting" if not before else "recovering"), reason

    def _on_layout(self, event: Event) -> None:
        worker = self._member(event)
        if worker is None:
            return
        worker.generation, worker.host = self._generation, _text(event["host"])
        worker.pipeline = worker.stage = None
        worker.first = worker.stop = 0
        if "pipeline" in event:
            first, stop = int(event["first"]), int(event["stop"])
            if not 0 <= first < stop < 100_000:
                raise ValueError("no layers")
            worker.pipeline, worker.stage = int(event["pipeline"]), int(event["stage"])
            worker.first, worker.stop = first, stop
        self._reason = _text(event["reason"])
        self._layers = max(each.stop for each in self._workers.values())

    def _on_entered(self, event: Event) -> None:
        worker = self._member(event)
        if worker is not None:
            worker.received = int(event["received"])

    def _member(self, event: Event) -> Worker | None:
        """Return the worker of an event, unless it is of an older generation."""
        return self._workers.get(event["worker"]) if event["generation"] == self._generation else None

    def _on_recovery(self, event: Event) -> None:
        ms, lost = float(event["ms"]), some_of([_text(name) for name in event["lost"]])
        if not (math.isfinite(ms) and ms >= 0):
            raise ValueError("no time")
        self._recoveries.append(ms)
        self.recovery_counts[next(edge for edge in EDGES if ms / 1000 <= edge)] += 1
        self.recovery_seconds += ms / 1000
        text = f"the others go on, {seconds_text(ms / 1000)} after the loss of {lost} was noticed"
        self._note(event, "recovery", text, ms=round(ms, 1))

    def _on_broken(self, event: Event) -> None:
        where = f"generation {int(event['generation'])} broke on {_text(event['worker'])}"
        self._note(event, "notice", f"{where}: {_text(event['reason'])}")

    # --- steps -----------------------------------------------------------------------------------

    def _on_commit(self, event: Event) -> None:
        step, t = int(event["step"]), float(event["t"])
        worker = self._workers.get(event["worker"])
        if worker is not None:
            worker.step, worker.state = step + 1, "training"
            for name in ("seconds", "waited", "sent"):
                if (value := _number(event.get(name))) is not None:
                    known = getattr(worker, name)
                    setattr(worker, name, value if known is None else known + RECENT * (value - known))
        if self._is_anew:
            self._is_anew = False
            if step < self._step:
                self._rewind(step)
        if step < self._step:
            return
        self._step = step + 1
        if (loss := _number(event["loss"])) is not None:
            self._loss = loss
            self.curves["loss"].add(step, loss)
        self.clock.add(step, t)
        self._times.append((step, t))
        if self._phase in ("starting", "recovering", "nothing"):
            self._phase, self._why = "training", ""

    def _rewind(self, step: int) -> None:
        self._step = step
        self._times.clear()
        self.clock.rewind(step)
        for curve in self.curves.values():
            curve.rewind(step)

    def _on_sync(self, event: Event) -> None:
        number = int(event["number"])
        self._lssr, self._distance = _or_nan(_number(event["lssr"])), _or_nan(_number(event["distance"]))
        if number > self._syncs:
            self._syncs = number
            self._note(event, "sync", f"replicas synchronise after step {int(event['step'])}: {_text(event['reason'])}")

    # --- checkpoints, log ------------------------------------------------------------------------

    def _on_checkpoint(self, event: Event) -> None:
        step, size = int(event["step"]), int(event["bytes"])
        self._saved.append(Saved(step=step, bytes=size, t=float(event["t"])))
        self._note(event, "checkpoint", f"checkpoint of step {step}, {size_text(size)}")

    def _on_checkpoint_failed(self, event: Event) -> None:
        text = f"the checkpoint of step {int(event['step'])} failed: {_text(event['reason'])}"
        self._note(event, "checkpoint", text, bad=True)

    def _on_mirrored(self, event: Event) -> None:
        self._note(event, "checkpoint", f"checkpoint of step {int(event['step'])} is in the store too")

    def _on_mirror_failed(self, event: Event) -> None:
        text = f"the copy of step {int(event['step'])} in the store failed: {_text(event['reason'])}"
        self._note(event, "checkpoint", text, bad=True)

    def _on_interval(self, event: Event) -> None:
        self._interval = int(event["steps"])

    def _on_resumed(self, event: Event) -> None:
        self._is_anew = True
        self._note(event, "run", f"goes on from the checkpoint of step {int(event['step'])}")

    def _on_logging(self, event: Event) -> None:
        self._logged = tuple(int(number) for number in event["boundaries"])

    def _on_log_useless(self, event: Event) -> None:
        self._logged = ()
        self._note(event, "replay", f"the log is of no use: {_text(event['reason'])}", bad=True)

    def _on_replay(self, event: Event) -> None:
        reason, seconds = _text(event["reason"]), seconds_text(float(event["seconds"]))
        if self._replayed != (self._generation, reason):
            self._replayed = self._generation, reason
            self._note(event, "replay", f"{reason}, in {seconds}")

    def _on_journal(self, event: Event) -> None:
        self.journal = str(event["path"])

    # --- notices and ends ------------------------------------------------------------------------

    def _on_preempted(self, event: Event) -> None:
        what = f"machine {event['host']} is asked to leave ({_text(event['signal'])})"
        self._note(event, "notice", f"{what}, {float(event['grace']):g} s of grace")

    def _on_left(self, event: Event) -> None:
        self._note(event, "notice", f"machine {event['host']}: {_text(event['reason'])}", bad=event["code"] == 5)

    def _on_partition(self, event: Event) -> None:
        self._note(event, "loss", f"machine {int(event['host'])} is kept out: it does not reach the others", bad=True)

    def _on_stalled(self, event: Event) -> None:
        self._note(event, "notice", "all have waited for each other, and begin another generation", bad=True)

    def _on_coordinator_restart(self, event: Event) -> None:
        self._note(event, "notice", "the coordinator is started again")

    def _on_zygote_restart(self, event: Event) -> None:
        self._note(event, "notice", "the zygote is started again")

    def _on_elected(self, event: Event) -> None:
        self._note(event, "notice", f"the coordinator's role is taken, epoch {int(event['epoch'])}")

    def _on_restart(self, event: Event) -> None:
        self._note(event, "run", f"all start again: {_text(event['reason'])}")

    def _on_finished(self, event: Event) -> None:
        self._phase, self._why = "finished", "all steps are trained"
        self._note(event, "run", "finished")

    def _on_verdict(self, event: Event) -> None:
        self._phase, self._why = "finished", _text(event["text"])
        text = f"{self._why} (sha256 {_text(event['sha256'])})"
        self._note(event, "run", text, bad=not event["good"])

    def _on_stop(self, event: Event) -> None:
        self._phase, self._why = "stopped", _text(event["message"])
        self._note(event, "run", f"stopped: {self._why}", bad=True)

    def _note(self, event: Event, kind: Kind, text: str, *, ms: float | None = None, bad: bool = False) -> None:
        self._counts[kind] += 1
        kept = self._moments.setdefault(kind, deque(maxlen=MOMENTS))
        kept.append(Moment(t=float(event["t"]), kind=kind, text=text, step=self._step, ms=ms, bad=bad))


def _text(value: Any) -> str:
    """Return a text of a file, cut to what can be shown."""
    text = str(value)
    return text if len(text) <= TEXT else f"{text[:TEXT]}…"


def _number(value: Any) -> float | None:
    """Return a finite number; None for anything else.

    >>> _number(2), _number("2"), _number(float("nan")), _number(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts names as people do: 0.2 before 0.10.

    >>> sorted(["0.10", "0.2", "a"], key=_natural)
    ['0.2', '0.10', 'a']
    """
    return tuple((int(part), "") if part.isdecimal() else (10**9, part) for part in name.split("."))
