"""Cursors: one open shard of a stream, whose position can be kept and returned to."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from holdfast import codec
from holdfast.data.stream import Stream
from holdfast.errors import UsageError
from holdfast.rng import Generators, generators, seed_everything, seed_of, set_generators
from holdfast.words import a_kind

CPU = torch.device("cpu")
LEAD_ASTRAY = {"StatefulDataLoader", "_StatefulBaseDataLoaderIter"}  # classes of torchdata with inexact states
MIXED = 1000  # items of a list in which data sets are looked for: a list may also be the data


class Cursor:
    """A shard that is being read. ``taken``: samples before the position; ``state``: what ``state`` gave there.

    ``seed`` is that of the random numbers which are drawn while the shard is opened and its first sample is read: so a
    function that shuffles what it has read from a file gives the same order whoever opens it. A shard whose position
    is told by count draws on from there: its samples are the same when they are read again, also if the numbers decide
    which samples there are (a shuffle buffer, a random filter). One with a state draws for each micro-batch anew.

    Raises ``UsageError`` if the shard has fewer samples now than were taken before.

    >>> cursor = Cursor(Stream(lambda shard: "abcd", shards=1), 0, epoch=0, taken=2)
    >>> next(cursor), cursor.taken
    ('c', 3)
    """

    def __init__(
        self, stream: Stream, shard: int, *, epoch: int, taken: int = 0, state: Any = None, seed: int = 0
    ) -> None:
        self._stream, self._shard = stream, shard
        self._samples: Any = None
        self.taken = 0
        self._peeked: list[Any] = []  # the first sample, until it is asked for
        self._drawn: Generators | None = None  # where its random numbers go on; None: as the reader has seeded them
        seed_everything(seed_of(seed, "shard", shard, epoch), CPU)
        with self._as_worker():
            self._source = stream.open(shard, epoch=epoch)
            self._keeper = self._begin(None if state is None else unpack(state))
        if state is not None:
            self.taken = taken
        else:
            self._peeked += self._read()
        while self.taken < taken:
            try:
                next(self)
            except StopIteration:
                raise UsageError(
                    f"{stream.name(shard)} had at least {taken} samples, and now it has {self.taken}",
                    hint="a shard must give the same samples whenever it is opened",
                ) from None
        if self._goes_by_count:
            self._drawn = generators()

    @cached_property
    def _goes_by_count(self) -> bool:
        wanted, keeper = self._stream.positions, self._keeper
        return keeper is None or wanted == "count" or (wanted == "auto" and _is_inexact(keeper))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Read samples in this context, with the shard's own random numbers if it has some."""
        if self._drawn is None:
            yield
            return
        set_generators(self._drawn)
        yield
        self._drawn = generators()

    def _begin(self, state: Any) -> Any:
        """Make the iterator, at a state if there is one; return the object that tells states, or None."""
        source = self._source
        if hasattr(source, "restart_on_stop_iteration"):  # a Loader of torchdata
            source.restart_on_stop_iteration = False  # else a state at the end would begin again
        if hasattr(source, "get_state") and hasattr(source, "reset"):  # a node of torchdata
            source.reset(state)
            self._samples = source
            return source
        if state is not None and _keeps_state(source):
            source.load_state_dict(state)
            self._samples = iter(source)
            return source
        if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
            raise UsageError(
                f"a shard was opened as {a_kind(source)}, which gives no samples",
                hint="open_shard(shard) gives an iterator or a list",
            )
        self._samples = iter(source)
        if not _keeps_state(self._samples):
            return source if _keeps_state(source) else None
        if state is not None:
            self._samples.load_state_dict(state)
        return self._samples

    def __next__(self) -> Any:
        found = [self._peeked.pop()] if self._peeked else self._read()
        if not found:
            raise StopIteration
        self.taken += 1
        return found[0]

    def _read(self) -> list[Any]:
        """Return the next sample of the shard, alone in a list; an empty list at its end."""
        with self._as_worker():
            try:
                return [next(self._samples)]
            except StopIteration:
                return []
            except Exception as e:
                e.add_note(f"while sample {self.taken} of {self._stream.name(self._shard)} was read")
                raise

    def __iter__(self) -> Iterator[Any]:
        return self

    def state(self) -> Any:
        """Return the present position as JSON values; None: it is told by ``taken`` alone.

        Raises ``UsageError`` if there is no state and the user has asked for it, or if it cannot be kept.
        """
        keeper = self._keeper
        if keeper is None and self._stream.positions == "state":
            raise UsageError(
                f"{self._stream.name(self._shard)} has no state_dict and load_state_dict", hint="positions='count'"
            )
        if self._peeked or self._goes_by_count:
            return None
        return pack(keeper.state_dict(), f"the state of {self._stream.name(self._shard)}")

    def close(self) -> None:
        """Free the shard. A generator's ``finally`` clauses run now."""
        for each in (self._samples, self._source):
            if hasattr(each, "close"):
                each.close()

    @contextmanager
    def _as_worker(self) -> Iterator[None]:
        """Let the data set cut itself: it asks ``get_worker_info()`` which part is its own."""
        if not self._stream.is_cut_by_worker:
            yield
            return
        before: Any = torch_worker._worker_info
        here = {"id": self._shard, "num_workers": self._stream.count, "seed": 0, "dataset": self._stream.source}
        torch_worker._worker_info = torch_worker.WorkerInfo(**here)
        try:
            yield
        finally:
            torch_worker._worker_info = before


def _keeps_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_inexact(data: Any) -> bool:
    """Return whether the state of these data is known not to lead back to the same place.

    That of a Hugging Face data set does not have the content of its shuffle buffer; that of torchdata's
    ``StatefulDataLoader`` leads from the end to the begin. They may lie inside others, as in a mix of data sets.
    """
    seen: set[int] = set()
    waiting = [data]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        names = {kind.__name__ for kind in type(part).__mro__}
        if any("BufferShuffled" in name for name in names) or names & LEAD_ASTRAY:
            return True
        waiting += _parts(part)
    return False


def _parts(data: Any) -> list[Any]:
    """Return what data with a state are made of: the data sets and nodes in them, and lists and dicts of such."""
    if isinstance(data, Mapping):
        return list(itertools.islice(data.values(), MIXED))
    if isinstance(data, list | tuple):
        return list(itertools.islice(data, MIXED))
    is_made_of_parts = _keeps_state(data) or type(data).__module__.partition(".")[0] in ("datasets", "torchdata")
    return list(vars(data).values()) if is_made_of_parts and hasattr(data, "__dict__") else []


def pack(value: Any, where: str) -> Any:
    """Return a state as JSON values, with the bytes of tensors and arrays in them.

    Raises ``UsageError`` for a value that cannot be kept; ``where`` names it.

    >>> unpack(pack({"at": 3, "random": torch.tensor([1, 2])}, "the state"))
    {'at': 3, 'random': tensor([1, 2])}
    """

    def written(found: Any) -> list[Any] | None:
        if isinstance(found, torch.Tensor):
            flat = found.detach().cpu().contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return ["tensor", codec.dtype_name(found.dtype), list(found.shape), base64.b64encode(content).decode()]
        if isinstance(found, np.ndarray | np.generic) and not found.dtype.hasobject:
            array = np.asarray(found)
            return ["array", array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]
        return None

    return codec.encode(value, written, where)


def unpack(node: Any) -> Any:
    """Return the value that was packed."""

    def read(content: list[Any]) -> Any:
        kind, dtype, shape, text = content
        data = bytearray(base64.b64decode(text))
        if kind == "array":
            return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
        if not data:
            return torch.empty(shape, dtype=codec.dtype_of(dtype))
        return torch.frombuffer(data, dtype=torch.uint8).view(codec.dtype_of(dtype)).reshape(shape).clone()

    return codec.decode(node, read)
