"""Tables and sentences on a terminal, as wide as the terminal is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

ROWS = 20  # of a table at most, unless all are asked for: they fit on a screen
NARROW = 8  # characters that a folded column keeps at least, to stay readable
# Characters that move the cursor, clear the screen, or turn the direction of what follows; not tabs and line ends.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
WHOLE = 10_000  # columns of output into a pipe: no line is folded


def visible(text: str) -> str:
    """Return a text with control characters written out: a name in a file must not steer the terminal.

    >>> visible("layers.0\\x1b[2J")
    'layers.0\\\\x1b[2J'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def make_console(*, aside: bool = False, pipe: int = WHOLE) -> Console:
    """Return a console as wide as the terminal, or ``pipe`` columns wide for a pipe; ``aside``: on stderr."""
    console = Console(stderr=aside, highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(stderr=aside, highlight=False, width=pipe)


class Screen:
    """Prints tables and sentences; ``aside``: on stderr, where stdout is for JSON. A pipe gets every line whole.

    ``everything``: tables show all rows, not only the first ``ROWS``.
    """

    def __init__(self, console: Console | None = None, *, aside: bool = False, everything: bool = False) -> None:
        self.console = console or make_console(aside=aside)
        self.everything = everything

    def say(self, text: str = "", *, style: str = "") -> None:
        """Print a sentence, wrapped between words."""
        self.console.print(escape(visible(text)), style=style or None)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
        """Print a table.

        A column ``>name`` is aligned right, ``name~`` may be folded, ``name?`` may be left out if there is no room.
        Empty columns are always left out.
        """
        shown = [[visible(cell) for cell in row] for row in (rows if self.everything else rows[:ROWS])]
        longest = {
            name: max(len(name.strip(">~?")), *(len(row[number]) for row in shown))
            for number, name in enumerate(columns)
            if any(row[number] for row in shown)
        }
        widths = fitted(longest, self.console.width)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for name, width in widths.items():
            side: JustifyMethod = "right" if name.startswith(">") else "left"
            table.add_column(name.strip(">~?"), justify=side, width=width, overflow="fold")
        for row in shown:
            table.add_row(*(escape(cell) for name, cell in zip(columns, row, strict=True) if name in widths))
        if title:
            self.say(title, style="bold")
        self.console.print(table)
        self.more(len(rows) - len(shown))

    def more(self, number: int, noun: str = "") -> None:
        """Print how many rows are not shown, if any."""
        if number > 0:
            self.say(f"… and {number:,} more{noun} (--all shows them)", style="dim")


def fitted(longest: Mapping[str, int], room: int) -> dict[str, int]:
    """Return the widths of a table's columns within ``room``: as needed, but less for those that may be folded.

    >>> fitted({"name~": 40, ">size": 6, "files?": 5, "notes~": 10}, 40)
    {'name~': 20, '>size': 6, 'notes~': 10}
    """
    widths = dict(longest)
    for name in [name for name in reversed([*longest]) if name.endswith("?")]:
        if _total(widths) > room:
            del widths[name]
    for _ in range(max(0, _total(widths) - room)):
        folded = [name for name in widths if name.endswith("~") and widths[name] > NARROW]
        if not folded:
            break
        widths[max(folded, key=lambda name: widths[name])] -= 1
    return widths


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)
