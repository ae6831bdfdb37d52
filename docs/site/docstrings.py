"""Docstrings as Markdown: examples as code, not as the quotations that ``>>>`` means there; names without roles."""

from __future__ import annotations

import re

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
ROLE = re.compile(r":(?:func|mod|class|meth):`([^`]+)`")
DIRECTIVE = re.compile(r" +# doctest: .*$", re.MULTILINE)  # for doctest, not for readers


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown.

    >>> as_markdown("See :func:`save`.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['See `save`.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    text = ROLE.sub(r"`\1`", DIRECTIVE.sub("", text))
    return EXAMPLE.sub(lambda example: f"```pycon\n{example[0].rstrip()}\n```", text)
