"""Frozen weights in a load with ``trainable_only``: they are the script's own, and compared with those of the save."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.checkpoint.digests import digests
from holdfast.checkpoint.held import Held
from holdfast.checkpoint.pieces import Catalogue, path_of
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.trees import some
from holdfast.errors import CheckpointError

HINT = "make the base as it was then, the same weights; or load without trainable_only if the checkpoint has them"
logger = logging.getLogger(__name__)


class FrozenCheck:
    """A comparison of the frozen weights here with the digests in a checkpoint."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._held: dict[str, Held] = {}
        self.uncompared: list[str] = []  # boxes that this rank does not hold whole, as texts

    def add(self, name: str, held: Held) -> None:
        """Compares one more tensor: what this rank holds of it."""
        self._held[name] = held

    def carry_out(self) -> None:
        """Compares everything. Raises ``CheckpointError`` that names what differs."""
        root = self._catalogue.root
        tasks, known = [], []
        for name, held in self._held.items():
            saved = self._catalogue.digests[name]
            if (saved.shape, saved.dtype) != (held.shape, held.dtype):
                raise CheckpointError(
                    f"{root}: the frozen {name} was {saved.dtype} {saved.shape} and is {held.dtype} {held.shape}"
                )
            tasks += [(name, box) for box, _ in saved.boxes]
            known += [digest for _, digest in saved.boxes]
        found = digests(tasks, self._held)
        three = [*zip(tasks, known, found, strict=True)]
        self.uncompared = [f"{name} {box.offset}" for (name, box), _, mine in three if mine is None]
        changed = dict.fromkeys(name for (name, _), then, mine in three if mine not in (None, then))
        if changed:
            raise CheckpointError(
                f"{root}: the frozen weights are not those of the save: {some([*changed])} "
                f"{'differs' if len(changed) == 1 else 'differ'}",
                hint=HINT,
            )

    def report(self, ranks: Ranks) -> None:
        """Logs what no rank could compare, as each holds only a part of it. All ranks call it."""
        said = [json.loads(text) for text in ranks.exchange(json.dumps(self._missed()).encode())]
        if missed := nowhere(said):
            logger.warning(
                "%s: not compared with the save, as no rank holds the same part: %s", self._catalogue.root, some(missed)
            )

    def _missed(self) -> dict[str, list[str]]:
        return {"known": sorted(self._held), "missed": self.uncompared}


def left_out_of(catalogue: Catalogue, path: Sequence[Any]) -> list[str]:
    """The names of a module's frozen weights that the checkpoint does not hold."""
    return [found[-1] for found in map(path_of, catalogue.left_out) if found[:-1] == [str(key) for key in path]]


def nowhere(said: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    """The tensors with a part that no rank has compared; each rank says which tensors it knows, and what it missed.

    >>> nowhere([{"known": ["a"], "missed": ["a (0,)", "a (4,)"]}, {"known": ["a"], "missed": ["a (4,)"]}])
    ['a']
    """
    boxes = dict.fromkeys(text for one in said for text in one["missed"])
    names = {text: text.rpartition(" (")[0] for text in boxes}
    left = [t for t in boxes if all(t in one["missed"] for one in said if names[t] in one["known"])]
    return [*dict.fromkeys(names[text] for text in left)]
