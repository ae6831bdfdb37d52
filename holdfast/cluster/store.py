"""The store in which the members of one generation leave their addresses for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import Broken


class GenerationStore:
    """Values that the members of one generation push to each other. ``push`` sends one through the coordinator."""

    def __init__(self, push: Callable[[str, bytes], None]) -> None:
        self._push = push
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.closed = False

    def put(self, key: str, value: bytes) -> None:
        """Keep a value, and push it to the other members."""
        self.arrived(key, value)
        self._push(key, value)

    def take(self, key: str) -> bytes:
        """Wait for a value and return it. Raises ``Broken`` once the generation is over."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self.closed)
            if key not in self._values:
                raise Broken("the generation ended while it formed")
            return self._values[key]

    def arrived(self, key: str, value: bytes) -> None:
        """Keep a value that another member has pushed."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Free everybody who waits: the generation is over."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
