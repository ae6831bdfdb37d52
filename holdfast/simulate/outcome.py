"""Outcome of systems along a trace: samples per second, and GPU-hours used, idle and lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UsageError
from holdfast.simulate.course import Segment, SystemRules, follow
from holdfast.simulate.measured_tables import ModelFacts, Speeds
from holdfast.simulate.placements import draws, mean
from holdfast.simulate.systems.bamboo import Bamboo
from holdfast.simulate.systems.rearranging import (
    Arrange,
    by_table,
    holdfast,
    ideal,
    known,
    oobleck,
    restart,
    varuna,
)
from holdfast.simulate.systems.recycle import ReCycle
from holdfast.simulate.trace import Trace
from holdfast.words import count

SYSTEMS = ("holdfast", "oobleck", "recycle", "varuna", "bamboo", "restart", "ideal")
PLACED = ("bamboo", "recycle")  # systems for which it matters which node of a pipeline is lost
THROUGHPUT_OF = {"holdfast": "oobleck", "restart": "varuna"}  # systems without a table of their own use this one's


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The same question for all systems: a trace, a model, and the machines."""

    trace: Trace
    facts: ModelFacts
    recovery: float = 0.0  # seconds that holdfast takes to recover
    bandwidth: float = math.inf  # bytes per second of a node's link
    arrange: Arrange | None = None  # plans of our planner; None: throughput comes from tables
    devices: int = 1  # per node

    @property
    def moving(self) -> float:
        """Seconds to send a node a whole stage, where throughput comes from tables; 0 if the size is not known."""
        stage = self.facts.state_bytes / self.facts.stages
        return 0.0 if math.isnan(stage) else stage / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class SystemOutcome:
    """Result of one system along a trace. Without segments the system cannot run, and ``note`` says why."""

    system: str
    segments: Sequence[Segment] = ()
    devices: int = 1
    note: str = ""

    @property
    def runs(self) -> bool:
        """Whether the system can train the model at all."""
        return bool(self.segments)

    @property
    def samples_per_s(self) -> float:
        """Average over the whole trace."""
        seconds = self.segments[-1].end - self.segments[0].start
        return math.fsum(segment.seconds * segment.samples_per_s for segment in self.segments) / seconds

    @property
    def used(self) -> float:
        """GPU-hours of work that was kept."""
        return self._hours([segment.used for segment in self.segments])

    @property
    def idle(self) -> float:
        """GPU-hours of nodes that waited."""
        return self._hours([segment.idle for segment in self.segments])

    @property
    def lost(self) -> float:
        """GPU-hours of work done again, saving, reconfiguring and restarting."""
        return self._hours([segment.lost for segment in self.segments])

    def _hours(self, nodes: Sequence[float]) -> float:
        spent = (segment.seconds * count for segment, count in zip(self.segments, nodes, strict=True))
        return self.devices * math.fsum(spent) / 3600

    def over_time(self, bins: int) -> list[float]:
        """Return the samples per second in each of ``bins`` equal stretches of time.

        >>> half = Segment(start=0, end=30, samples_per_s=4.0, used=1, idle=0, lost=0, why="training")
        >>> rest = Segment(start=30, end=40, samples_per_s=0.0, used=0, idle=0, lost=1, why="restarting")
        >>> SystemOutcome(system="x", segments=[half, rest]).over_time(2)
        [4.0, 2.0]
        """
        start = self.segments[0].start
        width = (self.segments[-1].end - start) / bins
        sums = [0.0] * bins
        for segment in self.segments:
            first, last = (segment.start - start) / width, (segment.end - start) / width
            for number in range(int(first), min(math.ceil(last), bins)):
                sums[number] += segment.samples_per_s * (min(last, number + 1) - max(first, number))
        return sums

    def to_json(self, best: float, bins: int) -> dict[str, Any]:
        """Return the result for machines; ``best`` is the ideal throughput, ``bins`` as in ``over_time``."""
        if not self.runs:
            return {"samples_per_s": None, "note": self.note}
        return {
            "samples_per_s": self.samples_per_s,
            "of_ideal": self.samples_per_s / best if best else None,
            "gpu_hours": {"used": self.used, "idle": self.idle, "lost": self.lost},
            "over_time": [round(value, 6) for value in self.over_time(bins)],
            "note": self.note,
        }


def check_systems(text: str) -> list[str]:
    """Return the names in ``--systems``. Raises UsageError for an unknown one, or for none.

    >>> check_systems("ideal, oobleck")
    ['ideal', 'oobleck']
    >>> check_systems("obleck")
    Traceback (most recent call last):
    holdfast.errors.UsageError: there is no system 'obleck' (there are holdfast, oobleck, recycle, varuna, bamboo, \
restart, ideal)
    """
    names = list(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    for name in names:
        if name not in SYSTEMS:
            raise UsageError(f"there is no system {name!r}", hint=f"there are {', '.join(SYSTEMS)}")
    if not names:
        raise UsageError("no system is named", hint=f"there are {', '.join(SYSTEMS)}")
    return names


def make_rules(system: str, setting: Setting) -> SystemRules:
    """Return the rules of a system, for this model and trace."""
    facts = setting.facts
    if system == "holdfast":
        arrange = setting.arrange or by_table(known(facts, "oobleck"), moving=setting.moving)
        return holdfast(facts, recovery=setting.recovery, arrange=arrange)
    if system == "oobleck":
        return oobleck(facts, arrange=setting.arrange)
    if system == "restart":
        return restart(facts, setting.trace)
    if system == "recycle":
        return _recycle(facts)
    if system == "bamboo":
        return Bamboo(
            speeds=known(facts, "bamboo"),
            boundary_samples=facts.samples_per_step,
            local=facts.local_rendezvous,
            everybody=facts.global_rendezvous,
            creation=facts.creation,
            depth=facts.depth,
            waiting_slows=facts.waiting_slows,
        )
    return varuna(facts) if system == "varuna" else ideal(_best(facts))


def _recycle(facts: ModelFacts) -> ReCycle:
    return ReCycle(
        speeds=known(facts, "recycle"),
        boundary_samples=facts.samples_per_step,
        on_loss=facts.reconfigure,
        restart=facts.restart,
        creation=facts.creation,
        stages=facts.stages,
        micro_batches=facts.micro_batches,
    )


def _best(facts: ModelFacts) -> Speeds:
    """Return the best throughput of all systems. ReCycle's with nodes missing comes from a formula, not a table."""
    return facts.best(*([_recycle(facts).reach()] if facts.speeds["recycle"] is not None else []))


def judge(system: str, setting: Setting) -> SystemOutcome:
    """Return the outcome of one system along the trace.

    >>> from holdfast.simulate.measured_tables import example
    >>> from holdfast.simulate.trace import parse_trace
    >>> lines = [f"0,add,n{i}" for i in range(4)] + ["98000,remove,n0", "200000,remove,n1"]
    >>> setting = Setting(trace=parse_trace("\\n".join(lines), name="t"), facts=example())
    >>> round(judge("oobleck", setting).samples_per_s, 2), judge("bamboo", setting).note
    (12.41, 'out of memory')
    """
    facts = setting.facts
    if system != "ideal" and facts.speeds[THROUGHPUT_OF.get(system, system)] is None:
        return SystemOutcome(system=system, note="out of memory")
    rules = make_rules(system, setting)
    if system in PLACED:
        return _judge_placed(system, rules, setting)
    segments = follow(setting.trace, rules)
    return SystemOutcome(system=system, segments=segments, devices=setting.devices, note=_note(segments, setting))


def _judge_placed(system: str, rules: SystemRules, setting: Setting) -> SystemOutcome:
    trace = setting.trace
    courses = [follow(trace, rules, placed) for placed in draws(trace.losses)]
    each = [SystemOutcome(system=system, segments=course).samples_per_s for course in courses]
    segments = mean(courses)
    spread = f"{min(each):.4g} to {max(each):.4g} by placement" if max(each) > 1.001 * min(each) else ""
    notes = filter(None, [spread, _note(segments, setting)])
    return SystemOutcome(system=system, segments=segments, devices=setting.devices, note="; ".join(notes))


def _note(segments: Sequence[Segment], setting: Setting) -> str:
    stood = math.fsum(segment.seconds for segment in segments if not segment.used and not segment.lost)
    share = stood / setting.trace.seconds
    return f"too few nodes {share:.0%} of the time" if share >= 0.005 else ""


def check_enough(setting: Setting) -> None:
    """Raise UsageError if the trace never has enough nodes for any system."""
    best = setting.facts.best()
    most = max(setting.trace.counts)
    if not best.at(most)[0]:
        raise UsageError(
            f"the trace {setting.trace.name} has at most {count(most, 'node')}, and {setting.facts.model} "
            + (f"was measured with {best.fewest} to {best.most}" if best.fewest else "cannot be trained on them"),
            hint="another trace, or a smaller model",
        )
