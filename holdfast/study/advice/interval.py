"""How often to save, for the time between failures that the user gave."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.plan.interval import SHORTEST, young_daly
from holdfast.study.advice.format import choose_format
from holdfast.study.advice.sentence import Advice
from holdfast.study.numbers import duration_text, share_text
from holdfast.study.rows import Results, Row, middle, name_of
from holdfast.words import count

USUAL = (10.0, 600.0, 3600.0)  # seconds between saves, as people set them


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """Saves at an interval, against failures: seconds, all of them."""

    lost: float  # per save
    reload: float  # per failure
    between: float  # failures

    @property
    def best(self) -> float:
        return young_daly(self.lost, self.between)

    def shares(self, interval: float) -> tuple[float, float, float]:
        """Of all time: what goes into saving, into steps done again, into loading.

        >>> Rhythm(lost=2.0, reload=9.0, between=3600.0).shares(100.0)
        (0.02, 0.013888888888888888, 0.0025)
        """
        return self.lost / interval, interval / 2 / self.between, self.reload / self.between

    def goodput(self, interval: float) -> float:
        """The share of the time that trains; nothing, if failures come faster than that."""
        return max(0.0, 1 - sum(self.shares(interval)))


def rhythm_of(row: Row, between: float) -> Rhythm:
    """With what a format costs here."""
    return Rhythm(lost=middle(row, "lost_s"), reload=middle(row, "load_cold_s"), between=between)


def on_interval(results: Results) -> list[Advice]:
    between, choice = results.get("settings", {}).get("mtbf_s"), choose_format(results)
    if not between or choice is None:
        return []
    rhythm, step = rhythm_of(choice.row, between), middle(choice.row, "step_s")
    interval = max(rhythm.best, step, SHORTEST)
    saving, again, loading = (share_text(share) for share in rhythm.shares(interval))
    steps = count(max(1, round(interval / step)), "step")
    rather = "" if interval > SHORTEST else f", which says {duration_text(rhythm.best)}: too often to be worth it"
    first = (
        f"With a failure every {duration_text(between)}, save {name_of(choice.row)} every {duration_text(interval)} "
        f"({steps} of {duration_text(step)}; Young/Daly for {duration_text(rhythm.lost)} lost a save{rather}): "
        f"{share_text(rhythm.goodput(interval))} of the time trains, {saving} goes into saves, {again} into steps done "
        f"again, {loading} into loading; noticing the failure and starting anew is not in it."
    )
    usual = [each for each in USUAL if each >= step and not 0.8 < each / interval < 1.25]
    others = [f"every {duration_text(each)}, {share_text(rhythm.goodput(each))}" for each in usual]
    second = f" Of other intervals: {'; '.join(others)}." if others else ""
    return [Advice(axis="interval", sentence=first + second, rests_on=[choice.row])]
