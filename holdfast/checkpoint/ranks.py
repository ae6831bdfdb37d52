"""How the workers that save or load together tell each other what they have."""

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
TIMEOUT = timedelta(minutes=30)  # for a rank that is alive and silent; one that dies is noticed at once


class Ranks(Protocol):
    """Those who save together. All must call ``exchange`` equally often; it raises if somebody is lost."""

    rank: int
    size: int

    def exchange(self, text: bytes) -> list[bytes]:
        """Everybody's text, in the order of the ranks."""


class Alone:
    """A script without process groups.

    >>> Alone().exchange(b"mine")
    [b'mine']
    """

    rank = 0
    size = 1

    def exchange(self, text: bytes) -> list[bytes]:
        return [text]


class Distributed:
    """The ranks of a ``torch.distributed`` group, over a Gloo group of their own.

    Theirs alone, because a save in the background must not get between the script's collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        members = " ".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # Not new_group: among some of the ranks, it finds the others by the number of groups that each is in.
        # Where that differs, as in a pipeline whose stages have meshes of their own, they would wait for ever.
        _made[members] += 1
        store = PrefixStore(f"holdfast/{members}/{_made[members]}", _get_default_store())
        # Collective: every member of the group has to come here together.
        self._group: Any = ProcessGroupGloo(store, self.rank, self.size, timeout=TIMEOUT)

    def exchange(self, text: bytes) -> list[bytes]:
        try:
            return self._exchange(text)
        except RuntimeError as e:  # what Gloo says when a connection breaks, or nobody speaks for long
            raise CheckpointError(f"a rank was lost or does not answer: {e}") from e

    def _exchange(self, text: bytes) -> list[bytes]:
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = len(text)
        self._group.allreduce([lengths]).wait()
        longest = int(lengths.max())
        if not longest:
            return [b""] * self.size
        mine = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        all_texts = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([all_texts], [mine]).wait()
        return [theirs[: int(n)].numpy().tobytes() for theirs, n in zip(all_texts, lengths, strict=True)]


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
    """Does the work here; if it fails anywhere, it fails everywhere, and nobody waits for the others.

    >>> together(Alone(), "count", lambda: 1 + 1)
    2
    """
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as e:  # also Ctrl-C: the others must not wait for us
        error = e
    text = "" if error is None else str(error) or repr(error)
    said = ranks.exchange(text.encode(errors="replace"))
    if error is not None:
        raise error
    for rank, theirs in enumerate(said):
        if theirs:
            raise CheckpointError(f"rank {rank} could not {doing}: {theirs.decode()}")
    return result
