"""Streams: lanes, positions by state and by count, ends, and data sets of torch, Hugging Face and torchdata."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import holdfast
from holdfast.data.audit import audit, read_ledgers
from holdfast.data.lanes import LaneReader, Position, StreamOrder
from holdfast.data.stream import Stream
from holdfast.data.stream_feed import StreamFeed
from holdfast.data.window import Window
from holdfast.errors import LossNotFinite, UsageError


class Ranks:
    """One worker."""

    rank, size = 0, 1

    def exchange(self, text: bytes) -> list[bytes]:
        return [text]


def order_of(stream: Stream, global_batch: int = 4, micro_batch: int = 2) -> StreamOrder:
    given: dict[str, Any] = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": 0}
    return StreamOrder(shards=stream.count, epochs=stream.epochs, shuffle=stream.shuffle, **given)


def steps(stream: Stream, number: int, **batch: int) -> list[list[Any]]:
    """The micro-batches of some steps, each read by a worker that has just come."""
    state, found = None, []
    for step in range(number):
        feed = StreamFeed(stream, order=order_of(stream, **batch), collate=list)
        feed.set_state(state)
        if feed.is_over(state):
            break
        feed.prepare(step, Ranks())
        indices = range(feed.order.micro_batches(step))
        feed.begin(step, indices)
        found.append([feed.read(step, index) for index in indices])
        feed.agree(Ranks().exchange)
        feed.keep()
        feed.drop()
        state = feed.state()
    return found


def straight(stream: Stream, number: int, **batch: int) -> list[list[Any]]:
    """The same, by one worker from begin to end."""
    feed, found = StreamFeed(stream, order=order_of(stream, **batch), collate=list), []
    for step in range(number):
        if feed.is_over(feed.state()):
            break
        feed.prepare(step, Ranks())
        indices = range(feed.order.micro_batches(step))
        feed.begin(step, indices)
        found.append([feed.read(step, index) for index in indices])
        feed.agree(Ranks().exchange)
        feed.keep()
        feed.drop()
    return found


def letters(shard: str) -> Iterator[str]:
    yield from shard


# --- steps and ends -------------------------------------------------------------------------------------


def test_lanes_read_their_shards_again_and_again() -> None:
    found = straight(Stream(letters, shards=["abc", "xy", "d"]), 3)
    assert found == [[["a", "b"], ["x", "y"]], [["c", "d"], ["x", "y"]], [["a", "b"], ["x", "y"]]]


def test_streams_of_unequal_length_end_one_after_the_other() -> None:
    """A lane that is over has no micro-batches; the last one that it has may be smaller."""
    found = straight(Stream(letters, shards=["abcde", "xy", "f"], epochs=1), 9)
    assert found == [[["a", "b"], ["x", "y"]], [["c", "d"]], [["e", "f"]]]
    found = straight(Stream(letters, shards=["abc", "x"], epochs=2), 9)
    assert found == [[["a", "b"], ["x", "x"]], [["c", "a"]], [["b", "c"]]]


def test_a_stream_that_is_shorter_than_a_step() -> None:
    assert straight(Stream(letters, shards=["a", ""], epochs=1), 9) == [[["a"]]]
    assert straight(Stream(letters, shards=["a", "xy"]), 1) == [[["a", "a"], ["x", "y"]]]


def test_empty_shards() -> None:
    assert straight(Stream(letters, shards=["", "x", "ab", "yz"], epochs=1), 9) == [[["a", "b"], ["x", "y"]], [["z"]]]
    with pytest.raises(UsageError, match="no samples"):
        straight(Stream(letters, shards=["", ""], epochs=3), 1)
    with pytest.raises(UsageError, match="no samples in shard-b"):
        straight(Stream(lambda shard: "a" if shard == "shard-a" else "", shards=["shard-a", "shard-b"]), 1)


def test_the_ledger_tells_of_lanes_without_samples(tmp_path: Any) -> None:
    """Else it would seem that they were never read: epochs that every lane has completed would be 0."""
    run = make_run(Stream(lambda shard: pairs(0) if shard else [], shards=[0, 1], epochs=2), checkpoint=tmp_path)
    list(run.steps())
    run.finish()
    found = audit(read_ledgers([tmp_path]))
    assert (found.samples, found.epochs, found.shards) == (10, 2, 1)


def test_more_micro_batches_than_shards() -> None:
    stream = Stream(letters, shards=["abcdefgh"], epochs=1)
    assert straight(stream, 9, global_batch=6) == [[["a", "b"], ["c", "d"], ["e", "f"]], [["g", "h"]]]


def test_epochs_have_orders_of_shards_of_their_own() -> None:
    stream = Stream(letters, shards=list("abcdefgh"), shuffle=True, epochs=4)
    passes = [[sample for (batch,) in straight(stream, 99, global_batch=8, micro_batch=8) for sample in batch]]
    orders = {tuple(passes[0][first : first + 8]) for first in range(0, 32, 8)}
    assert len(orders) == 4
    assert all(sorted(order) == list("abcdefgh") for order in orders)
    assert steps(stream, 99, global_batch=2, micro_batch=1) == straight(stream, 99, global_batch=2, micro_batch=1)


def test_an_iterator_that_raises_names_the_sample_and_is_not_taken_for_one_at_its_end() -> None:
    def broken(shard: str) -> Iterator[str]:
        yield "a"
        raise OSError("the disk is gone")

    feed = StreamFeed(stream := Stream(broken, shards=["x.txt"]), order=order_of(stream), collate=list)
    for _ in range(2):
        feed.begin(0, [0])
        with pytest.raises(OSError, match="disk") as error:
            feed.read(0, 0)
        assert error.value.__notes__ == ["while sample 1 of x.txt was read"]
        feed.drop()


# --- positions ------------------------------------------------------------------------------------------


class Counter(IterableDataset):
    """A data set that keeps its position, as torchdata's stateful ones do."""

    def __init__(self, size: int = 7) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Parted(IterableDataset):
    """A data set that cuts itself for the workers of a DataLoader."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0 if info is None else info.id, 12, 1 if info is None else info.num_workers)


def hugging_face(**shuffle: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    numbers = datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=3)
    if shuffle:
        numbers = numbers.shuffle(seed=3, **shuffle)
    return numbers.filter(lambda row: row["x"] % 5 != 0).map(lambda row: {"x": row["x"] * 10})


def mixed(mix: str, **options: Any) -> Any:
    """Two Hugging Face data sets as one, of which the second has a shuffle buffer."""
    datasets = pytest.importorskip("datasets")
    letters = datasets.Dataset.from_dict({"y": list("abcdefghijkl")}).to_iterable_dataset(num_shards=1)
    return getattr(datasets, mix)([letters, hugging_face(buffer_size=4)], **options)


def node_of(data: Any) -> Any:
    """A data set behind a node of torchdata, whose state has that of the data set in it."""
    nodes = pytest.importorskip("torchdata.nodes")
    return nodes.Loader(nodes.Mapper(nodes.IterableWrapper(data), lambda row: row["x"]))


def stateful_loader(data: Any) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(data, batch_size=None)


class Doubled(IterableDataset):
    """A user's data set around another one, whose state it passes on."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        yield from (2 * row["x"] for row in self.data)

    def state_dict(self) -> Any:
        return self.data.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.data.load_state_dict(state)


def loader(*, maps: bool = False) -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    if maps:  # they refer to modules, which cannot be copied
        doubled = nodes.Mapper(nodes.IterableWrapper(range(23)), lambda number: 2 * number)
        return nodes.Loader(nodes.Prefetcher(doubled, prefetch_factor=3))
    return nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(13)), batch_size=2, drop_last=False))


def shuffled_lines(shard: str) -> Iterator[str]:
    lines = list(shard)
    random.shuffle(lines)  # drawn while the shard is opened: the same for everybody
    for line in lines:
        yield f"{line}{random.random():.3f}"


def random_filter_and_buffer(shard: str) -> Iterator[str]:
    """Draws decide which samples there are, and in which order: they must be the same when samples are skipped."""
    buffer: list[str] = []
    for letter in shard * 3:
        if random.random() < 0.3:
            continue
        buffer.append(f"{letter}{torch.randint(9, ()).item()}")
        if len(buffer) > 3:
            yield buffer.pop(np.random.randint(len(buffer)))
    random.shuffle(buffer)
    yield from buffer


INEXACT: dict[str, Callable[[], Stream]] = {  # a shuffle buffer is in no state
    "Hugging Face, interleaved": lambda: Stream.of(mixed("interleave_datasets")),
    "Hugging Face, one after the other": lambda: Stream.of(mixed("concatenate_datasets")),
    "Hugging Face, side by side": lambda: Stream.of(mixed("concatenate_datasets", axis=1)),
    "Hugging Face, shuffled": lambda: Stream.of(hugging_face(buffer_size=4)),
    "Hugging Face, shuffled, in a node": lambda: Stream.of(node_of(hugging_face(buffer_size=4))),
    "Hugging Face, shuffled, in a loader": lambda: Stream.of(stateful_loader(hugging_face(buffer_size=4))),
    "Hugging Face, shuffled, in a data set": lambda: Stream.of(Doubled(hugging_face(buffer_size=4))),
}

SOURCES: dict[str, Callable[[], Stream]] = {
    "a generator": lambda: Stream(letters, shards=["abcdefg", "uvwxyz", "hij"]),
    "random numbers": lambda: Stream(shuffled_lines, shards=["abcdefg", "uvwxyz", "hij"]),
    "a shuffle buffer": lambda: Stream(random_filter_and_buffer, shards=["abcdefg", "uvwxyz", "hij"]),
    "a stateful data set": lambda: Stream.of(Counter()),
    "its state by count": lambda: Stream(Counter(), positions="count"),
    "get_worker_info": lambda: Stream(Parted(), shards=3),
    "Hugging Face": lambda: Stream.of(hugging_face()),
    "torchdata": lambda: Stream.of(loader()),
    "torchdata, mapped": lambda: Stream.of(loader(maps=True)),
    "a loader": lambda: Stream.of(stateful_loader(Counter(13))),
} | INEXACT


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("epochs", [None, 2])
def test_a_position_is_returned_to(source: str, epochs: int | None) -> None:
    """Whoever comes at any step reads what one worker would have read that has been there all the time."""
    stream = SOURCES[source]()
    object.__setattr__(stream, "epochs", epochs)
    expected = straight(stream, 12)
    assert steps(stream, 12) == expected
    assert len(expected) > 3


def test_states_are_used_where_they_are_exact() -> None:
    for source, has_state in {"a stateful data set": True, "its state by count": False, "Hugging Face": True}.items():
        stream = SOURCES[source]()
        reader = LaneReader(stream, order_of(stream), 0, Position())
        reader.take(2)
        assert (reader.position().state is not None) == has_state, source
    for source, make in (INEXACT | {"a loader": SOURCES["a loader"]}).items():
        stream = make()
        reader = LaneReader(stream, order_of(stream), stream.count - 1, Position())
        reader.take(2)
        assert reader.position().state is None, source


def test_parts_of_a_data_set_that_cuts_itself() -> None:
    assert [list(row) for row in straight(Stream(Parted(), shards=2, epochs=1), 9)[0]] == [[0, 2], [1, 3]]
    assert get_worker_info() is None


def test_a_hugging_face_set_gives_each_sample_once() -> None:
    found = straight(Stream(hugging_face(), epochs=1), 99)
    values = [row["x"] for step in found for batch in step for row in batch]
    assert sorted(values) == [10 * number for number in range(24) if number % 5]


def test_a_step_that_is_dropped_is_not_read_again() -> None:
    reads: list[str] = []

    def noted(shard: str) -> Iterator[torch.Tensor]:
        for letter in shard:
            reads.append(letter)
            yield torch.tensor([ord(letter)])

    stream = Stream(noted, shards=["abcdef"])
    feed = StreamFeed(stream, order=order_of(stream), collate=torch.cat)
    feed.begin(0, [0])
    feed.read(0, 0).zero_()  # the user's code writes into its batch
    feed.drop()
    feed.begin(0, [0, 1])
    assert [feed.read(0, index).tolist() for index in (0, 1)] == [[97, 98], [99, 100]]
    assert reads == list("abcd")


def test_a_shard_that_gives_other_samples_is_noticed() -> None:
    sizes = iter([9, 1])
    stream = Stream(lambda shard: range(next(sizes)), shards=["x.txt"])
    order = order_of(stream)
    position = Window(stream, order, 0, step=0, position=Position()).end(step=0)
    with pytest.raises(UsageError, match=r"x\.txt had at least 4 samples, and now it has 1"):
        Window(stream, order, 0, step=1, position=position).end(step=1)


def test_a_stateful_object_that_cannot_be_copied_is_refused_in_words() -> None:
    data = Counter()
    data.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="a Counter keeps its position") as caught:
        Stream(data).open(0, epoch=0)
    assert "a function that makes it" in str(caught.value)


def test_positions_of_another_cut_are_refused() -> None:
    stream = Stream(letters, shards=["abc", "def"])
    feed = StreamFeed(stream, order=order_of(stream), collate=list)
    feed.begin(0, [0, 1])
    feed.agree(Ranks().exchange)
    feed.keep()
    other = Stream(letters, shards=["abc", "def", "g"])
    with pytest.raises(UsageError, match="shards 2, now 3"):
        StreamFeed(other, order=order_of(other)).set_state(feed.state())


# --- settings, and a run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Stream(letters), "needs shards="),
        (lambda: Stream(letters, shards=[]), "no shards"),
        (lambda: Stream(letters, shards="a.txt"), "no list of shards"),
        (lambda: Stream(letters, shards=["a"], epochs=0), "epochs"),
        (lambda: Stream(letters, shards=["a"], shuffle=7), "neither True nor False"),
        (lambda: Stream(letters, shards=["a"], positions="byte"), "not known"),
        (lambda: Stream(letters("abc")), "only once"),
        (lambda: Stream(3), "no stream"),
        (lambda: Stream(lambda: letters("abc"), shards=2), r"called with one shard.*\(\)"),
        (lambda: Stream(DataLoader([1, 2])), "gives batches"),  # type: ignore[arg-type, var-annotated]
        (lambda: Stream(Parted(), shards=["a"]), "a number of shards"),
        (lambda: holdfast.Data(letters), "Stream"),
        (lambda: holdfast.Data(DataLoader([1, 2])), r"loader\.dataset"),  # type: ignore[arg-type, var-annotated]
        (lambda: holdfast.Data(Stream(letters, shards=["a"]), partition=object()), "partition"),
    ],
)
def test_bad_settings(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def pairs(shard: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(5):
        x = torch.full((2,), float(shard + number))
        yield x, x[:1] * (float("nan") if shard + number == 13 else 1.0)


def make_run(stream: Any, **settings: Any) -> holdfast.Run:
    torch.manual_seed(0)
    given: dict[str, Any] = {"global_batch": 4, "micro_batch": 2, "loss": nn.functional.mse_loss, **settings}
    given["optimizer"] = lambda params: torch.optim.SGD(params, lr=1e-3)
    return holdfast.Run(layers=nn.Linear(2, 1), data=stream, **given)


def test_the_mean_of_a_smaller_step_is_that_of_its_samples() -> None:
    """Five samples in two lanes: the second step has micro-batches of two and one, the third one of one."""
    run = make_run(Stream(lambda shard: list(pairs(0))[: 5 - shard], shards=[0, 2], epochs=1), clip_norm=1.0)
    model = run.engine.model.layers[0]
    samples = list(pairs(0))
    with torch.no_grad():
        expected = [torch.stack([(model(x) - y) ** 2 for x, y in [*samples[:2], *samples[:2]]]).mean()]
    losses = []
    for step in run.steps():
        losses.append(step.loss)
        with torch.no_grad():
            used = [samples[2:4] + samples[2:3], samples[4:5], []][step.number]
            if used:
                expected.append(torch.stack([(model(x) - y) ** 2 for x, y in used]).mean())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))


def test_the_samples_of_a_bad_loss_are_named() -> None:
    with pytest.raises(LossNotFinite, match=r"shard 1 samples 2\.\.3"):
        list(make_run(Stream(pairs, shards=[0, 10])).steps(3))


def test_what_a_stream_cannot_do_is_refused_in_words(tmp_path: Any) -> None:
    stream = Stream(pairs, shards=[0, 1])
    with pytest.raises(UsageError, match="apart"):
        make_run(stream, sync=holdfast.LocalSGD(every=2))
    with pytest.raises(UsageError, match="backwards"):
        make_run(stream, checkpoint=holdfast.Checkpoints(folder=tmp_path, log=True))
    with pytest.raises(UsageError, match="no end"):
        next(make_run(stream).steps())


def test_a_run_that_is_over_knows_its_last_epoch_when_it_is_started_again(tmp_path: Any) -> None:
    stream = Stream(lambda shard: list(pairs(0)), shards=[0, 1], epochs=3)
    for _ in range(2):
        run = make_run(stream, checkpoint=tmp_path)
        list(run.steps())
        assert run.last is not None
        assert run.last.epoch == 2
        run.finish()
