"""What mkdocstrings does to each docstring before it shows it."""

from __future__ import annotations

from typing import Any

from griffe import Docstring, Extension

from docs.site.docstrings import as_markdown


class Docstrings(Extension):
    """Turns docstrings into Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: Any, **_: Any) -> None:
        """A comment beside a field says what it is, as in ``number: int  # the first step is 0``."""
        if attr.docstring is None and attr.lineno is not None and attr.parent.is_class:
            _, mark, comment = attr.lines_collection[attr.filepath][attr.lineno - 1].partition("  # ")
            if mark:
                attr.docstring = Docstring(f"{comment[0].upper()}{comment[1:]}.", parent=attr)
