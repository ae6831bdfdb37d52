"""The report: files that parse, links that lead somewhere, words that stay words."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.errors import HoldfastError
from holdfast.screen import Screen
from holdfast.study.advice import advise
from holdfast.study.report import html, summary, write
from holdfast.study.report.report_tables import ReportCell, ReportTable, numbered, tables
from holdfast.study.report.terminal_summary import show
from holdfast.study.rows import AXES
from tests.study.example import WHY_MISSING, example

Results = dict[str, Any]
HOSTILE = "<script>alert(\"1\")</script> | `x` & 'y' ]( $z$"
VOID = {"meta", "img"}


def advised(results: Results) -> Results:
    return {**results, "advice": advise(results)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "report"
    write(advised(example()), folder)
    return folder


class Page(HTMLParser):
    """Reads a page, and notes what is not as it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "a script in an attribute"
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(results: Results) -> Page:
    found = tables(results)
    return Page(html.page(results, found, numbered(found), {}))


def test_the_raw_results_are_kept(folder: Path) -> None:
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(advised(example())))


def test_the_page_is_whole_and_needs_nothing_else(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        assert link.startswith("data:image/png;base64,") or link.removeprefix("#") in page.ids, link[:50]
    assert "script" not in page.tags
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert page.tags.count("img") == 6


def test_the_parser_of_this_test_notices_what_is_wrong() -> None:
    with pytest.raises(AssertionError):
        Page("<p><b></p></b>")
    with pytest.raises(AssertionError):
        Page("<p>")


def test_every_row_of_the_results_can_be_pointed_at() -> None:
    results = example()
    numbers = numbered(tables(results))
    assert set(numbers) == {row["id"] for axis in AXES for row in results[axis]}
    assert sorted(numbers.values()) == [*range(1, len(numbers) + 1)]


def test_advice_leads_to_its_rows() -> None:
    results = advised(example())
    numbers = numbered(tables(results))
    text = html.page(results, tables(results), numbers, {})
    first = results["advice"][0]
    wanted = [f'<a href="#row-{numbers[row]}">' for row in first["rests_on"]]
    item = next(line for line in text.splitlines() if line.startswith("<li>"))
    assert all(link in item for link in wanted)


def test_failures_say_their_words(folder: Path) -> None:
    for name in ("report.html", "report.md"):
        text = (folder / name).read_text()
        assert WHY_MISSING in text
        assert "the ranks did not meet within 60 s" in text
        assert "every save was over before it was killed" in text
        assert "two undisturbed runs differ already" in text


def test_pictures_stand_beside_the_markdown(folder: Path) -> None:
    found = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (folder / "report.md").read_text())
    assert len(found) == 6
    assert all((folder / name).stat().st_size > 10_000 for name in found)


def test_tables_of_the_markdown_are_even(folder: Path) -> None:
    widths = []
    for line in (folder / "report.md").read_text().splitlines():
        bars = len(re.findall(r"(?<!\\)\|", line))
        if line.startswith("|"):
            widths.append(bars)
        elif widths:
            assert len(set(widths)) == 1
            widths = []


def hostile() -> Results:
    """What comes from frameworks, paths and errors may hold anything."""
    results = example()
    results["frameworks"][0]["why"] = HOSTILE
    results["machine"]["platform"] = HOSTILE
    for row in results["cost"] + results["formats"] + results["limits"]:
        row["model"] = HOSTILE
        row["id"] += HOSTILE
    results["scale"][0]["strategy"] = HOSTILE
    results["scale"][1] = {**results["scale"][1], "error": HOSTILE}
    results["determinism"][3]["says"] = HOSTILE
    results["crash_safety"][0]["errors"] = [HOSTILE]
    return advised(results)


def test_words_of_others_stay_words(tmp_path: Path) -> None:
    write(hostile(), tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "script" not in page.tags
    assert page.text.count(HOSTILE) > 20
    markdown = (tmp_path / "report.md").read_text()
    assert "<script" not in markdown
    assert r"\| \`x\` &amp;" in markdown


def test_a_page_that_did_not_escape_would_be_noticed() -> None:
    assert "script" in Page(f"<p>{HOSTILE}</p>").tags


@pytest.mark.parametrize("axis", [*AXES, "frameworks", "advice"])
def test_an_empty_axis_has_no_table(axis: str) -> None:
    results = {**advised(example()), axis: []}
    results["advice"] = [] if axis == "advice" else advise(results)
    page = page_of(results)
    assert axis not in page.ids
    assert len(page.ids) > 50


def test_nothing_measured_is_a_report_too(tmp_path: Path) -> None:
    results = example()
    write({**results, **{axis: [] for axis in AXES}}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert "advice" not in Page((tmp_path / "report.html").read_text()).ids


@pytest.mark.parametrize("key", [*AXES, "frameworks", "machine"])
def test_a_table_says_how_it_is_to_be_read(key: str) -> None:
    table = next(table for table in tables(example()) if table.key == key)
    assert table.says.endswith(".")


def test_the_killed_model_is_named() -> None:
    assert "gpt" in next(table for table in tables(example()) if table.key == "crash_safety").says


def texts_of(results: Results, key: str) -> list[str]:
    table = next(table for table in tables(results) if table.key == key)
    return [cell.text for line in table.lines for cell in line]


def test_nobody_is_promised_to_be_safe() -> None:
    texts = texts_of(example(), "crash_safety")
    assert not {"safe", "unsafe"} & set(texts)


def test_settings_are_named_as_people_name_them() -> None:
    texts = texts_of(example(), "machine")
    assert {"6 h", "gpt, resnet50"} <= set(texts)
    assert not any("mtbf" in text for text in texts)


@pytest.mark.parametrize("key", ["cost", "determinism", "crash_safety"])
def test_errors_are_shown_without_internals(key: str) -> None:
    results, error = example(), "OpError: {{function_node x_/job:localhost}} Read less bytes"
    results["cost"][0]["error"] = results["determinism"][0]["says"] = error
    results["crash_safety"][0]["errors"] = [error]
    assert any("OpError: Read less bytes" in text for text in texts_of(results, key))


def test_many_rows_are_named_in_few_words(folder: Path) -> None:
    assert re.search(r"rests on rows .*\d+-\d+", (folder / "report.md").read_text())


def test_a_place_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HoldfastError, match=str(tmp_path)):
        write(advised(example()), tmp_path / "file")


def test_a_short_line_spans_the_rest() -> None:
    line = [ReportCell(text="a", row="x/a"), ReportCell(text="failed: gone")]
    table = ReportTable(key="x", title="X", says="", columns=["row", "b", ">c"], lines=[line])
    text = html.page({"version": "1", "when": "now", "advice": []}, [table], numbered([table]), {})
    assert '<td colspan="2">failed: gone</td>' in text


@pytest.mark.parametrize("width", [60, 100])
def test_the_summary_is_as_wide_as_the_terminal(width: int) -> None:
    console = Console(width=width, record=True, quiet=True, highlight=False)
    console.quiet = False
    with console.capture() as captured:
        show(Screen(console, everything=True), advised(example()))
    text = captured.get()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for word in ("chainer was left out", "Advice", "Scale", "Determinism", "Crash safety", "✗ 6 of 20", "failed"):
        assert word in text


def test_the_summary_leaves_stdout_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    summary(advised(example()), as_json=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Advice" in printed.err
