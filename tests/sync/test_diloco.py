"""The outer step is SGD with Nesterov momentum along the way from the anchor to the mean."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.sync.diloco import DiLoCo
from holdfast.sync.policy import Context, Policy


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.0), (1.0, 0.3)])
def test_is_torchs_nesterov(lr: float, momentum: float) -> None:
    torch.manual_seed(0)
    policy = DiLoCo(every=1, outer_lr=lr, outer_momentum=momentum)
    anchor = torch.randn(50)
    theirs = torch.nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=momentum > 0)
    memory = torch.zeros(50)
    for _ in range(5):
        mean = anchor + 0.1 * torch.randn(50)
        theirs.grad = theirs.detach() - mean
        optimizer.step()
        anchor, memory = policy.outer(anchor, mean, memory)
        torch.testing.assert_close(anchor, theirs.detach())


def test_is_local_sgd_with_a_rate_of_one_and_no_momentum() -> None:
    torch.manual_seed(0)
    anchor, mean = torch.randn(1000) * 1e3, torch.randn(1000)
    policy = DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)
    new, _ = policy.outer(anchor, mean, torch.zeros(1000))
    assert torch.equal(new, mean)
    assert not torch.equal(anchor - (anchor - mean), mean)  # why it is a case of its own
    assert new.data_ptr() != mean.data_ptr()


def test_changes_nothing_in_place() -> None:
    anchor, mean, memory = (torch.full((3,), value) for value in (1.0, 2.0, 3.0))
    DiLoCo().outer(anchor, mean, memory)
    assert [each.tolist() for each in (anchor, mean, memory)] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_synchronises_every_so_many_steps() -> None:
    tracker = DiLoCo(every=4).tracker(Context())
    assert tracker.ballot == 0
    assert [tracker.decide(step, [], 2).synchronise for step in range(4)] == [False, False, False, True]
    tracker.synchronised(4, [])
    assert not tracker.decide(4, [], 2).synchronise
    assert DiLoCo().every == 500


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DiLoCo(every=0), "every=0"),
        (lambda: DiLoCo(outer_lr=0), "outer_lr=0"),
        (lambda: DiLoCo(outer_lr=float("nan")), "outer_lr=nan"),
        (lambda: DiLoCo(outer_momentum=-0.1), "outer_momentum=-0.1"),
        (lambda: DiLoCo(outer_momentum=1), "outer_momentum=1"),
    ],
)
def test_bad_settings_are_refused(make: type[Policy], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
