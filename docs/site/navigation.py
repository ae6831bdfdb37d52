"""The site's navigation, made from the map of the pages (docs/README.md): a page that is put there appears."""

from __future__ import annotations

import re
from typing import Any

from docs.site import commands, names
from docs.site.places import place_of, target_of

MAP = "docs/README.md"
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\| \[[^\]]*\]\(([^)]+)\)", re.MULTILINE)

Nav = list[dict[str, Any]]


def mapped(page: str) -> dict[str, list[str]]:
    """Return the paths that the map names, under the headings that they stand under.

    >>> mapped("## Guides: scripts\\n\\n| page | about |\\n|---|---|\\n| [run.md](run.md) | settings |\\n")
    {'Guides: scripts': ['docs/run.md']}
    """
    sections = {found[1]: ROW.findall(found[2]) for found in SECTION.finditer(page)}
    return {title: [target_of(MAP, link)[0] for link in links] for title, links in sections.items() if links}


def navigation(page: str) -> Nav:
    """Return the navigation: the README, the sections of the map, then what is generated."""
    nav: Nav = [{"Home": "index.md"}]
    for title, paths in mapped(page).items():
        nav.append({title: [place_of(path) for path in paths]})
    return [*nav, {"Public names": _names()}, {"Commands": _commands()}, {"Map of the pages": "map.md"}]


def _names() -> list[Any]:
    listed: list[Any] = ["reference/index.md"]
    for module in names.MODULES:
        for heading, found in names.grouped(module).items():
            title = heading if module == "holdfast" else f"{module}: {heading.lower()}"
            listed.append({title: [{name: names.place_of(module, name)} for name in found]})
    return listed


def _commands() -> list[Any]:
    return ["reference/commands/index.md", *[{words: commands.place_of(words)} for words in commands.commands()]]
