"""Tables of the study's results, for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.study.numbers import duration_text, plain_text, ratio_text, spread_text
from holdfast.study.report import captions
from holdfast.study.rows import Results, Row, error_text, failure, rows_of, runs_of
from holdfast.words import seconds_text, size_text

YES_NO = {True: "yes", False: "no", None: "?"}
Column = tuple[str, Callable[[Row], str]]  # a heading, with ``>`` before it for numbers, and the text for a row


@dataclass(frozen=True, kw_only=True)
class ReportCell:
    """A cell. ``row``: the id of the row of the results that it shows, to which advice points."""

    text: str
    row: str = ""


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table. In a line with fewer cells than columns, the last cell spans the rest."""

    key: str
    title: str
    says: str  # how to read it
    columns: Sequence[str]
    lines: Sequence[Sequence[ReportCell]]


def tables(results: Results) -> list[ReportTable]:
    """Return all tables that have lines, in the order in which people ask."""
    made = (_frameworks, _cost, _formats, _scale, _determinism, _states, _crash_safety, _limits, _machine)
    return [table for make in made if (table := make(results)).lines]


def numbered(found: Sequence[ReportTable]) -> dict[str, int]:
    """Return a number for each row of the results, by its id; numbers can stand behind a sentence, on paper too.

    >>> line = [ReportCell(text="a", row="cost/a"), ReportCell(text="b", row="cost/b")]
    >>> numbered([ReportTable(key="cost", title="", says="", columns=["", ""], lines=[line])])
    {'cost/a': 1, 'cost/b': 2}
    """
    ids = dict.fromkeys(cell.row for table in found for line in table.lines for cell in line if cell.row)
    return {row: number for number, row in enumerate(ids, 1)}


def _listed(
    key: str, title: str, says: str, head: Sequence[Column], rest: Sequence[Column], rows: list[Row]
) -> ReportTable:
    """Return a table with a line for each row, its number first; a failed row shows its names and its error."""

    def line(row: Row) -> Iterator[ReportCell]:
        yield ReportCell(text="", row=row["id"])
        yield from (ReportCell(text=show(row)) for _, show in head)
        if why := failure(row):
            yield ReportCell(text=f"failed: {error_text(why)}")
        else:
            yield from (ReportCell(text=show(row)) for _, show in rest)

    columns = ["row", *(name for name, _ in [*head, *rest])]
    return ReportTable(key=key, title=title, says=says, columns=columns, lines=[[*line(row)] for row in rows])


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


def _seconds(name: str) -> Callable[[Row], str]:
    return lambda row: spread_text(row[name])


def _ratio(name: str) -> Callable[[Row], str]:
    return lambda row: ratio_text(row[name])


def _size(name: str) -> Callable[[Row], str]:
    return lambda row: size_text(row[name])


def _form(row: Row) -> str:
    kinds = [kind for kind in ("compressed", "background") if row.get(kind)]
    return f"{row['format']} ({', '.join(kinds)})" if kinds else str(row["format"])


MODEL: Column = ("model", _text("model"))
FRAMEWORK: Column = ("framework", _text("framework"))
FORMAT: Column = ("format", _form)


def _cost(results: Results) -> ReportTable:
    return _listed(
        "cost",
        "What a checkpoint costs",
        captions.COST,
        [MODEL, FRAMEWORK, FORMAT],
        [
            (">lost", _seconds("lost_s")),
            (">stall", _seconds("stall_s")),
            (">durable", _seconds("durable_s")),
            (">times raw disk", _ratio("of_raw")),
            (">serialise + write + fsync", _parts),
            ("on disk on return", lambda row: YES_NO[row["durable_on_return"]]),
            (">peak memory (MB)", lambda row: plain_text(row["peak_mb"])),
            (">size", _size("bytes")),
            (">load, cold", _seconds("load_cold_s")),
            (">load, warm", _seconds("load_warm_s")),
            (">times raw read", _ratio("load_of_raw")),
            (">step", _seconds("step_s")),
        ],
        rows_of(results, "cost"),
    )


def _parts(row: Row) -> str:
    """Return the seconds of a save's parts.

    >>> _parts({"parts": {"serialise": 0.2, "write": 0.01, "fsync": None}})
    '0.2 s + 10 ms + ?'
    """
    parts: dict[str, Any] = row["parts"] or {}
    shown = [parts.get(name) for name in ("serialise", "write", "fsync")]
    return " + ".join("?" if each is None else seconds_text(each) for each in shown) if parts else ""


def _formats(results: Results) -> ReportTable:
    return _listed(
        "formats",
        "Formats and sizes",
        captions.FORMATS,
        [MODEL, FRAMEWORK, FORMAT],
        [
            (">size", _size("bytes")),
            (">of raw", lambda row: f"{row['of_raw_bytes']:.1%}"),
            (">files", _text("files")),
            (">save", _seconds("save_s")),
            (">times raw disk", _ratio("of_raw")),
            (">load", _seconds("load_s")),
        ],
        rows_of(results, "formats"),
    )


def _scale(results: Results) -> ReportTable:
    return _listed(
        "scale",
        "Scale",
        captions.SCALE,
        [FRAMEWORK, ("strategy", _text("strategy")), (">ranks", _text("ranks"))],
        [
            (">slowest rank", _seconds("slowest_s")),
            (">fastest rank", _seconds("fastest_s")),
            (">written by each rank", lambda row: ", ".join(size_text(size) for size in row["written_by_rank"])),
            (">on disk", _size("on_disk")),
            (">beyond one copy", _size("duplicated")),
        ],
        rows_of(results, "scale"),
    )


def _determinism(results: Results) -> ReportTable:
    """Return a line for each case, with the save points side by side."""
    rows = rows_of(results, "determinism")
    places = list(dict.fromkeys(row["save_at"] for row in rows if row["save_at"]))
    cases: dict[tuple[str, str], dict[str | None, Row]] = {}
    for row in rows:
        cases.setdefault((runs_of(row), row["case"]), {})[row["save_at"]] = row
    lines = []
    for (runs, case), found in cases.items():
        shown = [found.get(place) for place in ([None] if None in found else places)]
        cells = [
            ReportCell(text=error_text(row["says"]), row=row["id"]) if row else ReportCell(text="") for row in shown
        ]
        lines.append([ReportCell(text=runs), ReportCell(text=case), *cells])
    return ReportTable(
        key="determinism",
        title="Determinism",
        says=captions.DETERMINISM,
        columns=["framework", "case", *(f"saved at {place}" for place in places)],
        lines=lines,
    )


def _states(results: Results) -> ReportTable:
    """Return the parts of each framework, as the calls that a script makes for them."""
    lines = []
    for row in rows_of(results, "frameworks"):
        for part in row.get("parts", ()):
            usual = "yes" if part["usual"] else "no"
            lines.append([ReportCell(text=text) for text in (row["framework"], part["name"], part["what"], usual)])
        if row.get("usual_means"):
            lines.append(
                [
                    ReportCell(text=row["framework"]),
                    ReportCell(text="usual"),
                    ReportCell(text=row["usual_means"]),
                    ReportCell(text=""),
                ]
            )
    return ReportTable(
        key="states",
        title="What a restart may need",
        says=captions.STATES,
        columns=["framework", "part", "what it is", "in the usual way"],
        lines=lines,
    )


def _crash_safety(results: Results) -> ReportTable:
    kills = [row for row in rows_of(results, "crash_safety") if row["what"] == "kill"]
    models = list(dict.fromkeys(str(row["model"]) for row in kills if row.get("model")))
    return _listed(
        "crash_safety",
        "Crash safety",
        captions.CRASH_SAFETY + captions.killed(models),
        [FRAMEWORK, FORMAT, ("what", _text("what"))],
        [
            (">tries", _text("tries")),
            ("outcome", outcome_text),
            ("verdict", lambda row: captions.VERDICTS[row["what"] == "kill"].get(row["verdict"], str(row["verdict"]))),
            ("in words", _said),
        ],
        rows_of(results, "crash_safety"),
    )


def outcome_text(row: Row) -> str:
    """Return the counts of the outcomes that occurred.

    >>> outcome_text({"old": 9, "new": 5, "mixed": 0, "nothing": 6})
    'old 9, new 5, nothing 6'
    """
    names = ("old", "new", "mixed", "nothing", "noticed", "silent", "harmless")
    return ", ".join(f"{name} {row[name]}" for name in names if row.get(name))


def _said(row: Row) -> str:
    return "; ".join([str(row["says"]), *(error_text(str(error)) for error in row.get("errors") or ())])


def _limits(results: Results) -> ReportTable:
    return _listed(
        "limits",
        "Limits of this machine",
        captions.LIMITS,
        [MODEL, ("limit", _text("name"))],
        [
            (">bytes", _size("bytes")),
            (">time", _seconds("seconds")),
            (">GB/s", lambda row: plain_text(row["gb_s"])),
        ],
        rows_of(results, "limits"),
    )


def _frameworks(results: Results) -> ReportTable:
    def line(row: Row) -> list[ReportCell]:
        versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
        took = seconds_text(row["install_s"]) if row.get("install_s") else ""
        return [
            ReportCell(text=text)
            for text in (row["framework"], "yes" if row["ok"] else "no", row["why"], versions, took)
        ]

    return ReportTable(
        key="frameworks",
        title="What was studied",
        says=captions.FRAMEWORKS,
        columns=["framework", "installed", "why", "versions", ">installed in"],
        lines=[line(row) for row in rows_of(results, "frameworks")],
    )


def _machine(results: Results) -> ReportTable:
    facts = {**results.get("machine", {}), **results.get("settings", {})}
    names = {name: captions.SETTINGS.get(name, name.replace("_", " ")) for name in facts}
    return ReportTable(
        key="machine",
        title="Machine and settings",
        says=captions.MACHINE,
        columns=["what", "here"],
        lines=[[ReportCell(text=names[name]), ReportCell(text=_fact(name, value))] for name, value in facts.items()],
    )


def _fact(name: str, value: Any) -> str:
    """Return a fact about the machine, or a setting, as a text.

    >>> _fact("models", ["gpt", "lenet"]), _fact("quick", True), _fact("cores", 2), _fact("mtbf_s", 21600.0)
    ('gpt, lenet', 'yes', '2', '6 h')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "mtbf_s":
        return duration_text(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
