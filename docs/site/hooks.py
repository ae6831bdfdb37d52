"""What mkdocs calls while it builds the site: see mkdocs.yml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # mkdocs loads this file by its path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.site import commands, names, navigation, places
from docs.site.markdown import with_links


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation.navigation((places.ROOT / navigation.MAP).read_text())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give each page that people write its place, and add those that are generated."""
    for page in places.sources():
        place = places.place_of(page)
        if (old := files.get_file_from_path(page.removeprefix("docs/"))) is not None:
            files.remove(old)
        text = (places.ROOT / page).read_text()
        _add(
            files, config, place, with_links(text, lambda link, s=page, p=place: places.moved(link, source=s, place=p))
        )
    for path in places.shown(places.sources()):
        _add(files, config, places.place_of(path), places.page_of(path))
    for place, text in generated().items():
        _add(files, config, place, text)
    return files


def generated() -> dict[str, str]:
    """The reference: a page for each public name and each command, by their places."""
    pages = {"reference/index.md": names.overview(), "reference/commands/index.md": commands.overview()}
    for module in names.MODULES:
        pages |= {names.place_of(module, name): names.page_of(module, name) for name in names.public(module)}
    known = commands.commands()
    return pages | {commands.place_of(words): commands.page_of(words, command) for words, command in known.items()}


def on_page_context(context: dict[str, Any], page: Any, **_: Any) -> dict[str, Any]:
    """Keep pages that show a file out of the search: they would hide the pages that explain it."""
    if page.file.src_uri.startswith("files/"):
        page.meta.setdefault("search", {})["exclude"] = True
    return context


def _add(files: Files, config: MkDocsConfig, place: str, text: str) -> None:
    files.append(File.generated(config, place, content=text))
