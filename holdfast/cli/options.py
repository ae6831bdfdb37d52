"""Options of a command as dataclasses: typer wants them in a signature, and a function with dozens reads badly."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer that has the fields of dataclasses as options.

    A parameter of ``command`` that is annotated with a dataclass stands for its fields, in order; others stay.

    >>> @dataclasses.dataclass
    ... class Size:
    ...     width: int
    ...     height: int = 1
    >>> @spread
    ... def draw(name: str, size: Size) -> None:
    ...     print(name, size)
    >>> list(inspect.signature(draw).parameters)
    ['name', 'width', 'height']
    >>> draw(name="a", width=2, height=3)
    a Size(width=2, height=3)
    """
    kinds = get_type_hints(command, include_extras=True)
    del kinds["return"]
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}
    fields = {name: [field.name for field in dataclasses.fields(kind)] for name, kind in groups.items()}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        made = {name: groups[name](**{field: given.pop(field) for field in fields[name]}) for name in groups}
        command(**given, **made)

    parameters = [one for name, kind in kinds.items() for one in _parameters(name, kind)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameters(name: str, kind: Any) -> list[inspect.Parameter]:
    """Return a parameter, or those that it stands for."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    if not dataclasses.is_dataclass(kind):
        return [inspect.Parameter(name, keyword, annotation=kind)]
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return [
        inspect.Parameter(
            each,
            keyword,
            annotation=hints[each],
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        )
        for each, default in defaults.items()
    ]
