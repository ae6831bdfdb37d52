"""What goes between layers: whatever it is, and however it lies, the bits are those of one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from holdfast.engine import boundary
from holdfast.engine import model as model_module
from holdfast.engine.boundary import lies_well, settled
from holdfast.errors import UsageError
from tests.engine.between import BETWEEN, between
from tests.engine.pipelines import (
    WIDTH,
    Job,
    Layer,
    assert_same,
    assert_same_everywhere,
    each_alone,
    linear,
    train,
    train_alone,
)

W = WIDTH


@pytest.mark.parametrize("case", BETWEEN)
def test_whatever_goes_between_layers_the_bits_are_those_of_one_worker(case: str) -> None:
    assert_same_everywhere(BETWEEN[case]())


def differs(job: Job) -> bool:
    try:
        assert_same_everywhere(job)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("case", ["with gaps, and summed", "a tensor and a view of it, written into"])
def test_boundaries_that_are_not_settled_would_show(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: in one process a layer gets the very tensors of the layer before."""
    monkeypatch.setattr(model_module, "settled", lambda value: value)
    assert differs(BETWEEN[case]())


def test_gradients_that_are_not_settled_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    job = BETWEEN["its gradient comes from its own stage"]()
    # Sums over a transposed gradient have other last bits; only one of the two layouts must see it so.
    monkeypatch.setattr(boundary, "like", lambda gradient, stride: gradient)
    expected = train_alone(job)
    monkeypatch.undo()
    assert any(result.differs_from(expected) for result in train(job, each_alone(3)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (lambda x: (x, {1, 2}), r"what the layer gives\[1\] is a set"),
        (lambda x: (x, torch.eye(W).to_sparse()), "sparse"),
        (lambda x: torch.return_types.max((x, x)), "max"),
        (lambda x: [x, object()], "object"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_words(given: Callable[[Tensor], Any], reason: str) -> None:
    job = between(lambda x, m: given(m(x)), lambda x, m: m(x[0] if isinstance(x, tuple | list) else x))
    with pytest.raises(UsageError, match=reason):
        train(job, each_alone(2))


# --- settled ------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1),
    "gaps": lambda x: x[..., ::2],
    "shifted": lambda x: x.reshape(-1)[1:],
    "first": lambda x: x[:1],
    "none": lambda x: x[:0],
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "flat": lambda x: x.reshape(-1),
    "detached": lambda x: x.detach(),
    "doubled": lambda x: x * 2,
    "number": lambda x: x.sum(),
    "conjugated": lambda x: torch.complex(x, x).conj() if not x.is_complex() else x.conj(),
    "imaginary": lambda x: x.imag if x.is_complex() else x,
}


@given(st.lists(st.lists(st.sampled_from(sorted(VIEWS)), max_size=4), min_size=1, max_size=4), st.booleans())
@settings(deadline=None)
def test_settled_values_are_equal_and_each_tensor_lies_well_in_memory_of_its_own(
    views: list[list[str]], wants: bool
) -> None:
    base = torch.arange(24.0).view(2, 3, 4).requires_grad_(wants) * 1.0
    given: list[Any] = [base, "word"]
    for names in views:
        made = base
        for name in names:
            made = VIEWS[name](made) if made.dim() else made
        given.append(made)
    found = settled((given, {"again": given[-1]}))
    tensors = [t for t in found[0] if isinstance(t, Tensor)]
    assert found[0][1] == "word"
    assert found[1]["again"] is found[0][-1], "what is there twice stays one"
    wanted = [t for t in given if isinstance(t, Tensor)]
    assert all(torch.equal(a.resolve_conj(), b.resolve_conj()) for a, b in zip(tensors, wanted, strict=True))
    assert all(lies_well(t) for t in tensors)
    distinct = {id(t): t for t in tensors if t.numel()}
    assert len({t.untyped_storage().data_ptr() for t in distinct.values()}) == len(distinct)
    assert all(a is b for a, b in zip(tensors, [t for t in settled(found)[0] if isinstance(t, Tensor)], strict=True))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_gradient_comes_back_as_its_tensor_lies(order: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)
    made = (x * 2).permute(order).contiguous().permute(*(order.index(i) for i in range(3)))
    seen: list[tuple[int, ...]] = []
    made.register_hook(lambda gradient: seen.append(gradient.stride()))
    y = settled((made, 1))[0]
    (y.transpose(0, 2).contiguous().sin().sum() + y.sum()).backward()
    assert seen == [y.stride()]


def test_memory_that_is_not_aligned_does_not_lie_well() -> None:
    room = torch.zeros(100)
    assert lies_well(room)
    assert lies_well(room.view(10, 10).t())
    assert not lies_well(room[1:])
    assert not lies_well(room.view(10, 10)[:, 1:])
    assert lies_well(room[16:]), "64 bytes on"
    assert not lies_well(torch.zeros(1).expand(5))
    assert not lies_well(torch.zeros(3, dtype=torch.complex64).conj())


# --- layers at random ----------------------------------------------------------------------------------

APPEND: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x[:],
    "part": lambda x: torch.cat([x, x])[: len(x)],
    "transposed": lambda x: x.t().contiguous().t(),
    "slice": lambda x: torch.cat([x, x], 1)[:, 1 : W + 1],
    "expanded": lambda x: x.mean(0, keepdim=True).expand(len(x), W),
    "same": lambda x: x,
    "detached": lambda x: x.detach(),
    "changed": lambda x: x * 1.5,
}


class Drawn(nn.Module):
    """Does with a list of tensors what it is told."""

    def __init__(self, orders: list[tuple[str, int, int]], shared: nn.Linear) -> None:
        super().__init__()
        self.orders, self.own = orders, linear()
        if any(name == "tied" for name, _, _ in orders):
            self.shared = shared

    def forward(self, given: Any) -> Any:
        x = [given] if isinstance(given, Tensor) else list(given)
        for name, i, j in self.orders:
            i, j = i % len(x), j % len(x)
            if name in APPEND:
                x.append(APPEND[name](x[i]))
            elif name == "drop" and len(x) > 1:
                del x[i]
            elif name == "write":
                x[i].add_(x[j].detach().sign())
            elif name == "mix":
                x[i] = x[i] * x[j].tanh()
            else:
                x[i] = (self.shared if name == "tied" else self.own)(x[i]).sin()
        return tuple(x)


names = st.sampled_from([*APPEND, "linear", "linear", "mix", "mix", "write", "tied", "drop"])
orders = st.lists(st.tuples(names, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4)


@given(st.lists(orders, min_size=2, max_size=4))
@settings(deadline=None, max_examples=20)
def test_layers_at_random_have_the_bits_of_one_worker(drawn: list[list[tuple[str, int, int]]]) -> None:
    def layers() -> list[nn.Module]:
        shared = linear()
        last = Layer(lambda x, m: m(sum(x[1:], x[0])), linear())
        return [linear(), *(Drawn(each, shared) for each in drawn), last]

    job = Job(layers=layers, clip_norm=0.3, steps=1, global_batch=6)
    try:
        expected = train_alone(job)
    except RuntimeError as e:  # what torch itself refuses: written into where it is still needed
        assume("inplace" not in str(e) and "in-place" not in str(e) and "single memory location" not in str(e))
        raise
    assert_same(job, each_alone(len(drawn) + 2), expected=expected)
