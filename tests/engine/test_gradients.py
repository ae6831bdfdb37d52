"""Buckets hold each parameter once; slabs are where its gradient goes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.engine.gradients import make_buckets

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=12)


@given(shapes, st.integers(1, 200), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_buckets_hold_each_parameter_once_the_last_first(shapes: list[list[int]], limit: int, random) -> None:
    dtypes = [random.choice([torch.float32, torch.float64]) for _ in shapes]
    parameters = [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]
    buckets = make_buckets(parameters, limit)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    assert sorted(id(p) for b in buckets for p in b.parameters) == sorted(map(id, parameters))
    for bucket in buckets:
        assert len({p.dtype for p in bucket.parameters}) == 1
        assert len(bucket.parameters) == 1 or sum(p.nbytes for p in bucket.parameters) <= limit
        places = [next(i for i, q in enumerate(parameters) if q is p) for p in bucket.parameters]
        assert places == sorted(places, reverse=True)


def test_the_backward_pass_adds_to_the_attached_slab() -> None:
    model = nn.Linear(3, 2)
    (bucket,) = make_buckets(list(model.parameters()))
    slab = bucket.take()
    slab.flat.zero_()
    bucket.attach(slab)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is slab.views[1]
    assert slab.flat.tolist() == [2.0] * 8  # both outputs' bias, then the weight


def test_slabs_are_used_again() -> None:
    (bucket,) = make_buckets([nn.Parameter(torch.zeros(4))])
    left, right = bucket.take(), bucket.take()
    left.flat.fill_(1.0)
    right.flat.fill_(2.0)
    assert bucket.add(left, right) is left
    assert left.flat.tolist() == [3.0] * 4
    assert bucket.take() is right


def test_room_for_receiving_grows_and_is_kept() -> None:
    (bucket,) = make_buckets([nn.Parameter(torch.zeros(4))])
    first = bucket.receiving(8)
    assert bucket.receiving(4).data_ptr() == first.data_ptr()
    assert bucket.receiving(9).numel() == 9
