"""Values that differ from rank to rank: each rank saves its own, and gets its own back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.pieces import PER_RANK


@dataclass(frozen=True, kw_only=True, eq=False)
class PerRank:
    """Mark of a value in a tree to save or load that each rank has for itself. ``per_rank`` makes it."""

    value: Any


def per_rank(value: Any) -> PerRank:
    """Marks a value that each rank has for itself, such as the state of a random generator.

    In ``save``, each rank saves its own. In ``load``, each rank gets back what the rank of its number saved, in the
    place of the mark. A rank without a saved value, as there are more ranks than at the save, keeps the value that it
    has given. Values of ranks that are no more are left out. The value is anything that can be saved: tensors (filled
    in place), numbers, texts, and containers of them.

    >>> import tempfile, torch
    >>> from holdfast.checkpoint import load, save
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, {"rng": per_rank(torch.get_rng_state()), "seen": per_rank([3, "a"])})
    >>> state = load(folder, {"rng": per_rank(torch.get_rng_state()), "seen": per_rank([0, ""])})
    >>> torch.set_rng_state(state["rng"])
    >>> state["seen"]
    [3, 'a']
    """
    return PerRank(value=value)


def is_per_rank(node: Any) -> bool:
    """Whether a node of a checkpoint's tree holds the values of ranks."""
    values = node.get(PER_RANK) if isinstance(node, dict) and len(node) == 1 else None
    return isinstance(values, dict) and all(isinstance(key, str) and key.isdecimal() for key in values)
