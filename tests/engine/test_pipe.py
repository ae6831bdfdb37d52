"""Values from stage to stage: as they were, in order, described once, and no receive left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.engine.boundary import settled
from holdfast.engine.pipe import REMEMBERED, UNCLAIMED, Inbox, Outbox, describe
from holdfast.errors import Broken, UsageError
from tests.cluster.links.hubs import linked, together
from tests.engine.memory_group import MemoryGroup, Network, Receive

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


class Counting(MemoryGroup):
    """Counts receives, and may be lost in one of them."""

    def __init__(self, rank: int, network: Network, lost_at: int | None = None) -> None:
        super().__init__(rank, network)
        self.receives: list[Receive] = []
        self.lost_at, self.waits = lost_at, 0

    def start(self, sends: Any, receives: Any) -> list[Receive]:
        made = super().start(sends, receives)
        self.receives += made
        return made

    def wait(self, work: Receive) -> None:
        self.waits += 1
        if self.waits == self.lost_at:
            work.let_go()
            raise Broken("lost")
        super().wait(work)

    @property
    def open(self) -> list[Receive]:
        return [receive for receive in self.receives if not receive.waited]


class Pipe:
    """Both ends, in one thread: what is sent is read when it is taken."""

    def __init__(self, lost_at: int | None = None) -> None:
        self.network = Network(2)
        self.group = Counting(1, self.network, lost_at)
        self.sender = MemoryGroup(0, self.network)
        self.out = Outbox(self.sender, 1, 1000, CPU)
        self.inbox = Inbox(self.group, 0, 1000, CPU)

    def through(self, value: Any) -> Any:
        kept = self.out.send(describe(value))
        arrived = self.inbox.take()
        del kept
        return arrived


def assert_equal(found: Any, given: Any) -> None:
    assert type(found) is type(given) or (isinstance(given, torch.Size) and isinstance(found, tuple))
    if isinstance(given, Tensor):
        assert found.dtype == given.dtype
        assert found.shape == given.shape
        assert found.requires_grad == given.requires_grad
        assert torch.equal(found, given)
        assert found.stride() == settled(given).stride()
        assert not given.numel() or found.data_ptr() != given.data_ptr()
    elif isinstance(given, dict):
        assert list(found) == list(given), "the order too: layers may go by it"
        for key in given:
            assert_equal(found[key], given[key])
    elif isinstance(given, tuple | list):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            assert_equal(one, other)
    else:
        assert found == given


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.arange(1000)[: max(1, torch.Size(shape).numel())].to(draw(st.sampled_from(DTYPES)))
    made = made[: torch.Size(shape).numel()].reshape(shape)
    made = draw(st.sampled_from([made, made.t() if len(shape) == 2 else made, made[..., ::2] if shape else made]))
    return made.clone().requires_grad_() if made.is_floating_point() and draw(st.booleans()) else made


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary()
leaves = tensors() | plain | st.sampled_from([torch.bfloat16, torch.Size([2, 3])])
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["$tensor", "$tuple"])
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(values, min_size=1, max_size=5), st.lists(st.integers(0, 4), max_size=8))
@settings(deadline=None, max_examples=150)
def test_values_arrive_as_they_were_in_order_and_any_number_of_times(given: list[Any], order: list[int]) -> None:
    pipe = Pipe()
    for number in [*range(len(given)), *(number % len(given) for number in order)]:
        assert_equal(pipe.through(given[number]), given[number])


ODD = [torch.uint16, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


def test_over_real_wires_every_kind_of_number_arrives() -> None:
    """Links send memory, and must not care what is in it."""
    base = torch.arange(6.0).view(2, 3)
    given: list[Any] = [(base.to(dtype), number) for number, dtype in enumerate(DTYPES + ODD)] * 2
    given += [base.t(), base[:, ::2], base.to(torch.complex64).conj(), base[:0], base.sum(), None, {"a": [base, base]}]
    with linked() as groups:
        inbox = Inbox(groups[1], 0, 1000, CPU)

        def send() -> None:
            out = Outbox(groups[0], 1, 1000, CPU)
            kept = [out.send(describe(value)) for value in given]
            groups[0].vote(torch.zeros(1))
            del kept

        def receive() -> list[Any]:
            taken = [inbox.take() for _ in given]
            groups[1].vote(torch.zeros(1))
            return taken

        found = together(send, receive)[1]
        groups[1].close()
        inbox.close()
    for one, other in zip(found, given, strict=True):
        if isinstance(other, tuple):
            assert one[0].dtype == other[0].dtype
            assert one[1] == other[1]
            assert bytes(one[0].untyped_storage()) == bytes(other[0].untyped_storage())
        else:
            assert_equal(one, other)


def test_many_may_be_under_way() -> None:
    pipe = Pipe()
    shapes = [3, 3, 5, 3, 5, 5, 3, 3, 3]
    kept = [pipe.out.send(describe((torch.full((n,), float(i)), i % 2))) for i, n in enumerate(shapes)]
    for i, n in enumerate(shapes):
        assert_equal(pipe.inbox.take(), (torch.full((n,), float(i)), i % 2))
    assert len(kept) == len(shapes)


def test_a_tensor_that_is_there_twice_is_sent_once_and_stays_one() -> None:
    pipe, x = Pipe(), torch.ones(100)
    found = pipe.through({"x": x, "again": [x]})
    assert found["x"] is found["again"][0]
    assert pipe.network.bytes < 2 * x.nbytes


def test_a_description_is_sent_once() -> None:
    pipe = Pipe()
    pipe.through((torch.zeros(2), "a long text" * 100))
    before = pipe.network.bytes
    pipe.through((torch.ones(2), "a long text" * 100))
    assert pipe.network.bytes - before <= 24, "sixteen bytes that say so, and the numbers"


def test_room_is_made_before_it_is_needed_where_shapes_stay_and_bounded_where_they_change() -> None:
    pipe = Pipe()
    for _ in range(5):
        pipe.through(torch.zeros(2))
    assert len(pipe.group.open) == 2, "the next header, and the next tensor"
    for size in range(200):
        for _ in range(3):
            pipe.through(torch.zeros(size))
    assert len(pipe.group.open) <= 1 + UNCLAIMED
    for size in range(200):
        assert_equal(pipe.through(torch.full((size,), 1.0)), torch.full((size,), 1.0))


def test_descriptions_are_forgotten_on_both_sides_alike() -> None:
    """Numbers that change with each micro-batch would fill the memory in the course of days."""
    pipe = Pipe()
    for number in range(3 * REMEMBERED):
        assert pipe.through((0.5 * number, torch.zeros(1)))[0] == 0.5 * number
        if number % 7 == 0:
            assert_equal(pipe.through("one that comes again"), "one that comes again")
        if number > REMEMBERED:
            old = number - REMEMBERED // 2
            assert pipe.through((0.5 * old, torch.zeros(1)))[0] == 0.5 * old
    assert len(pipe.out._numbers) <= REMEMBERED
    assert len(pipe.inbox._known) <= REMEMBERED


def course(pipe: Pipe) -> list[Any]:
    """Values of all kinds, as they come until the pipe breaks."""
    given = [torch.zeros(2), torch.zeros(2), torch.zeros(2), (torch.zeros(3), torch.ones(4)), None, torch.zeros(2)]
    kept, taken = [], []
    for value in given:
        kept.append(pipe.out.send(describe(value)))
        taken.append(pipe.inbox.take())
    return taken


def test_after_a_break_each_receive_was_waited_for_once() -> None:
    """One that is not may write into memory given back; one that is waited for twice never returns."""
    whole = Pipe()
    assert len(course(whole)) == 6
    for lost_at in range(1, whole.group.waits + 1):
        pipe = Pipe(lost_at)
        with pytest.raises(Broken):
            course(pipe)
        pipe.inbox.close()
        assert not pipe.group.open, f"lost in wait {lost_at}"
    whole.inbox.close()
    assert not whole.group.open


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1, 2}, "set"),
        (object(), "object"),
        ((torch.ones(2), [torch.device("cpu")]), "device"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.return_types.max((torch.ones(1), torch.ones(1))), "max"),
        (type("Mine", (dict,), {})(a=1), "Mine"),
        ([type("Mine", (list,), {})([1])], "Mine"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_words_and_nothing_is_sent(value: Any, reason: str) -> None:
    pipe = Pipe()
    with pytest.raises(UsageError, match=reason):
        pipe.out.send(describe(value))
    assert pipe.network.bytes == 0
    assert_equal(pipe.through((1, torch.ones(2))), (1, torch.ones(2)))


def test_the_network_of_these_tests_finds_out_what_is_changed_too_early() -> None:
    """The control: what is sent is read late."""
    pipe, x = Pipe(), torch.zeros(2)
    kept = pipe.out.send(describe(x))
    x.add_(1.0)
    assert pipe.inbox.take().tolist() == [1.0, 1.0]
    del kept


def test_the_network_of_these_tests_finds_out_who_does_not_keep_what_it_sends() -> None:
    pipe = Pipe()
    pipe.out.send(describe(torch.zeros(2)))
    with pytest.raises(AssertionError, match="let go before it was read"):
        pipe.inbox.take()
