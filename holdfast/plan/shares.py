"""Which micro-batches each worker computes."""

from __future__ import annotations


def shares(micro_batches: int, workers: int) -> list[range]:
    """Consecutive shares, as equal as can be; workers beyond the micro-batches get none.

    >>> shares(8, 3)
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    return [range(rank * micro_batches // workers, (rank + 1) * micro_batches // workers) for rank in range(workers)]
