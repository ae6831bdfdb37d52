"""What ``bench data`` reckons with."""

from __future__ import annotations

from bench.loading.loading_entry import BATCH, MICRO_BATCH
from bench.races import data


def test_bars_compare_with_the_plain_loop_of_as_many_loaders() -> None:
    times = {name: [0.1, 0.1, 0.2] for name in data.CONTESTANTS}
    times["holdfast, 4 loaders"] = [0.12, 0.12, 0.2]
    results, bars = data.results_of(times)
    assert results["holdfast, 4 loaders"]["of_plain"]["high"] == 1.2
    assert [bar.ok for bar in bars.values()] == [True, False]


def test_steps_that_were_read_ahead_are_not_counted() -> None:
    """As many as a DataLoader, which reads two batches ahead, and a run, which reads two micro-batches ahead, can."""
    most = max(contestant.loaders for contestant in data.CONTESTANTS.values())
    assert 2 * most < data.AHEAD
    assert 2 * most * MICRO_BATCH / BATCH < data.AHEAD
