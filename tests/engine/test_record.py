"""What a stage keeps of what it sends: each record under its key, in memory that nobody writes into later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.engine.boundary import tensors_in
from holdfast.engine.pipe import describe, read
from holdfast.log.record import Direction, Key, Message, Recorder, lasting


class Book:
    """A log that copies nothing."""

    def __init__(self) -> None:
        self.records: dict[Key, Message] = {}

    def begin(self, step: int) -> None: ...

    def keep(self, key: Key, message: Message) -> None:
        self.records[key] = message

    def note(self, step: int, terms: Any) -> None: ...


def test_keys_say_where_a_record_belongs() -> None:
    book = Book()
    recorder = Recorder(book, {3, 7})
    recorder.at(5, range(4, 8))
    gradient = torch.ones(2)
    for boundary in (0, 3, 4, 7):
        recorder.backward(boundary, 1, describe([gradient]))
        recorder.forward(boundary, 2, describe(gradient), [gradient])
    recorder.tie(9, 1, describe(gradient))
    assert set(book.records) == {
        *(Key(step=5, boundary=at, micro_batch=5, direction=Direction.BACKWARD) for at in (3, 7)),
        *(Key(step=5, boundary=at, micro_batch=6, direction=Direction.FORWARD) for at in (3, 7)),
        Key(step=5, boundary=9, micro_batch=1, direction=Direction.TIE),
    }


def test_attempts_of_a_step_have_the_same_keys() -> None:
    book = Book()
    recorder = Recorder(book, {1})
    for value, share in ((1.0, range(4)), (2.0, range(2, 4))):
        recorder.at(0, share)
        recorder.backward(1, share.index(2), describe([torch.tensor(value)]))
    ((key, message),) = book.records.items()
    assert key == Key(step=0, boundary=1, micro_batch=2, direction=Direction.BACKWARD)
    assert read(message) == [torch.tensor(2.0)]


# --- memory that lasts ---------------------------------------------------------------------------


class Cache(nn.Module):
    """Gives memory of its own, which it writes into the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.register_buffer("buffer", torch.ones(32))
        self.large = torch.ones(100, 32)


def kept(output: Any) -> Message:
    book = Book()
    recorder = Recorder(book, {1})
    recorder.at(0, range(1))
    recorder.forward(1, 0, describe(output), tensors_in(output))
    return next(iter(book.records.values()))


GIVES = {
    "a parameter": lambda m: m.weight,
    "a part of a parameter": lambda m: m.weight[4:20],
    "a buffer": lambda m: (m.weight * 2, m.buffer),
    "what is not trained": lambda m: m.large,
    "a row of it": lambda m: (m.weight.sum(), m.large[3]),
    "a buffer, transposed": lambda m: m.large.t(),
    "a parameter, detached": lambda m: {"x": m.weight.detach(), "y": m.weight.exp()},
    "a view of a sum": lambda m: (m.weight * 2).view(4, 8),
}


@pytest.mark.parametrize("name", GIVES)
def test_what_a_layer_goes_on_using_is_copied(name: str) -> None:
    layer = Cache()
    output = GIVES[name](layer)
    text, tensors = kept(output)
    before = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in (layer.weight, layer.buffer, layer.large):
            tensor.fill_(7.0)
    assert all(map(torch.equal, tensors, before))
    assert text == describe(output)[0]


def test_what_nobody_else_has_is_not_copied() -> None:
    result = nn.Linear(64, 64)(torch.ones(64, 64))
    _, (tensor,) = kept(result)
    assert tensor.data_ptr() == result.data_ptr()


@pytest.mark.parametrize("part", [slice(0, 1), slice(0, 64)])
def test_a_part_does_not_keep_the_whole(part: slice) -> None:
    result = nn.Linear(64, 64)(torch.ones(64, 640)[:, :64])[part]
    _, (tensor,) = kept(result)
    assert tensor.untyped_storage().nbytes() <= tensor.nbytes + 64


def test_a_part_of_a_gradient_does_not_keep_the_whole() -> None:
    book = Book()
    recorder = Recorder(book, {1})
    recorder.at(0, range(1))
    recorder.backward(1, 0, describe([torch.ones(1000, 64)[500]]))
    ((_, (tensor,)),) = book.records.values()
    assert tensor.untyped_storage().nbytes() == 256


def test_a_tie_is_copied() -> None:
    book = Book()
    recorder = Recorder(book, {1})
    gradient = torch.ones(64)
    recorder.tie(0, 0, describe(gradient))
    gradient.fill_(7.0)
    ((_, (tensor,)),) = book.records.values()
    assert torch.equal(tensor, torch.ones(64))


def test_values_come_back_as_they_would_have_arrived() -> None:
    x = nn.Linear(4, 4)(torch.ones(2, 4))
    value = {"x": x, "same": (x, 7), "mask": torch.tensor([True, False]), "none": None, "text": "word"}
    again = read(kept(value))
    assert again["x"] is again["same"][0]
    assert again["x"].requires_grad
    assert again["x"].is_leaf
    assert not again["mask"].requires_grad
    assert torch.equal(again["x"], x)
    assert (again["none"], again["text"], again["same"][1]) == (None, "word", 7)


def test_control_without_copies_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.log import record

    def same(sent: Tensor, given: Tensor) -> Tensor:
        return sent

    monkeypatch.setattr(record, "lasting", same)
    with pytest.raises(AssertionError):
        test_what_a_layer_goes_on_using_is_copied("a parameter")
    assert lasting is not same
