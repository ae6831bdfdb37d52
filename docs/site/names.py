"""The reference of public names: one page for each, in groups, from ``__all__`` and the docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from docs.site.docstrings import as_markdown

MODULES = ["holdfast", "holdfast.checkpoint"]  # what they have in ``__all__`` is public
# By public name: what of its base class is for scripts. The rest is for the parts of the library.
_AROUND = [
    "state",
    "ema",
    "log",
    "log_to",
    "evaluate",
    "predict",
    "save_model",
    "write_files",
    "sha256",
]  # what surrounds the steps
_WHERE = ["step", "last", "workers", "is_first_worker", "sync_totals"]  # where the training is
INHERITED = {"Run": [*_AROUND, *_WHERE], "Loop": [*_AROUND, *_WHERE]}


def public(module: str) -> dict[str, Any]:
    """Return the public names of a module and what they are."""
    found = importlib.import_module(module)
    return {name: getattr(found, name) for name in found.__all__}


def group_of(what: Any) -> str:
    """Return the heading under which a public thing stands.

    >>> import holdfast
    >>> [group_of(each) for each in (holdfast.Run, holdfast.Placement, holdfast.SelSync, holdfast.UsageError)]
    ['Classes', 'Settings', 'When replicas talk', 'Errors']
    """
    from holdfast.sync.policy import Policy

    if not inspect.isclass(what):
        return "Functions"
    if issubclass(what, BaseException):
        return "Errors"
    if issubclass(what, Policy):
        return "When replicas talk"
    is_settings = dataclasses.is_dataclass(what) and "Settings of" in (what.__doc__ or "")
    return "Settings" if is_settings else "Classes"


ORDER = ["Classes", "Settings", "Functions", "When replicas talk", "Errors"]


def grouped(module: str) -> dict[str, list[str]]:
    """Return the public names of a module under their headings."""
    groups: dict[str, list[str]] = {heading: [] for heading in ORDER}
    for name, what in sorted(public(module).items()):
        groups[group_of(what)].append(name)
    return {heading: names for heading, names in groups.items() if names}


def place_of(module: str, name: str) -> str:
    """Return where the page of a public name is in the site.

    >>> place_of("holdfast.checkpoint", "save")
    'reference/checkpoint/save.md'
    """
    return "/".join(["reference", *module.split(".")[1:], f"{name}.md"])


def page_of(module: str, name: str) -> str:
    """Return the page of a public name, as mkdocstrings fills it."""
    shared = [
        f"## Of every {base.__name__}\n\n{as_markdown(inspect.getdoc(base) or '')}\n"
        for base in bases_of(public(module)[name])
    ]
    inherited = f"    options:\n      inherited_members: {INHERITED[name]}\n" if name in INHERITED else ""
    return "\n".join([f"::: {module}.{name}\n{inherited}", *shared])


def overview() -> str:
    """Return the page that lists all public names with the first sentences of their docstrings."""
    lines = ["# Public names", "", "Made from the docstrings. What is not here may change without notice.", ""]
    for module in MODULES:
        lines += [f"## `{module}`", ""]
        for heading, names in grouped(module).items():
            lines += [f"### {heading}" if module == "holdfast" else f"### {heading} of checkpoints", ""]
            lines += ["| name | what it is |", "|---|---|"]
            lines += [_row(module, name) for name in names] + [""]
    return "\n".join(lines)


def _row(module: str, name: str) -> str:
    link = place_of(module, name).removeprefix("reference/")
    first = " ".join((inspect.getdoc(public(module)[name]) or "").partition("\n\n")[0].split())
    return f"| [`{name}`]({link}) | {first.replace('``', '`').replace('|', chr(92) + '|')} |"


def undocumented(what: Callable[..., Any]) -> list[str]:
    """Return the settings of a public thing that nothing says a word about.

    The word is in its docstring, its bases', one that it refers to, or in a comment beside the field.
    """
    if inspect.isclass(what) and issubclass(what, BaseException):
        return []
    texts = [inspect.getdoc(each) or "" for each in (what, *bases_of(what))]
    siblings = vars(importlib.import_module(what.__module__))
    texts += [inspect.getdoc(siblings.get(name)) or "" for name in re.findall(r":func:`(\w+)`", texts[0])]
    given = inspect.signature(what).parameters.values()
    settings = [each.name for each in given if each.kind == each.KEYWORD_ONLY and not each.name.startswith("_")]
    text, code = "\n".join(texts), inspect.getsource(what)
    named = {name for name in settings if re.search(rf"``{name}(?:=.*?)?``", text)}
    return [name for name in settings if name not in named and not re.search(rf"(?m)^    {name}: .*  # ", code)]


def bases_of(what: Any) -> list[type]:
    """Return the classes from which settings are inherited."""
    bases = what.__mro__[1:] if inspect.isclass(what) else ()
    return [base for base in bases if base.__module__.startswith("holdfast") and dataclasses.is_dataclass(base)]
