"""Communication between the ranks that save or load together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store

from holdfast.errors import CheckpointError

T = TypeVar("T")
SHORT = 1024  # bytes of a text that are sent with its length, in one message: most texts are shorter
TIMEOUT = timedelta(minutes=30)  # for a rank that is alive but silent, as while it writes; a dead one shows at once


class Ranks(Protocol):
    """The ranks that save or load together. All must call ``exchange`` equally often; it raises if one is lost."""

    rank: int
    size: int

    def exchange(self, text: bytes) -> list[bytes]:
        """The texts of all ranks, in the order of the ranks."""


class Alone:
    """The only rank of a script without process groups.

    >>> Alone().exchange(b"mine")
    [b'mine']
    """

    rank = 0
    size = 1

    def exchange(self, text: bytes) -> list[bytes]:
        """The text alone."""
        return [text]


class Gloo:
    """The ranks of a ``torch.distributed`` group, over a Gloo group of their own.

    A group of their own, because our messages must not mix with the script's collectives. ``timeout``: of one exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta = TIMEOUT) -> None:
        members = " ".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # Not dist.new_group: it finds the other members by counting the groups that each rank has made. Where the
        # counts differ, as in a pipeline whose stages have meshes of their own, the members would wait for ever.
        _made[members] += 1
        store = PrefixStore(f"holdfast/{members}/{_made[members]}", _get_default_store())
        # Collective: every member of the group has to come here together.
        self._group: Any = ProcessGroupGloo(store, self.rank, self.size, timeout=timeout)

    def exchange(self, text: bytes) -> list[bytes]:
        """The texts of all ranks; ``RuntimeError`` if one is lost or silent for long."""
        begins = self._gather(len(text).to_bytes(8, "little") + text[:SHORT], 8 + SHORT)
        lengths = [int.from_bytes(begin[:8], "little") for begin in begins]
        rest = max(lengths) - SHORT
        ends = self._gather(text[SHORT:], rest) if rest > 0 else [b""] * self.size
        return [(begin[8:] + end)[:n] for begin, end, n in zip(begins, ends, lengths, strict=True)]

    def _gather(self, text: bytes, size: int) -> list[bytes]:
        """The texts of all ranks, each filled up to the same size."""
        mine = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        all_texts = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([all_texts], [mine]).wait()
        return [theirs.numpy().tobytes() for theirs in all_texts]


class Distributed(Gloo):
    """The ranks of a script's group that save or load together."""

    def exchange(self, text: bytes) -> list[bytes]:
        """The texts of all ranks; ``CheckpointError`` if one is lost or silent for long."""
        try:
            return super().exchange(text)
        except RuntimeError as e:  # Gloo's error for a broken connection and for a timeout
            raise CheckpointError(f"a rank was lost or does not answer: {e}") from e


_made: Counter[str] = Counter()
_known: dict[int, tuple[object, Distributed]] = {}


def current(group: dist.ProcessGroup | None = None) -> Ranks:
    """The ranks of a process group, of the script's default one, or this process alone."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    chosen = group or dist.group.WORLD
    if dist.get_world_size(chosen) == 1:
        return Alone()
    if id(chosen) not in _known or _known[id(chosen)][0] is not chosen:
        _known[id(chosen)] = (chosen, Distributed(group))
    return _known[id(chosen)][1]


def together(ranks: Ranks, doing: str, work: Callable[[], T]) -> T:
    """Does the work on every rank and returns its result; if it fails on one, it raises on all of them.

    ``doing`` is a verb for the error of the others: "rank 1 could not save: …". Without this, the others would wait for
    a rank that has left.

    >>> together(Alone(), "count", lambda: 1 + 1)
    2
    """
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as e:  # Ctrl-C, too: the others must not wait for this rank
        error = e
    text = "" if error is None else str(error) or repr(error)
    said = ranks.exchange(text.encode(errors="replace"))
    if error is not None:
        raise error
    for rank, theirs in enumerate(said):
        if theirs:
            raise CheckpointError(f"rank {rank} could not {doing}: {theirs.decode()}")
    return result
