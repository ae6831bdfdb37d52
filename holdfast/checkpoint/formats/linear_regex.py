"""Regular expressions that come from a checkpoint, matched in a time that grows with the text alone.

DeepSpeed writes patterns of names into its files. Python's own engine tries one way after the other, and a
pattern such as ``(a+)+b`` has it try for years. Here all ways are followed at once, as sets of states: there is nothing
to go back to. Looking around and back is not possible so, and is refused; nobody does it in such patterns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from holdfast.errors import CheckpointError

STATES = 2000  # of a pattern: repetitions such as {1000} are written out
KNOWN = 20_000  # transitions between sets of states that are remembered

States = frozenset[int]
Test = Callable[[str], bool]
_CATEGORIES: dict[Any, Test] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_WORD: lambda one: one.isalnum() or one == "_",
    sre.CATEGORY_NOT_DIGIT: lambda one: not one.isdecimal(),
    sre.CATEGORY_NOT_SPACE: lambda one: not one.isspace(),
    sre.CATEGORY_NOT_WORD: lambda one: not (one.isalnum() or one == "_"),
}
_STARTS, _ENDS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING), (sre.AT_END, sre.AT_END_STRING)


@lru_cache(maxsize=1000)
def compiled(pattern: str) -> LinearPattern:
    """A pattern, ready to match; ``CheckpointError`` if it is no regular expression, or one that is not read here."""
    if not isinstance(pattern, str):
        raise CheckpointError(f"it has the pattern {pattern!r:.100}, which is no text")
    try:
        tree = parser.parse(pattern)
        if tree.state.flags & ~re.UNICODE:
            raise _refused(pattern)
        return LinearPattern(tree, pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _refused(pattern) from error


def _refused(pattern: str) -> CheckpointError:
    return CheckpointError(f"it has the pattern {pattern:.100}, which is too involved for a file's", hint="pass rules")


class LinearPattern:
    """A pattern as a graph: a state reads one character that passes a test, or leads to others without reading."""

    def __init__(self, tree: Any, pattern: str) -> None:
        self._pattern = pattern
        self._reads: dict[int, tuple[Test, int]] = {}  # state: its test, and the state after it
        self._leads: dict[int, list[tuple[Any, int]]] = {}  # state: (where in the text, or None for anywhere; state)
        self._count = 0
        self._known: dict[tuple[States, str], States] = {}
        start = self._state()
        self._end = self._sequence(tree, start)
        self._start = start

    def match(self, text: str) -> bool:
        """Whether the beginning of a text fits, as ``re.match`` says it.

        >>> compiled("a.*[0-9]+$").match("a.w1"), compiled("(a+)+b").match("a" * 5000)
        (True, False)
        """
        states = self._reached([self._start], first=True, last=not text)
        for place, one in enumerate(text, 1):
            if self._end in states or not states:
                break
            last = place == len(text)
            key = (states, one)
            found = None if last else self._known.get(key)
            if found is None:
                after = [
                    after
                    for state in states
                    if state in self._reads
                    for test, after in [self._reads[state]]
                    if test(one)
                ]
                found = self._reached(after, first=False, last=last)
                if not last and len(self._known) < KNOWN:
                    self._known[key] = found
            states = found
        return self._end in states

    def _reached(self, states: Iterable[int], *, first: bool, last: bool) -> States:
        """All states that can be reached without reading."""
        seen = set(states)
        stack = [*seen]
        while stack:
            for where, after in self._leads.get(stack.pop(), ()):
                there = where is None or (first and where in _STARTS) or (last and where in _ENDS)
                if there and after not in seen:
                    seen.add(after)
                    stack.append(after)
        return frozenset(seen)

    # --- the graph ---

    def _state(self) -> int:
        self._count += 1
        if self._count > STATES:
            raise _refused(self._pattern)
        return self._count

    def _lead(self, start: int, end: int, where: Any = None) -> int:
        self._leads.setdefault(start, []).append((where, end))
        return end

    def _sequence(self, items: Any, state: int) -> int:
        for operation, argument in items:
            state = self._item(operation, argument, state)
        return state

    def _item(self, operation: Any, argument: Any, start: int) -> int:
        """Adds what fits an item of a pattern, from a state on; returns the state after it."""
        if operation in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            end = self._state()
            between = self._lead(start, self._state())  # a state reads one thing
            self._reads[between] = _test(operation, argument), end
            return end
        if operation is sre.AT and argument in (*_STARTS, *_ENDS):
            return self._lead(start, self._state(), argument)
        if operation is sre.SUBPATTERN and not argument[1] and not argument[2]:
            return self._sequence(argument[3], start)
        if operation is sre.BRANCH:
            end = self._state()
            for way in argument[1]:
                self._lead(self._sequence(way, self._lead(start, self._state())), end)
            return end
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, items = argument
            return self._repeat(least, most, items, start)
        raise _refused(self._pattern)

    def _repeat(self, least: int, most: Any, items: Any, state: int) -> int:
        for _ in range(least):
            state = self._sequence(items, state)
        end = self._state()
        if most is sre.MAXREPEAT:
            again = self._lead(state, self._state())
            self._lead(self._sequence(items, again), again)
            return self._lead(again, end)
        for _ in range(most - least):
            self._lead(state, end)
            state = self._sequence(items, state)
        return self._lead(state, end)


def _test(operation: Any, argument: Any) -> Test:
    """The test of a single character."""
    if operation is sre.ANY:
        return lambda one: one != "\n"
    if operation is sre.LITERAL:
        return lambda one: ord(one) == argument
    if operation is sre.NOT_LITERAL:
        return lambda one: ord(one) != argument
    negated = any(kind is sre.NEGATE for kind, _ in argument)
    tests = [_member(kind, value) for kind, value in argument if kind is not sre.NEGATE]
    return lambda one: any(test(one) for test in tests) is not negated


def _member(kind: Any, value: Any) -> Test:
    if kind is sre.LITERAL:
        return lambda one: ord(one) == value
    if kind is sre.RANGE:
        return lambda one: bool(value[0] <= ord(one) <= value[1])
    return _CATEGORIES[value]
