"""Every link of the documents leads somewhere: to a file of the repository, and to a heading in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site.markdown import anchors_of, links_of, slug
from docs.site.navigation import MAP, mapped
from docs.site.places import ROOT, is_outward, place_of, sources, target_of


def broken(page: str, root: Path = ROOT) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in links_of((root / page).read_text()):
        if is_outward(link):
            continue
        path, anchor = target_of(page, link)
        target = root / path
        is_lost = not target.exists() or (
            anchor and (not path.endswith(".md") or anchor not in anchors_of(target.read_text()))
        )
        if is_lost:
            found.append(link)
    return found


@pytest.mark.parametrize("page", sources())
def test_every_link_leads_somewhere(page: str) -> None:
    assert not broken(page)


def test_a_lost_file_and_a_lost_heading_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("# A title\n\n## It is `here`\n\n```\n# not here\n```\n")
    links = [
        "other.md#it-is-here",
        "other.md",
        "#a-page",
        "other.md#not-here",
        "none.md",
        "../docs/none.svg",
        "#nowhere",
    ]
    body = "# A page\n\n" + "\n".join(f"[x]({link})" for link in links) + "\n`[code](none.md)` <!-- [no](none.md) -->\n"
    (tmp_path / "docs" / "page.md").write_text(body)
    assert broken("docs/page.md", tmp_path) == links[3:]


def test_there_are_links_to_check() -> None:
    assert sum(len(links_of((ROOT / page).read_text())) for page in sources()) > 200


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("`Run`: every setting", "run-every-setting"),
        ("What is promised, and the test that shows it", "what-is-promised-and-the-test-that-shows-it"),
        ("a_b / c", "a_b--c"),
        ("One *folder*, [one run](run.md)", "one-folder-one-run"),
    ],
)
def test_anchors_are_those_of_code_hosts(title: str, anchor: str) -> None:
    assert slug(title) == anchor


def test_the_map_has_every_page() -> None:
    listed = [path for paths in mapped((ROOT / MAP).read_text()).values() for path in paths]
    assert sorted(listed) == sorted(set(sources()) - {MAP, "README.md"})
    assert len({place_of(path) for path in listed}) == len(listed)
