"""Headings, links and fenced blocks of a Markdown page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s]+)((?:\s+\"[^\"]*\")?\))")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. ``line`` is that of its fence; ``note`` is the comment on the line above it, or empty."""

    language: str
    text: str
    line: int
    note: str = ""


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page.

    >>> blocks_of("<!-- fragment: needs a model -->\\n```python\\nmodel\\n```\\n")
    [Block(language='python', text='model\\n', line=2, note='fragment: needs a model')]
    """
    found = []
    for fence in FENCE.finditer(page):
        before = page[: fence.start()]
        above = before.rstrip("\n").rpartition("\n")[2]
        note = COMMENT.fullmatch(above) if before.endswith("\n") and not before.endswith("\n\n") else None
        line = before.count("\n") + 1
        text, language = fence["text"], fence["language"]
        found.append(Block(language=language, text=text, line=line, note=note[1] if note else ""))
    return found


def without_blocks(page: str) -> str:
    """Return a page with its fenced blocks and comments blank; lines keep their numbers."""
    for pattern in (FENCE, COMMENT):
        page = pattern.sub(lambda found: "\n" * found[0].count("\n"), page)
    return page


def slug(title: str, separator: str = "-") -> str:
    """Return the anchor of a heading, as code hosts make it.

    >>> slug("`Run`: every *setting*, and [more](page.md)")
    'run-every-setting-and-more'
    """
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", separator)


def anchors_of(page: str) -> set[str]:
    """Return the anchors of a page. The second of two equal headings ends in -1."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in HEADING.finditer(without_blocks(page)):
        name = slug(heading[1])
        anchors.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return anchors


def links_of(page: str) -> list[str]:
    """Return the targets of a page's links and pictures; none in code."""
    return [link[2] for link in LINK.finditer(CODE.sub(_unlike_a_link, without_blocks(page)))]


def with_links(page: str, change: Callable[[str], str]) -> str:
    """Return a page with each target ``link`` replaced by ``change(link)``; code stays as it is."""
    hidden: list[str] = []

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"\0{len(hidden) - 1}\0"

    page = CODE.sub(hide, FENCE.sub(hide, page))
    page = LINK.sub(lambda link: link[1] + change(link[2]) + link[3], page)
    while "\0" in page:  # a fence is hidden first, and code that has one in it hides its mark
        page = re.sub("\0(\\d+)\0", lambda mark: hidden[int(mark[1])], page)
    return page


def _unlike_a_link(code: re.Match[str]) -> str:
    return re.sub(r"[\[\]()]", "_", code[0])
