"""An unpickler that pays for what it makes: each instruction has a price, and each byte that is read earns some."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar

from holdfast.checkpoint.formats.archive import DAMAGED
from holdfast.checkpoint.formats.budget import Budget, check_number
from holdfast.checkpoint.formats.rebuild import PickleRefused

# Where on the stack the keys are that an instruction is about to put into a dict or set, and so to hash.
_KEYS = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(0, None, 2),
    pickle.DICT: slice(0, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
_LINE = 1 << 20  # bytes of a line in a pickle of the oldest kind: a name, a number or a text
# Bytes of memory for what an instruction makes. Those that are not here make nothing, or push a few bytes.
_COSTS = {
    **dict.fromkeys((pickle.MARK, pickle.EMPTY_LIST, pickle.LIST, pickle.EMPTY_DICT, pickle.DICT), 72),
    **dict.fromkeys(
        (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.GLOBAL, pickle.STACK_GLOBAL), 64
    ),
    **dict.fromkeys((pickle.EMPTY_SET, pickle.FROZENSET), 224),
    **dict.fromkeys((pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE), 80),
    **dict.fromkeys((pickle.PERSID, pickle.BINPERSID), 400),
}
_NUMBERS = (pickle.INT, pickle.LONG, pickle.LONG1, pickle.LONG4)


class _Meter:
    """A stream for an unpickler: each byte that is read earns some budget, and no read asks for more than there is."""

    def __init__(self, stream: BinaryIO, budget: Budget) -> None:
        self._stream, self._budget = stream, budget

    def read(self, size: int) -> bytes:
        """So many bytes, or fewer at the end."""
        parts = []
        while size > 0:  # in steps: Python would claim as much memory as a file asks for, before it reads
            parts.append(self._stream.read(min(size, _LINE)))
            size -= len(parts[-1])
            if not parts[-1]:
                break
        found = parts[0] if len(parts) == 1 else b"".join(parts)
        self._budget.earn(len(found))
        return found

    def readline(self) -> bytes:
        """The next line."""
        found = self._stream.readline(_LINE)
        if len(found) == _LINE:
            raise PickleRefused("its pickle has a line that does not end", DAMAGED)
        self._budget.earn(len(found))
        return found


Load = Callable[[Any], None]  # what an unpickler does for one instruction


def _paid(load: Load, cost: Callable[[Any], None]) -> Load:
    def paid(unpickler: Any) -> None:
        cost(unpickler)
        load(unpickler)

    return paid


def _metered(dispatch: dict[int, Load]) -> dict[int, Load]:
    """The instructions of an unpickler, each with its price."""
    made = dict(dispatch)

    def price(code: bytes, cost: Callable[[Any], None]) -> None:
        made[code[0]] = _paid(made[code[0]], cost)

    def number(load: Load) -> Load:
        def checked(unpickler: Any) -> None:
            load(unpickler)
            check_number(unpickler.stack[-1])

        return checked

    def refuse(unpickler: Any) -> None:
        raise PickleRefused("it holds a bytearray or a buffer, which is no plain data")

    for code, cost in _COSTS.items():
        price(code, lambda unpickler, cost=cost: unpickler.budget.spend(cost))  # type: ignore[misc]
    for code, keys in _KEYS.items():
        price(code, lambda unpickler, keys=keys: unpickler.budget.keys(unpickler.stack[keys]))  # type: ignore[misc]
    for code in _NUMBERS:
        made[code[0]] = number(made[code[0]])
    price(pickle.REDUCE, lambda unpickler: unpickler.budget.call(unpickler.stack[-2], unpickler.stack[-1]))
    price(pickle.NEWOBJ, lambda unpickler: unpickler.budget.call(unpickler.stack[-2], unpickler.stack[-1]))
    price(pickle.NEWOBJ_EX, lambda unpickler: unpickler.budget.call(unpickler.stack[-3], unpickler.stack[-2]))
    price(pickle.OBJ, lambda unpickler: unpickler.budget.call(unpickler.stack[0], unpickler.stack[1:]))
    price(pickle.INST, lambda unpickler: unpickler.budget.call(None, unpickler.stack))
    price(pickle.BUILD, lambda unpickler: unpickler.budget.state(unpickler.stack[-1]))
    made[pickle.BYTEARRAY8[0]] = made[pickle.NEXT_BUFFER[0]] = refuse
    return made


class MeteredUnpickler(pickle._Unpickler):
    """An unpickler with a budget; :meth:`find_class` and :meth:`persistent_load` are for a subclass to allow.

    Based on the one in Python: in the faster one in C, a pickle of ten bytes can claim 64 GB for its memo.
    """

    dispatch: ClassVar = _metered(pickle._Unpickler.dispatch)

    def __init__(self, stream: BinaryIO, budget: Budget) -> None:
        super().__init__(_Meter(stream, budget))
        self.budget = budget
