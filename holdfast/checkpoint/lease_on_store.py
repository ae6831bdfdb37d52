"""The chain of a lease in an object store: each number is an object that is created once, under a condition.

What ``lease`` says of the chain holds here, with a simpler reason: a store creates an object under the condition
``If-None-Match: *`` for one writer only, and neither its lists nor its objects are ever old.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.checkpoint.disk import explained
from holdfast.checkpoint.lease import Chain
from holdfast.checkpoint.places import Place, Remote


def chain_of(root: Place) -> Chain:
    """The lease of a run's folder, wherever that is."""
    return StoreChain(root) if isinstance(root, Remote) else Chain(root)


class StoreChain(Chain):
    """The objects of a lease in the folder of a run."""

    folder: Remote

    def prepare(self) -> None:
        """Make sure that the store keeps conditions. Raises ``CheckpointError`` if not, or if it cannot be written."""
        with explained(self.folder, "write"):
            self.folder.store.refuse_if_unfit(self.folder)

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        yield

    def _create(self, place: Place, text: bytes) -> bool:
        assert isinstance(place, Remote)
        return place.create(text)

    def _content(self, place: Place) -> bytes:
        assert isinstance(place, Remote)
        return place.read_bytes()

    def _names(self) -> list[str]:
        try:
            return [place.name for place in self.folder.iterdir()]
        except FileNotFoundError:
            raise OSError(errno.ENXIO, f"there is no bucket {self.folder.bucket}") from None
