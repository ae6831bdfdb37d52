"""The report as one HTML file: nothing in it is fetched from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from holdfast.study.report.report_tables import ReportCell, ReportTable
from holdfast.study.rows import Results

WIDE = 10  # most columns of a table on an upright page in print
STYLE = """
:root { color-scheme: light dark; --ink: #16222e; --paper: #fff; --soft: #5b6875; --line: #d5dce3; --band: #f3f6f9;
  --mark: #fff3c4; --link: #1d5fa5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --paper: #12181f; --soft: #9aa7b4; --line: #33404d;
  --band: #1a222b; --mark: #4a3f10; --link: #8fc1f5; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; } .soft { color: var(--soft); font-size: .9rem; }
a { color: var(--link); } ol { padding-left: 1.5rem; max-width: 46rem; } li { margin: .7rem 0; }
nav { margin: .8rem 0; } nav a { margin-right: .9rem; display: inline-block; padding: .45rem 0; }
li .soft a { padding: .4rem .2rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { padding: .35rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td { min-width: 3rem; max-width: 26rem; } th { background: var(--band); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr:last-child td { border-bottom: 0; } .row { color: var(--soft); text-decoration: none; margin-right: .4rem; }
:target { background: var(--mark); } tr:has(:target) td { background: var(--mark); }
figure { margin: 1rem 0; } img { max-width: 100%; width: 34rem; height: auto; background: #fff; border-radius: 6px; }
@media print { :root { color-scheme: light; --ink: #000; --paper: #fff; --soft: #444; --line: #999; --band: #eee;
  --link: #000; --mark: #fff; } body { max-width: none; padding: 0; font-size: 9pt; } nav { display: none; }
  .scroll { overflow: visible; border: 0; } table { font-size: 6.5pt; } th, td { padding: 1pt 2pt; }
  .number { white-space: normal; } td { min-width: 0; } a { text-decoration: none; }
  thead { display: table-header-group; }
  tr, figure, li { break-inside: avoid; } h2 { break-after: avoid; } img { width: auto; max-height: 24cm; }
  .wide { page: wide; } }
@page { margin: 12mm; }
@page wide { size: landscape; }
"""


def page(
    results: Results, found: Sequence[ReportTable], numbers: Mapping[str, int], pictures: Mapping[str, tuple[Path, str]]
) -> str:
    """Return the page.

    Args:
        results: of the study.
        found: its tables.
        numbers: of rows, by their id.
        pictures: files and descriptions, by the key of their table.
    """
    title = "Checkpoint-restart on this machine"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
        f'<p class="soft">holdfast study {escape(str(results["version"]))}, {escape(str(results["when"]))}</p>',
        *_menu(found, bool(results["advice"])),
        *_advice(results, numbers),
        *_figure(pictures.get("interval")),
    ]
    for table in found:
        parts += [
            f'<h2 id="{escape(table.key)}">{escape(table.title)}</h2>',
            f'<p class="soft">{escape(table.says)}</p>',
        ]
        parts += [*_figure(pictures.get(table.key)), *_table(table, numbers)]
    return "\n".join([*parts, "</body>\n</html>\n"])


def _menu(found: Sequence[ReportTable], advised: bool) -> Iterator[str]:
    entries = [("advice", "Advice")] if advised else []
    entries += [(table.key, table.title) for table in found]
    yield "<nav>" + "\n".join(f'<a href="#{escape(key)}">{escape(title)}</a>' for key, title in entries) + "</nav>"


def _advice(results: Results, numbers: Mapping[str, int]) -> Iterator[str]:
    if not results["advice"]:
        return
    yield '<h2 id="advice">Advice</h2>\n<ol>'
    for each in results["advice"]:
        rows = sorted(numbers[row] for row in each["rests_on"])
        links = ", ".join(f'<a href="#row-{number}">{number}</a>' for number in rows)
        rests = f"Rests on row{'s' if len(rows) > 1 else ''} {links}."
        yield f'<li>{escape(each["sentence"])} <span class="soft">{rests}</span></li>'
    yield "</ol>"


def _figure(picture: tuple[Path, str] | None) -> Iterator[str]:
    if picture is not None:
        path, shows = picture
        data = base64.b64encode(path.read_bytes()).decode()
        yield f'<figure><img src="data:image/png;base64,{data}" alt="{escape(shows)}"></figure>'


def _table(table: ReportTable, numbers: Mapping[str, int]) -> Iterator[str]:
    numeric = [name.startswith(">") for name in table.columns]
    kind = "scroll wide" if len(table.columns) > WIDE else "scroll"
    yield f'<div class="{kind}" tabindex="0" role="region" aria-label="{escape(table.title)}">\n<table>\n<thead><tr>'
    for name, right in zip(table.columns, numeric, strict=True):
        yield f'<th scope="col"{_number(right)}>{escape(name.removeprefix(">"))}</th>'
    yield "</tr></thead>\n<tbody>"
    for line in table.lines:
        spare = len(table.columns) - len(line)
        cells = [_cell(cell, numbers, right and not spare) for cell, right in zip(line[:-1], numeric, strict=False)]
        cells.append(_cell(line[-1], numbers, numeric[-1] and not spare, span=spare + 1))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody>\n</table>\n</div>"


def _cell(cell: ReportCell, numbers: Mapping[str, int], right: bool, span: int = 1) -> str:
    wide = f' colspan="{span}"' if span > 1 else ""
    if not cell.row:
        return f"<td{wide}{_number(right)}>{escape(cell.text)}</td>"
    number = numbers[cell.row]
    link = f'<a class="row" href="#row-{number}" title="{escape(cell.row)}">{number}</a>'
    return f'<td id="row-{number}"{wide}{_number(right)}>{link}{escape(cell.text)}</td>'


def _number(right: bool) -> str:
    return ' class="number"' if right else ""
