"""What part of the time trains, by the interval between saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from holdfast.study.advice.format import choose_format
from holdfast.study.advice.interval import Rhythm, rhythm_of
from holdfast.study.numbers import duration_text, share_text
from holdfast.study.plots.look import BLUE, DARK, RED, entitle, sheet, shortened
from holdfast.study.rows import Results, main_model, name_of

OTHERS = (600.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0)  # seconds between failures
LOOKS = ((BLUE, "--"), (DARK, "-."), ("#2a9d8f", ":"), ("#6a4c93", (0, (6, 2, 1, 2, 1, 2))))
TICKS = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0)
FEW = 3  # beside the given one


def draw_interval(path: Path, results: Results) -> bool:
    """Whether there was anything to draw."""
    given, choice = results.get("settings", {}).get("mtbf_s"), choose_format(results)
    if not given or choice is None:
        return False
    rhythms = [rhythm_of(choice.row, between) for between in chosen(given)]
    low = max(0.5, min(rhythm.best for rhythm in rhythms) / 8)
    intervals = np.geomspace(low, 8 * max(rhythm.best for rhythm in rhythms), 300)
    with sheet(path, [4.6]) as (axes,):
        looks = iter(LOOKS)
        for rhythm in rhythms:
            color, dash = (RED, "-") if rhythm.between == given else next(looks)
            _draw_curve(axes, rhythm, intervals, color, dash, is_given=rhythm.between == given)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if low <= tick <= intervals[-1]]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: duration_text(value))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        worst = min(rhythm.goodput(rhythm.best) for rhythm in rhythms)
        axes.set_ylim(max(0.0, 1 - 3.5 * (1 - worst)), 1.0)
        axes.set_xlim(low, intervals[-1])
        axes.set_xlabel("time between saves")
        axes.set_ylabel("of the time trains")
        axes.grid(alpha=0.3)
        entitle(axes, shortened(f"How often to save {main_model(results)} as {name_of(choice.row)}", 60))
        axes.figure.legend(
            title="a failure every … : the best interval (dot) gives …", loc="outside lower left", ncols=2
        )
    return True


def chosen(given: float) -> list[float]:
    """The given time between failures and some others around it.

    >>> chosen(7200.0)
    [600.0, 3600.0, 7200.0, 21600.0]
    """
    others = [each for each in OTHERS if not 0.7 < each / given < 1.4]
    others.sort(key=lambda each: float(abs(np.log(each / given))))
    return sorted([given, *others[:FEW]])


def _draw_curve(axes: Axes, rhythm: Rhythm, intervals: np.ndarray, color: str, dash: Any, *, is_given: bool) -> None:
    best = rhythm.best
    label = f"{duration_text(rhythm.between)}: {duration_text(best)}, {share_text(rhythm.goodput(best))}"
    line: Any = {"color": color, "linestyle": dash, "linewidth": 2.8 if is_given else 1.6}
    axes.plot(intervals, [rhythm.goodput(each) for each in intervals], label=label, **line)
    axes.plot(best, rhythm.goodput(best), "o", color=color, markersize=9 if is_given else 7, markeredgecolor="white")
