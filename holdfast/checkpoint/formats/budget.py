"""Limits on what a foreign pickle may cost: memory for its objects, work for its keys, bytes that its tensors claim.

A pickle of a few bytes can ask for a list to be copied a thousand times, or for one tensor under a million names. Every
instruction that makes something is charged here, about as much as Python needs for it; what may be spent grows with
the bytes of pickle that were read. So a file costs memory and time in proportion to its own size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.checkpoint.formats.rebuild import Call, PickleRefused, Stub, key_parts

PER_BYTE = 150  # bytes of objects for each byte of pickle; the hungriest honest one (a list of empty dicts) needs 140
FREE = 4 << 20  # bytes of objects that any file may take, for files of a few bytes
REPEATED = 16  # how many times a file's size its tensors may add up to; tied weights and second copies need 2 or 3
EXPANDED = 256 << 20  # bytes that tensors may add up to beyond that: ``expand`` repeats a small storage
INT_BITS = 4096  # of a number; Python takes a time that grows with the square to show longer ones
TWINS = 100  # keys of dicts with the same hash, but not equal: a dict compares each with each
_CONTAINER = 128  # bytes for an item of what is copied: an entry of a dict needs the most
_SHARED_TYPES = (str, bytes, float, bool, type(None), Stub)  # hashes that no file can choose, or hardly ever equal


class Budget:
    """The budget of one file of ``file`` bytes. Whatever takes from it raises ``PickleRefused`` when it is used up.

    >>> budget = Budget()
    >>> budget.earn(10)
    >>> budget.left == FREE + 10 * PER_BYTE
    True
    """

    def __init__(self, file: int = 0) -> None:
        self.left = FREE
        self._claims = REPEATED * file + EXPANDED
        self._twins: dict[int, list[Any]] = {}

    def earn(self, read: int) -> None:
        """Adds what so many bytes of a pickle are worth."""
        self.left += read * PER_BYTE

    def spend(self, bytes: int) -> None:
        """Takes memory off the budget."""
        self.left -= bytes
        if self.left < 0:
            raise PickleRefused(
                f"its pickle repeats its own parts: it would take over {PER_BYTE} bytes of memory for each of its own",
                "do not trust this file, or save it again without objects that repeat each other",
            )

    def claim(self, bytes: int) -> None:
        """Notes bytes that tensors have, counted anew under each of their names."""
        self._claims -= bytes
        if self._claims < 0:
            raise PickleRefused(
                f"its tensors claim over {REPEATED} times as many bytes as the file has",
                "do not trust this file, or save it again with .contiguous() and without second names",
            )

    def call(self, function: Any, args: Iterable[Any]) -> None:
        """Pays for a call, which may copy what its arguments hold."""
        cost = 256
        reads_text = isinstance(function, Call) or (isinstance(function, type) and issubclass(function, Stub))
        for arg in args:
            cost += 8
            if isinstance(arg, list | tuple | dict | set | frozenset):
                cost += _CONTAINER * len(arg)
            elif isinstance(arg, str | bytes):
                cost += (4 if reads_text else _CONTAINER) * len(arg)
        self.spend(cost)

    def state(self, state: Any) -> None:
        """Pays for the state that an object is given; a numpy array copies its bytes."""
        parts = state if isinstance(state, tuple) else ()
        self.spend(64 + sum(4 * len(part) for part in parts if isinstance(part, str | bytes)))

    def keys(self, keys: Iterable[Any]) -> None:
        """Pays for keys of a dict or members of a set; refuses those that take long to hash, or have equal hashes."""
        for key in keys:
            if isinstance(key, str):
                continue
            self.spend(16 * key_parts(key))
            if isinstance(key, _SHARED_TYPES) or (isinstance(key, int) and -(1 << 60) < key < 1 << 60):
                continue
            alike = self._twins.setdefault(hash(key), [])
            if key not in alike:
                alike.append(key)
                self.spend(200)
                if len(alike) > TWINS:
                    raise PickleRefused("its pickle has keys of dicts that were made to have the same hash")


def check_number(value: int) -> None:
    """Refuses a number that would take long to show."""
    if value.bit_length() > INT_BITS:
        raise PickleRefused(f"it holds a number of {value.bit_length()} bits, which nothing in a checkpoint has")
