"""Picture of the share of time that trains, by the interval between saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter

from holdfast.plan.save_interval import SHORTEST
from holdfast.study.advice.format_advice import choose_format
from holdfast.study.advice.interval_advice import Rhythm, rhythm_of
from holdfast.study.numbers import duration_text, share_text
from holdfast.study.plots.look import BLUE, DARK, RED, entitle, sheet, shortened
from holdfast.study.rows import Results, main_model, middle, name_of

OTHERS = (600.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0)  # seconds between failures
LOOKS = ((BLUE, "--"), (DARK, "-."), ("#2a9d8f", ":"), ("#6a4c93", (0, (6, 2, 1, 2, 1, 2))))
TICKS = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0)
MORE_TICKS = (1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, *TICKS[5:])
FEW = 3  # other times between failures beside the given one: more curves cannot be told apart


def draw_interval(path: Path, results: Results) -> bool:
    """Draw the picture; return whether there was anything to draw: not if the advice names no interval."""
    given, choice = results.get("settings", {}).get("mtbf_s"), choose_format(results)
    if not given or choice is None or middle(choice.row, "lost_s") <= 0:
        return False
    rhythms = [rhythm_of(choice.row, between) for between in chosen(given)]
    best = {rhythm: max(rhythm.best, middle(choice.row, "step_s"), SHORTEST) for rhythm in rhythms}  # as advised
    best = {rhythm: interval for rhythm, interval in best.items() if rhythm.holds(interval)}
    if given not in [rhythm.between for rhythm in best]:
        return False
    with sheet(path, [4.6]) as (axes,):
        _draw_curves(axes, best, given)
        _set_axes(axes, best)
        entitle(axes, shortened(f"How often to save {main_model(results)} as {name_of(choice.row)}", 90))
        title = "a failure every … : the advised interval (dot) gives …"
        axes.figure.legend(title=title, loc="outside lower left", ncols=2, alignment="left")
    return True


def _draw_curves(axes: Axes, best: dict[Rhythm, float], given: float) -> None:
    looks = iter(LOOKS)
    intervals = np.geomspace(*_ends(best), 300)
    for rhythm, interval in best.items():
        is_given = rhythm.between == given
        color, dash = (RED, "-") if is_given else next(looks)
        share = rhythm.goodput(interval)
        label = f"{duration_text(rhythm.between)}: {duration_text(interval)}, {share_text(share)}"
        line: Any = {"color": color, "linestyle": dash, "linewidth": 2.8 if is_given else 1.6}
        axes.plot(intervals, [rhythm.goodput(each) for each in intervals], label=label, **line)
        axes.plot(interval, share, "o", color=color, markersize=9 if is_given else 7, markeredgecolor="white")


def _ends(best: dict[Rhythm, float]) -> tuple[float, float]:
    return min(best.values()) / 8, 8 * max(best.values())


def _set_axes(axes: Axes, best: dict[Rhythm, float]) -> None:
    low, high = _ends(best)
    worst = min(rhythm.goodput(interval) for rhythm, interval in best.items())
    axes.set_ylim(max(0.0, 1 - 3.5 * (1 - worst)), 1.0)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(time_ticks(low, high))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: duration_text(value))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))  # with as many figures as tell the ticks apart
    axes.set_xlabel("time between saves")
    axes.set_ylabel("of the time trains")
    axes.grid(alpha=0.3)


def time_ticks(low: float, high: float) -> list[float]:
    """Return round times for the ticks, more of them if the axis is short.

    >>> time_ticks(2.0, 2000.0), time_ticks(2.0, 90.0)
    ([10.0, 60.0, 600.0], [2.0, 5.0, 10.0, 20.0, 60.0])
    """
    few, more = ([tick for tick in ticks if low <= tick <= high] for ticks in (TICKS, MORE_TICKS))
    return few if len(few) > 2 else more


def chosen(given: float) -> list[float]:
    """Return the given time between failures and some others around it.

    >>> chosen(7200.0)
    [600.0, 3600.0, 7200.0, 21600.0]
    """
    others = [each for each in OTHERS if not 0.7 < each / given < 1.4]
    others.sort(key=lambda each: float(abs(np.log(each / given))))
    return sorted([given, *others[:FEW]])
