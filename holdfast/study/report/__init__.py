"""The report of a study: files for people and machines, and a summary for the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.screen import Screen
from holdfast.study.plots import draw
from holdfast.study.report import html, markdown
from holdfast.study.report.report_tables import numbered, tables
from holdfast.study.report.terminal_summary import show
from holdfast.study.rows import Results


def write(results: Results, folder: Path) -> None:
    """Write ``report.json``, ``report.md``, ``report.html`` and the pictures; raises ``HoldfastError`` if it cannot."""
    found = tables(results)
    numbers = numbered(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = draw(results, folder)
        (folder / "report.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(markdown.document(results, found, numbers, pictures), encoding="utf-8")
        (folder / "report.html").write_text(html.page(results, found, numbers, pictures), encoding="utf-8")
    except OSError as e:
        raise HoldfastError(f"the report cannot be written to {folder}: {e.strerror or e}") from e


def summary(results: Results, *, as_json: bool = False) -> None:
    """Print a summary to the terminal; to stderr if stdout is for JSON."""
    show(Screen(aside=as_json, everything=True), results)
