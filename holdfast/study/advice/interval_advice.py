"""Advice on the interval between saves, for the time between failures that the user gave."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.plan.save_interval import SHORTEST, young_daly
from holdfast.study.advice.format_advice import choose_format
from holdfast.study.advice.sentence import Advice
from holdfast.study.numbers import duration_text, share_text
from holdfast.study.rows import Results, Row, middle, name_of
from holdfast.words import count

USUAL = (10.0, 600.0, 3600.0)  # seconds between saves that people often set, to compare with


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """The costs of saves and failures, all in seconds."""

    lost: float  # per save
    reload: float  # per failure
    between: float  # failures

    @property
    def best(self) -> float:
        """The best interval by Young and Daly, in seconds."""
        return young_daly(self.lost, self.between)

    def shares(self, interval: float) -> tuple[float, float, float]:
        """Return the shares of all time that go into saving, into steps done again, and into loading.

        >>> Rhythm(lost=2.0, reload=9.0, between=3600.0).shares(100.0)
        (0.02, 0.013888888888888888, 0.0025)
        """
        return self.lost / interval, interval / 2 / self.between, self.reload / self.between

    def goodput(self, interval: float) -> float:
        """Return the share of the time that trains; 0 if failures come faster than saves."""
        return max(0.0, 1 - sum(self.shares(interval)))

    def holds(self, interval: float) -> bool:
        """Return whether these shares mean anything: not if failures leave no time to save or to train.

        >>> [Rhythm(lost=0.1, reload=0.1, between=seconds).holds(10.0) for seconds in (2.0, 60.0)]
        [False, True]
        """
        return interval <= self.between and self.goodput(interval) > 0


def rhythm_of(row: Row, between: float) -> Rhythm:
    """Return the costs of a format here, with a failure every ``between`` seconds."""
    return Rhythm(lost=middle(row, "lost_s"), reload=middle(row, "load_cold_s"), between=between)


def on_interval(results: Results) -> list[Advice]:
    """Return advice on the interval for the best format."""
    between, choice = results.get("settings", {}).get("mtbf_s"), choose_format(results)
    if not between or choice is None:
        return []
    text = f"With a failure every {duration_text(between)}, {_said(choice.row, between)}"
    return [Advice(axis="interval", sentence=text, rests_on=[choice.row])]


def _said(row: Row, between: float) -> str:
    rhythm, step = rhythm_of(row, between), middle(row, "step_s")
    interval = max(rhythm.best, step, SHORTEST)
    if not rhythm.holds(interval):
        return "hardly anything trains, whatever the interval: saving, loading and starting anew leave next to no time."
    if middle(row, "lost_s") <= 0:
        return f"no best interval follows: saving {name_of(row)} costs nothing that could be measured here."
    saving, again, loading = (share_text(share) for share in rhythm.shares(interval))
    return (
        f"save {name_of(row)} every {duration_text(interval)} ({_reason(rhythm, interval, step)}). Then "
        f"{share_text(rhythm.goodput(interval))} of the time trains; {saving} goes into saves, {again} into steps done "
        f"again and {loading} into loading. Noticing the failure and starting anew is not in it."
        f"{_others(rhythm, interval, step)}"
    )


def _reason(rhythm: Rhythm, interval: float, step: float) -> str:
    """Return the interval in steps, if a step took measurable time, and the formula that it comes from.

    >>> _reason(Rhythm(lost=2.0, reload=9.0, between=3600.0), 120.0, 0.5)
    "240 steps; by Young and Daly's formula, for 2 s of training lost a save"
    """
    steps = f"{count(max(1, round(interval / step)), 'step')}; " if step > 0 else ""
    if interval > SHORTEST:
        return f"{steps}by Young and Daly's formula, for {duration_text(rhythm.lost)} of training lost a save"
    return f"{steps}Young and Daly's formula says {duration_text(rhythm.best)}: too often to be worth it"


def _others(rhythm: Rhythm, interval: float, step: float) -> str:
    """Return the share of the time that trains with the intervals that people often set."""
    usual = [each for each in USUAL if each >= step and not 0.8 < each / interval < 1.25 and rhythm.holds(each)]
    said = [f"every {duration_text(each)}, {share_text(rhythm.goodput(each))}" for each in usual]
    return f" Of other intervals: {'; '.join(said)}." if said else ""
