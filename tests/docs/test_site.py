"""The generated pages of the site: every public name and every command is there, and names all its settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site import commands, names, navigation, places
from docs.site.markdown import with_links

NAMES = [(module, name) for module in names.MODULES for name in names.public(module)]


def flat(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [place for each in (nav.values() if isinstance(nav, dict) else nav) for place in flat(each)]


def test_every_public_name_and_command_is_in_the_navigation() -> None:
    places_in_nav = flat(navigation.navigation((places.ROOT / navigation.MAP).read_text()))
    assert {names.place_of(module, name) for module, name in NAMES} < set(places_in_nav)
    assert {commands.place_of(words) for words in commands.commands()} < set(places_in_nav)
    assert len(places_in_nav) == len(set(places_in_nav))


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_docstring_names_every_setting(module: str, name: str) -> None:
    what = names.public(module)[name]
    assert what.__doc__
    assert not names.undocumented(what)


def test_all_that_a_script_can_ask_of_a_run_is_on_its_page() -> None:
    """Some of it is inherited, and mkdocstrings shows only what it is told of that."""
    table = (
        (places.ROOT / "docs" / "run.md").read_text().partition("## What a script can ask")[2].partition("\n\nEvery")[0]
    )
    asked = set(re.findall(r"`run\.(\w+)", table))
    assert "steps" in asked
    for name in ("Run", "Loop"):
        what, inherited = names.public("holdfast")[name], names.INHERITED[name]
        assert asked <= {*vars(what), *inherited}
        assert all(getattr(what, each).__doc__ for each in inherited)
        assert str(inherited) in names.page_of("holdfast", name)


def test_a_setting_that_is_not_in_the_docstring_is_noticed() -> None:
    def given(*, one: int, two: int) -> None:
        """Takes ``one``, and two."""

    assert names.undocumented(given) == ["two"]


def test_a_command_shows_its_options_arguments_and_defaults() -> None:
    page = commands.page_of("holdfast run", commands.commands()["holdfast run"])
    assert "holdfast run [OPTIONS] SCRIPT [ARGS]..." in page
    assert "| `--spares` | Warm workers that wait to replace a lost one. | `0` |" in page
    assert "HOLDFAST_GRACE" in page
    assert "holdfast ckpt ls" in commands.overview()


def test_links_lead_to_where_pages_are_in_the_site() -> None:
    def moved(text: str, source: str) -> str:
        return with_links(text, lambda link: places.moved(link, source=source, place=places.place_of(source)))

    assert moved("[a](docs/run.md#x) ![p](docs/images/plan.svg)", "README.md") == "[a](run.md#x) ![p](images/plan.svg)"
    assert moved("[a](../README.md), [b](../examples)", "docs/run.md") == "[a](index.md), [b](files/examples/index.md)"
    assert moved("`[a](../README.md)` [b](https://x.org)", "docs/run.md") == "`[a](../README.md)` [b](https://x.org)"


@pytest.mark.thorough("`make docs` does the same; links and generated pages are tested here and in test_links.py")
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="`make docs` installs what builds the site, and does the same check")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=places.ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    run = (tmp_path / "site" / "reference" / "Run.html").read_text()
    assert "micro_batch" in run
    assert 'class="highlight"' in run
    for page in (tmp_path / "site").rglob("*.html"):
        assert not outside(page.read_text()), page


def outside(page: str) -> list[str]:
    """What a page would load from another machine; plain links to one are fine."""
    return re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>", page)


def test_what_is_loaded_from_elsewhere_is_noticed() -> None:
    assert outside('<script src="https://unpkg.com/x">')
    assert outside('<link rel=stylesheet href="//fonts.org/a">')
    assert not outside('<a href="https://xxhash.com">x</a><script src="assets/x.js">')
