"""Advice on compression, fsync, and saves in the background."""

from __future__ import annotations

from holdfast.study.advice.sentence import Advice
from holdfast.study.numbers import listed, share_text
from holdfast.study.rows import Results, Row, main_costs, measured, middle, name_of, overlap, same_format
from holdfast.words import seconds_text, size_text

RAW = " raw"  # suffix of a compressing format's name when it does not compress
ASYNC = " async"  # suffix of a format's name when it saves in the background
NAMED = 3  # most formats in a list
NOTICED = 2.0  # times the stall; lost time beyond this is worth a sentence


def on_compression(results: Results) -> list[Advice]:
    """Return advice on compression, from formats with and without it, of the largest model that has both."""
    pairs: dict[tuple[str, str], tuple[Row, Row]] = {}
    rows = measured(results, "formats")
    for packed in sorted(rows, key=lambda row: float(row["raw_bytes"])):
        twin = {**packed, "format": f"{packed['format']}{RAW}"}
        plain = same_format(rows, twin, model=packed["model"], compressed=False)
        if packed["compressed"] and plain is not None:
            pairs[packed["framework"], packed["format"]] = packed, plain
    if not pairs:
        return []
    said = [_worth(packed, plain) for packed, plain in pairs.values()]
    rests = [row for pair in pairs.values() for row in pair]
    return [Advice(axis="formats", sentence=" ".join(said), rests_on=rests)]


def _worth(packed: Row, plain: Row) -> str:
    """Return what compression saves and costs, and the speed of a disk above which it cannot pay."""
    sizes = [row["bytes"] for row in (packed, plain)]
    by, saved = f"Compression by {name_of(packed)}", sizes[1] - sizes[0]
    if saved <= 0:
        against = " against ".join(map(size_text, sizes))
        return f"{by} makes {plain['model']} no smaller ({against}): leave it off."
    text = f"{by} saves {size_text(saved)} of {plain['model']} ({share_text(saved / sizes[1])})"
    if overlap(packed, plain, "save_s"):
        return f"{text}, with no difference in time that could be told here."
    long, short = (middle(row, "save_s") for row in (packed, plain))
    text += f" and takes {_times(long, short)}"
    if long <= short:
        return f"{text}: leave it on."
    return f"{text}: worth it only on a disk or network slower than {_speed(saved, long - short)}."


def _times(one: float, other: float) -> str:
    """Return how many times as long, in words.

    >>> _times(6.0, 0.25), _times(1.0, 0.0)
    ('24 times as long', 'longer')
    """
    return f"{one / other:.2g} times as long" if other > 0 else "longer"


def _speed(nbytes: float, seconds: float) -> str:
    """Return bytes per second, as a text.

    >>> _speed(15_000_000, 7.5)
    '2 MB/s'
    """
    return f"{size_text(nbytes / seconds)}/s"


def on_durability(results: Results) -> list[Advice]:
    """Return advice on formats that return before their data is on the disk, though not in the background."""
    rows = [row for row in main_costs(results) if row["durable_on_return"] is False and not row["background"]]
    if not rows:
        return []
    synced = [row for row in rows if (row.get("parts") or {}).get("fsync")]
    text = (
        f"Call fsync on the files and their folder after saving as {listed([name_of(row) for row in rows], NAMED)}: "
        "the call returns before the data is on the disk. No kill shows that, but a power cut does."
    )
    if synced:
        times = [float(row["parts"]["fsync"]) for row in synced]
        low, high = seconds_text(min(times)), seconds_text(max(times))
        text += f" The sync took {low if low == high else f'{low} to {high}'}."
    return [Advice(axis="cost", sentence=text, rests_on=rows)]


def on_stalls(results: Results) -> list[Advice]:
    """Return advice on saves in the background that return soon, but slow training down."""
    costs = main_costs(results)
    rows = [row for row in costs if row["background"] and middle(row, "lost_s") > NOTICED * middle(row, "stall_s")]
    if not rows:
        return []
    rows = sorted(rows, key=lambda row: middle(row, "stall_s") - middle(row, "lost_s"))[:NAMED]
    said, rests = [], list(rows)
    for row in rows:
        text = f"{name_of(row)} returns after {seconds_text(middle(row, 'stall_s'))} and costs "
        text += f"{seconds_text(middle(row, 'lost_s'))}"
        blocking = same_format(costs, {**row, "format": row["format"].removesuffix(ASYNC)}, background=False)
        if blocking is not None:
            text += f" (not in the background: {seconds_text(middle(blocking, 'lost_s'))})"
            rests.append(blocking)
        said.append(text)
    text = f"A save in the background returns soon, but slows the steps beside it: {'; '.join(said)}."
    return [Advice(axis="cost", sentence=text, rests_on=rests)]
