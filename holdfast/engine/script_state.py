"""The script's own state, ``run.state``: values that workers which join, and runs that resume, get as they are.

A worker's script runs from its start, whenever the worker comes. Where it enters the training, it takes the state that
the others have there. It may first pass loops that are over: after each of them it has the values that were
remembered at that loop's end, so that its code between loops decides as the others' code did.

*Told* is the state at a boundary between two steps, where joiners come in. A member that has left the boundary may
still be asked for it: another worker was lost meanwhile, and the joiner still waits. By then the member's script may
have changed its values, and the joiner's script will make the same changes. So the state is *kept* at a boundary where
workers regroup, until the first vote shows that nobody waits there any more. In the same way it is kept at the end of
a loop, for a checkpoint that is taken later: a rerun of the script runs the code behind the loop again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.engine.plain import copied, objects_in, plain, shared_in, size_of, taken
from holdfast.errors import UsageError
from holdfast.words import a_kind

SMALL = 4096  # bytes up to which a value is remembered at the end of each loop: every checkpoint has them all


@dataclass(frozen=True, kw_only=True)
class Told:
    """A copy of the state, and the loop in which it was taken."""

    values: dict[str, Any]
    loop: str

    def to_json(self) -> dict[str, Any]:
        """Return the copy as plain values, for ``Told(**values)``."""
        return dict(vars(self))


class NoSuchState(UsageError, KeyError):
    """The script asks for a key that ``Run(state=…)`` does not have. ``in`` and ``get`` need a KeyError."""

    __str__ = BaseException.__str__  # KeyError's own shows the quotes of a string


class ScriptState(MutableMapping[str, Any]):
    """The values of ``Run(state=…)`` by key. The script changes them on every worker alike.

    Keys are those that it was made with. Objects with a ``state_dict`` stay where they are; their content may change.
    Raises ``UsageError`` for a value that cannot be kept.

    >>> state = ScriptState({"best": 1.0, "seen": []})
    >>> state["best"] = 0.5; state["seen"].append(3); dict(state)
    {'best': 0.5, 'seen': [3]}
    """

    # Names of its own, so that ``run.state.best = 1`` is noticed: it would be kept by nobody.
    __slots__ = (
        "_after_loop", "_at_boundary", "_boundaries", "_heard", "_is_waiting", "_keys", "_objects", "_values", "loop",
    )  # fmt: skip

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise UsageError(f"state is {a_kind(given)}", hint="a dict, as in {'best': float('inf')}")
        for key in given:
            if not isinstance(key, str):
                raise UsageError(f"the key {key!r} of state is {a_kind(key)}", hint="a string")
        # The script's own dict, if it is one: what is changed through it counts too.
        self._values: dict[str, Any] = given if isinstance(given, dict) else dict(given)
        self._keys = tuple(self._values)
        for key, value in self._values.items():
            if isinstance(value, np.generic):
                self._values[key] = value.item()
            plain(self._values[key], f"state[{key!r}]")  # refuses what ``objects_in`` would follow without end
        self._objects = {key: frozenset(objects_in(value)) for key, value in self._values.items()}
        self.loop = ""  # the loop that the script is in, or has left last
        self._is_waiting = False  # the script waits at a boundary, and will take over what it hears there
        self._heard: Told | None = None  # what it was told, until the script is where the others were
        self._at_boundary: Told | None = None
        self._after_loop: Told | None = None
        self._boundaries = 0  # that the script has waited at
        self.plain()

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise NoSuchState(f"run.state has no {key!r}", hint="give it a first value: Run(state={…})")
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values!r})"

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._keys:
            raise NoSuchState(f"run.state has no {key!r}", hint="give it a first value: Run(state={…})")
        value = value.item() if isinstance(value, np.generic) else value  # on every worker, not only on those that join
        self._checked(key, value)
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        raise UsageError(f"run.state keeps {key!r}", hint="give it another value, such as None")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__slots__:
            raise UsageError(f"run.state has no attributes such as {name!r}", hint=f"run.state[{name!r}] = …")
        super().__setattr__(name, value)

    def __ior__(self, values: Mapping[str, Any]) -> ScriptState:
        self.update(values)
        return self

    def _checked(self, key: str, value: Any) -> Any:
        """Return the plain form of a value. Raises ``UsageError`` if a joiner could not take it over."""
        found = plain(value, f"state[{key!r}]")
        objects = frozenset(objects_in(value))
        if objects != self._objects[key]:
            place = min(objects ^ self._objects[key])
            raise UsageError(
                f"state[{key!r}]{place} is an object with a state_dict now and was none before, or the reverse",
                hint="give such objects in Run(state={…}), where every worker makes them, and keep them there",
            )
        return found

    # --- for joiners, checkpoints and hashes -----------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Return the present values in plain form. Raises ``UsageError`` for what cannot be kept."""
        if self._values.keys() - set(self._keys) or len(self._values) < len(self._keys):
            wrong = min(self._values.keys() ^ set(self._keys))
            raise UsageError(
                f"the dict of Run(state=) has got or lost {wrong!r}", hint="give all keys when the Run is made"
            )
        found = {key: self._checked(key, self._values[key]) for key in self._keys}
        if shared := shared_in(self._values):
            raise UsageError(
                f"{shared[0]} and {shared[1]} are the same object, and would be two on a worker that joins",
                hint="give one of them a copy: list(…), dict(…), tensor.clone()",
            )
        return found

    def told(self) -> dict[str, Any] | None:
        """Return the state for workers that join, to be sent as it is; None if there is none.

        A worker that has itself just heard it tells on what it heard: its script may not have come so far.
        """
        if not self._keys:
            return None
        return (self._heard or self._at_boundary or self._copy()).to_json()

    def saved(self) -> dict[str, Any]:
        """Return the values for a checkpoint: as they are in a loop, or were at the end of the last one."""
        return self.plain() if self._after_loop is None else self._after_loop.values

    def _copy(self) -> Told:
        return Told(values=copied(self.plain()), loop=self.loop)

    def hear(self, told: Mapping[str, Any] | None) -> None:
        """Take in what ``told`` returned on another worker. A script that does not wait has its own values."""
        if told is not None and self._is_waiting:
            self._heard = Told(**told)

    def restore(self, values: Mapping[str, Any], loop: str) -> list[str]:
        """Take in a checkpoint's values; return in words what it lacks, and what has no place here any more."""
        if not self._is_waiting:
            return []
        known = {key: value for key, value in values.items() if key in self._keys}
        self._heard = Told(values=known, loop=loop)
        added = [f"it has no state {key!r}, which begins with the script's value" for key in self if key not in values]
        gone = [f"its state {key!r} is not in Run(state=), and is left out" for key in values if key not in self._keys]
        return added + gone

    def go_back(self, values: Mapping[str, Any]) -> None:
        """Take these values again, which ``plain`` has given, and which were copied since."""
        self._take(values)

    # --- where the script is ---------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether the script waits at a boundary, and takes over what it hears there."""
        return self._is_waiting

    @contextmanager
    def waiting(self, *, regroups: bool) -> Iterator[None]:
        """Wait at a boundary. ``regroups``: workers may join there.

        Raises ``UsageError`` for what cannot be kept. Boundaries 1, 2, 4, 8 and so on look for it too: else a value
        that the script has put into a list would end the run when the first worker is lost.
        """
        self._boundaries += 1
        if regroups and self._keys:
            self._at_boundary = self._copy()
        elif self._boundaries.bit_count() == 1:
            self.plain()
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def nobody_waits(self) -> None:
        """Forget the state at the last boundary: a vote has shown that all workers have left it."""
        self._at_boundary = None

    def enter(self, loop: str) -> None:
        """Note that the script comes to a loop."""
        self.loop = loop
        self._after_loop = None

    def catch_up(self, *, trains: bool, remembered: Mapping[str, Any] | None) -> None:
        """Take over what was heard at this loop's boundary, or before.

        ``trains``: this loop has steps to make. ``remembered``: what ``end`` returned when a loop that is over ended.
        """
        heard = self._heard
        if heard is None:
            return
        self._take(heard.values)
        if trains or heard.loop == self.loop or remembered is None:
            self._heard = None
            if self._at_boundary is not None:  # a copy of what the script had before it heard
                self._at_boundary = heard
        else:
            self._take(remembered)

    def end(self) -> dict[str, Any]:
        """Keep the state at the end of a loop; return the values that are small enough to be remembered."""
        if not self._keys:
            return {}
        self._after_loop = copy = self._copy()
        small = [key for key in self._keys if not self._objects[key] and size_of(copy.values[key]) <= SMALL]
        return {key: copied(copy.values[key]) for key in small}

    def _take(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._values[key] = taken(self._values[key], value, f"state[{key!r}]")
