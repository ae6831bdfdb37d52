"""Where a file of the repository is in the site."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path

from docs.site.markdown import links_of

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "map.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}  # pages that have another place in the site
LANGUAGES = {".py": "python", ".md": "markdown", ".yml": "yaml", ".toml": "toml"}


def sources(root: Path = ROOT) -> list[str]:
    """Return the pages that people write, by their paths in the repository."""
    return [*OUTSIDE, *sorted(f"docs/{page.name}" for page in (root / "docs").glob("*.md") if page.name != "README.md")]


def is_outward(link: str) -> bool:
    """Return whether a link leads out of the repository."""
    return ":" in link.partition("/")[0]


def target_of(source: str, link: str) -> tuple[str, str]:
    """Return the path in the repository that a link of a page means, and the anchor there.

    >>> target_of("docs/run.md", "../examples/gpt2.py#L3")
    ('examples/gpt2.py', 'L3')
    >>> target_of("docs/run.md", "#the-arguments")
    ('docs/run.md', 'the-arguments')
    """
    path, _, anchor = link.partition("#")
    return (posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source), anchor


def place_of(path: str, root: Path = ROOT) -> str:
    """Return where a path of the repository is in the site: a page, a picture, or a page that shows a file.

    >>> place_of("docs/run.md"), place_of("README.md"), place_of("examples"), place_of("examples/gpt2.py")
    ('run.md', 'index.md', 'files/examples/index.md', 'files/examples/gpt2.py.md')
    """
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/") and path.endswith((".md", ".svg", ".png")):
        return path.removeprefix("docs/")
    return f"files/{path}/index.md" if (root / path).is_dir() else f"files/{path}.md"


def moved(link: str, *, source: str, place: str) -> str:
    """Return a link of ``source`` as it must be written where that page is in the site."""
    if is_outward(link):
        return link
    path, anchor = target_of(source, link)
    target = posixpath.relpath(place_of(path), posixpath.dirname(place) or ".")
    return f"{target}#{anchor}" if anchor else target


def shown(pages: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the files and folders that pages link to and that are no pages themselves; files of a folder too."""
    found = {target_of(page, link)[0] for page in pages for link in _links(root / page) if not is_outward(link)}
    asked = {path for path in found if place_of(path, root).startswith("files/") and (root / path).exists()}
    return sorted(asked | {inner for path in asked for inner in _inside(path, root)})


def page_of(path: str, root: Path = ROOT) -> str:
    """Return the page that shows a file, or lists a folder."""
    if (root / path).is_dir():
        rows = [f"| [`{name}`]({name}.md) | {about} |" for name, about in _listed(path, root)]
        return "\n".join([f"# `{path}/`", "", "| file | what is in it |", "|---|---|", *rows, ""])
    text = (root / path).read_text()
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# `{path}`\n\n``````{language}\n{text}``````\n"


def _links(page: Path) -> list[str]:
    return links_of(page.read_text())


def _inside(path: str, root: Path) -> Iterator[str]:
    if (root / path).is_dir():
        yield from (f"{path}/{name}" for name, _ in _listed(path, root))


def _listed(path: str, root: Path) -> list[tuple[str, str]]:
    """The Python files of a folder, with the first lines of their docstrings."""
    found = []
    for name in sorted(os.listdir(root / path)):
        text = (root / path / name).read_text() if name.endswith(".py") else ""
        if text:
            first = text.partition('"""')[2].partition('"""')[0].partition("\n")[0]
            found.append((name, first.replace("``", "`").replace("|", "\\|")))
    return found
