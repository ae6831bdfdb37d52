"""``Stream``: a user's settings of data that are read one after the other, from shards."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from torch.utils.data import IterableDataset

from holdfast.checks import by_name, to_whole
from holdfast.data.fetch import refuse_loader
from holdfast.errors import UsageError
from holdfast.words import a_kind

Positions = Literal["auto", "state", "count"]


@by_name
@dataclass(frozen=True, eq=False)
class Stream:
    """Settings of data that come from shards, each of which is read from its begin to its end.

    - ``source``: a function that opens a shard: ``source(shard)`` returns an iterable of samples. If it has an argument
      called ``epoch``, it also gets the number of the pass over the data. Or an ``IterableDataset``, of torch, of
      Hugging Face, or any other object that can be iterated over again and again.
    - ``shards``: what ``source`` is called with, such as the paths of files; a number n means 0 to n - 1. For an
      ``IterableDataset`` of torch, the number of parts into which it cuts itself by ``get_worker_info()``. None: the
      shards of a Hugging Face data set, and 1 for others.
    - ``epochs``: passes over the data, after which the run's steps end. None: there is no end, and all steps are full.
    - ``shuffle``: whether each pass has an order of shards of its own, drawn from the run's seed.
    - ``positions``: how a position in a shard is kept. "state": by the ``state_dict`` of what ``source`` returns.
      "count": by the number of samples that were taken, which are skipped when the shard is opened again. "auto": by
      the state where there is one that is exact.

    Raises ``UsageError`` for values that are none of these.

    >>> stream = Stream(lambda shard: iter(range(shard)), shards=[2, 3])
    >>> list(stream.open(1, epoch=0)), stream.name(1)
    ([0, 1, 2], 'shard 1')
    """

    source: Any = field(repr=False)
    _: KW_ONLY
    shards: Sequence[Any] | int | None = None
    epochs: int | None = None
    shuffle: bool = False
    positions: Positions = "auto"

    def __post_init__(self) -> None:
        self._refuse_sources()
        if self.epochs is not None:
            object.__setattr__(self, "epochs", to_whole("epochs", self.epochs, least=1))
        if not isinstance(self.shuffle, bool):
            raise UsageError(f"shuffle={self.shuffle!r} is neither True nor False", hint="a seed is given to the Run")
        if self.positions not in ("auto", "state", "count"):
            raise UsageError(f"positions={self.positions!r} is not known", hint="'auto', 'state' or 'count'")
        object.__setattr__(self, "shards", self._shards())

    def _refuse_sources(self) -> None:
        source = self.source
        refuse_loader(source)
        if isinstance(source, Iterator) and not hasattr(source, "state_dict"):
            raise UsageError(
                f"{a_kind(source)} can be read only once",
                hint="give a function that opens a shard: Stream(open_shard, shards=[…])",
            )
        if not self._is_function and not isinstance(source, Iterable | IterableDataset):
            raise UsageError(
                f"{a_kind(source)} is no stream", hint="as in Stream(open_shard, shards=['a.txt', 'b.txt'])"
            )

        if self._is_function and not _takes_a_shard(source):
            raise UsageError(
                f"a function that opens shards is called with one shard; this one takes {inspect.signature(source)}",
                hint="as in: def open_shard(path): …",
            )

    @property
    def _is_function(self) -> bool:
        return callable(self.source) and not isinstance(self.source, Iterable | IterableDataset)

    @property
    def _cuts_itself(self) -> bool:
        """Whether it is a Hugging Face data set, which has shards."""
        return hasattr(self.source, "shard") and hasattr(self.source, "num_shards")

    def _shards(self) -> Sequence[Any]:
        """Return the shards as a sequence. Raises ``UsageError`` if there are none."""
        given = self.shards
        if given is None:
            if self._is_function:
                raise UsageError("a function that opens shards needs shards=", hint="as in shards=['a.txt', 'b.txt']")
            return range(int(self.source.num_shards) if self._cuts_itself else 1)
        if isinstance(given, bool) or not isinstance(given, int | Sequence) or isinstance(given, str | bytes):
            raise UsageError(f"shards={given!r} is no list of shards", hint="a list, or how many there are")
        found = range(given) if isinstance(given, int) else given
        if not len(found):
            raise UsageError("the stream has no shards", hint="check the pattern of files, or their folder")
        if isinstance(found, range) or self._is_function:
            return found
        raise UsageError("a data set takes a number of shards", hint="a list is for a function that opens them")

    @classmethod
    def of(cls, given: Any) -> Stream:
        """Return the stream that a user means: itself, or one of an iterable data set."""
        return given if isinstance(given, Stream) else cls(given)

    @staticmethod
    def is_meant(given: Any) -> bool:
        """Return whether a user means a stream by this data set.

        >>> Stream.is_meant([1, 2]), Stream.is_meant(range), Stream.is_meant({1, 2}), Stream.is_meant(iter([1]))
        (False, False, True, True)
        """
        if isinstance(given, Stream | IterableDataset):
            return True
        return isinstance(given, Iterable) and not hasattr(given, "__getitem__")

    @property
    def count(self) -> int:
        """The number of shards."""
        assert isinstance(self.shards, Sequence)
        return len(self.shards)

    def name(self, shard: int) -> str:
        """Return the name of a shard, for people."""
        assert isinstance(self.shards, Sequence)
        value = self.shards[shard]
        return os.fspath(value) if isinstance(value, str | os.PathLike) else f"shard {shard}"

    def open(self, shard: int, *, epoch: int) -> Any:
        """Return a shard's samples, as an iterable that begins with the first. ``shard``: its number."""
        assert isinstance(self.shards, Sequence)
        if self._is_function:
            given = {"epoch": epoch} if _takes_epoch(self.source) else {}
            return self.source(self.shards[shard], **given)
        if self._cuts_itself:
            part = self.source.shard(num_shards=self.count, index=shard)
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            return part
        # An object that keeps its position would go on where it was left: each opening gets one that was never read.
        fresh = _never_read(self.source) if hasattr(self.source, "state_dict") else self.source
        if hasattr(fresh, "set_epoch"):
            fresh.set_epoch(epoch)
        return fresh

    @property
    def is_cut_by_worker(self) -> bool:
        """Whether the data set cuts itself into shards as it does for the workers of torch's ``DataLoader``."""
        return self.count > 1 and not self._is_function and not self._cuts_itself


def _never_read(source: Any) -> Any:
    """Return a copy of an object that keeps its position. Raises ``UsageError`` if it cannot be copied.

    Modules that it refers to are shared, as torchdata's ``Mapper`` refers to ``torch.multiprocessing``.
    """
    modules = {id(module): module for module in list(sys.modules.values())}
    try:
        return copy.deepcopy(source, modules)
    except Exception as e:
        raise UsageError(
            f"{a_kind(source)} keeps its position, and cannot be copied to be read from its begin: {e}",
            hint="give a function that makes it: Stream(lambda shard: make(), shards=1)",
        ) from e


def _takes_a_shard(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, **({"epoch": 0} if _takes_epoch(function) else {}))
    except TypeError:
        return False
    except ValueError:  # a function of C has no signature
        pass
    return True


def _takes_epoch(function: Callable[..., Any]) -> bool:
    try:
        return "epoch" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C has no signature
        return False
