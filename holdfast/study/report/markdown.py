"""The report as Markdown, with its pictures beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from holdfast.study.report.report_tables import ReportCell, ReportTable
from holdfast.study.rows import Results
from holdfast.words import ranges_text


def document(
    results: Results, found: Sequence[ReportTable], numbers: Mapping[str, int], pictures: Mapping[str, tuple[Path, str]]
) -> str:
    """Return the document; the arguments are those of ``html.page``."""
    lines = [
        "# Checkpoint-restart on this machine",
        "",
        plain(f"holdfast study {results['version']}, {results['when']}"),
    ]
    if results["advice"]:
        lines += ["", "## Advice", ""]
    for number, each in enumerate(results["advice"], 1):
        rows = sorted(numbers[row] for row in each["rests_on"])
        rests = f"rests on row{'s' if len(rows) > 1 else ''} {ranges_text(rows)}"
        lines.append(f"{number}. {plain(each['sentence'])} ({rests})")
    lines += _picture(pictures.get("interval"))
    for table in found:
        lines += ["", f"## {plain(table.title)}", "", plain(table.says)]
        lines += [*_picture(pictures.get(table.key)), "", *_table(table, numbers)]
    return "\n".join([*lines, ""])


def _picture(picture: tuple[Path, str] | None) -> list[str]:
    return ["", f"![{plain(picture[1])}]({picture[0].name})"] if picture is not None else []


def _table(table: ReportTable, numbers: Mapping[str, int]) -> Iterator[str]:
    yield f"| {' | '.join(plain(name.removeprefix('>')) for name in table.columns)} |"
    yield f"|{'|'.join('---:' if name.startswith('>') else '---' for name in table.columns)}|"
    for line in table.lines:
        cells = [_cell(cell, numbers) for cell in line]
        cells += [""] * (len(table.columns) - len(cells))
        yield f"| {' | '.join(cells)} |"


def _cell(cell: ReportCell, numbers: Mapping[str, int]) -> str:
    text = plain(cell.text)
    if not cell.row:
        return text
    return f"{numbers[cell.row]}: {text}" if text else str(numbers[cell.row])


def plain(text: str) -> str:
    """Return a text in one line, escaped so that Markdown shows it as it is.

    >>> print(plain("a|b *c* <d>"))
    a\\|b \\*c\\* &lt;d&gt;
    """
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", escape(" ".join(text.split()), quote=False))
