"""The body of a ``Loop``'s step, which may run again from its top: what a broken one has changed is taken back."""

from __future__ import annotations

from typing import Any

from holdfast.engine.boundary import tensors_in
from holdfast.engine.plain import copied
from holdfast.engine.script_state import ScriptState
from holdfast.engine.update import Update
from holdfast.errors import UsageError

LARGE = 1 << 20  # bytes of a value from which it is not copied at each step: copying less takes no tenth of a ms

Marks = list[tuple[int, int]]


class Body:
    """The script's state, and the settings of its optimizers, as they were at the top of the body.

    A value of the state that is large is not copied then. It must not change before the last commit of the step.
    """

    def __init__(self, state: ScriptState, update: Update) -> None:
        self._state, self._update = state, update
        self._values: dict[str, Any] = {}  # copies of small values
        self._marks: dict[str, Marks] = {}  # of large ones: where their tensors are, and how often they were written
        self._groups: list[list[dict[str, Any]]] = []  # at the top, and after each commit

    def begin(self) -> None:
        """Note how things are: a step begins for the first time."""
        self._groups = [self._update.group_values()]
        self._values, self._marks = {}, {}
        for key, value in self._state.plain().items() if len(self._state) else ():
            tensors = tensors_in(value)
            if sum(tensor.nbytes for tensor in tensors) > LARGE:
                self._marks[key] = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
            else:
                self._values[key] = copied(value)

    def committed(self) -> None:
        """Note that an update of this step is committed. What it has changed in the optimizers' settings stays."""
        self._groups.append(self._update.group_values())

    def passed(self, part: int) -> None:
        """Bring the settings of the optimizers to where they were after a commit of this step. The first part is 1."""
        if part < len(self._groups):
            self._update.set_group_values(self._groups[part])

    def refuse_changes(self) -> None:
        """Raise ``UsageError`` if a value that was not copied has changed."""
        if not self._marks:
            return
        now = self._state.plain()
        for key, marks in self._marks.items():
            if marks != [(tensor.data_ptr(), tensor._version) for tensor in tensors_in(now[key])]:
                raise UsageError(
                    f"state[{key!r}] was changed before the last commit of a step, which may come again, and is too "
                    "large to be copied at each step",
                    hint="change it after the last step.commit(), if that gives a step",
                )

    def stop(self) -> None:
        """Note that the step is broken. What the rest of the body changes is taken back."""
        self.refuse_changes()
        if self._marks:
            now = self._state.plain()
            self._values |= {key: copied(now[key]) for key in self._marks}

    def take_back(self) -> None:
        """Bring everything to where it was at the top of the body."""
        self._state.go_back(self._values)
        self._update.set_group_values(self._groups[0])
