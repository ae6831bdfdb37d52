"""One replica's part of each batch: all parts together are the batch, and nobody is left without work."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.order import Order, Share
from holdfast.plan.layout import side_by_side


def shares_of(order: Order, workers: int) -> list[Share]:
    layout = side_by_side(1, workers)

    def part_of(rank: int) -> Share:
        return Share(order=order, rank=rank, part=lambda count: layout.shares(count)[rank])

    return [part_of(rank) for rank in range(workers)]


@given(
    size=st.integers(16, 60),
    micro=st.integers(1, 3),
    batches=st.integers(1, 5),
    workers=st.integers(1, 6),
    data=st.data(),
)
@settings(deadline=None)
def test_the_parts_are_the_batch(size: int, micro: int, batches: int, workers: int, data: st.DataObject) -> None:
    order = Order(size=size, global_batch=micro * batches, micro_batch=micro, seed=1)
    step = data.draw(st.integers(0, 3 * order.steps_per_epoch))
    count = order.micro_batches(step)
    shares = shares_of(order, workers)
    numbers = [[share.number(step, i) for i in range(share.micro_batches(step))] for share in shares]
    assert all(numbers), "somebody has nothing to do"
    own = [n for mine in numbers for n in mine]
    assert set(own) == set(range(count))
    if count >= workers:
        assert own == list(range(count)), "nobody does what another does"
    for share, mine in zip(shares, numbers, strict=True):
        assert [share.samples(step, i) for i in range(len(mine))] == [order.samples(step, n) for n in mine]
        assert share.batch_size(step) == sum(len(order.samples(step, n)) for n in mine)


def test_who_would_have_none_does_anothers_again() -> None:
    order = Order(size=8, global_batch=4, micro_batch=2, seed=0, shuffle=False)
    shares = shares_of(order, 4)
    idle = [share.rank for share in shares if not share.part(2)]
    assert len(idle) == 2
    assert [shares[rank].number(0, 0) for rank in idle] == [rank % 2 for rank in idle]
    assert all(share.micro_batches(0) == 1 for share in shares)


def test_it_is_a_share_of_the_run() -> None:
    share = shares_of(Order(size=8, global_batch=4, micro_batch=2, seed=5), 2)[1]
    assert (share.size, share.micro_batch, share.seed, share.steps_per_epoch) == (8, 2, 5, 2)
