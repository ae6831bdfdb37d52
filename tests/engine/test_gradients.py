"""Buckets hold each parameter once; slabs are where its gradient goes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.engine.gradients import Bucket, Slab, make_buckets

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=12)


@given(shapes, st.integers(1, 200), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_buckets_hold_each_parameter_once_the_last_first(shapes: list[list[int]], limit: int, random) -> None:
    dtypes = [random.choice([torch.float32, torch.float64]) for _ in shapes]
    parameters = [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]
    buckets = make_buckets([((0,), parameters)], limit)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    assert sorted(id(p) for b in buckets for p in b.parameters) == sorted(map(id, parameters))
    for bucket in buckets:
        assert len({p.dtype for p in bucket.parameters}) == 1
        assert len(bucket.parameters) == 1 or sum(p.nbytes for p in bucket.parameters) <= limit
        places = [next(i for i, q in enumerate(parameters) if q is p) for p in bucket.parameters]
        assert places == sorted(places, reverse=True)


@given(st.lists(st.tuples(st.permutations([0, 1, 2]), st.integers(0, 3)), max_size=6), st.integers(1, 64))
@settings(deadline=None)
def test_a_bucket_belongs_to_one_group_of_holders(groups: list[tuple[list[int], int]], limit: int) -> None:
    """Numbers are over all of them: each worker has some buckets, and tags are made of numbers."""
    made = [(tuple(ranks), [nn.Parameter(torch.zeros(2)) for _ in range(count)]) for ranks, count in groups]
    buckets = make_buckets(made, limit)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    flat = [(id(p), ranks) for ranks, parameters in made for p in parameters]
    assert [(id(p), bucket.ranks) for bucket in buckets for p in bucket.parameters] == flat[::-1]


def test_gradients_are_gathered_and_attached() -> None:
    model = nn.Linear(3, 2)
    (bucket,) = make_buckets([((0,), list(model.parameters()))])
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    slab = bucket.gather()
    bucket.forget()
    assert model.weight.grad is None
    assert [view.tolist() for view in slab.views] == [[2.0] * 2, [[2.0] * 3] * 2]  # the bias, then the weight
    bucket.attach(slab)
    assert model.weight.grad is slab.views[1]


def test_an_unused_parameter_has_a_gradient_of_zero() -> None:
    model = nn.Linear(3, 2)
    (bucket,) = make_buckets([((0,), list(model.parameters()))])
    used = bucket.take()
    used.flat.fill_(9.0)  # what an earlier step has left behind
    bucket.free.append(used)
    model.bias.grad = torch.ones(2)
    slab = bucket.flatten(bucket.gather())
    assert slab is used
    assert slab.views[0].tolist() == [1.0] * 2
    assert slab.views[1].tolist() == [[0.0] * 3] * 2


def test_views_are_aligned() -> None:
    (bucket,) = make_buckets([((0,), [nn.Parameter(torch.zeros(n)) for n in (3, 17, 1)])])
    starts = [view.storage_offset() for view in bucket.take().views]
    assert starts == [0, 16, 48]


def test_slabs_are_used_again() -> None:
    (bucket,) = make_buckets([((0,), [nn.Parameter(torch.zeros(4))])])
    left, right = bucket.take(), bucket.take()
    left.flat.fill_(1.0)
    right.flat.fill_(2.0)
    assert bucket.add(left, right) is left
    assert left.views[0].tolist() == [3.0] * 4
    assert bucket.take() is right


def test_gradients_are_not_copied_until_they_are_sent() -> None:
    (bucket,) = make_buckets([((0,), [nn.Parameter(torch.zeros(4))])])
    bucket.parameters[0].grad = torch.ones(4)
    slab = bucket.gather()
    assert slab.views[0] is bucket.parameters[0].grad
    assert bucket.flatten(slab).flat[:4].tolist() == [1.0] * 4


def test_room_for_receiving_grows_and_is_kept() -> None:
    (bucket,) = make_buckets([((0,), [nn.Parameter(torch.zeros(4))])])
    first = bucket.receiving(8)
    assert bucket.receiving(4).data_ptr() == first.data_ptr()
    assert bucket.receiving(9).numel() == 9


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_lies_as_its_parameter(fused: bool) -> None:
    """Fused kernels take elements in the order of memory: a gradient in another one would change the wrong weights."""
    start, grad = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    weights = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(start.clone(memory_format=layout))
        bucket = Bucket(0, [p])
        slab = bucket.flatten(Slab([grad.clone(memory_format=layout)]))
        bucket.attach(slab)
        assert p.grad is not None
        assert p.grad.stride() == p.stride()
        torch.optim.SGD([p], lr=0.1, fused=fused).step()
        weights.append(p.detach())
    assert torch.equal(weights[0], weights[1])
    assert torch.allclose(weights[0], start - 0.1 * grad)
