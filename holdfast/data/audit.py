"""The audit of a stream's ledger: pure functions that prove that no sample was lost or used twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.data.ledger import NAME, read_line
from holdfast.errors import HoldfastError

Line = Mapping[str, Any]
Place = tuple[int, int]  # epoch and shard


class LedgerError(HoldfastError):
    """A ledger is missing, or no ledger."""

    exit_code = 4


class Violation(HoldfastError):
    """A ledger shows that a sample was lost or used twice, or that a step is missing."""


@dataclass(kw_only=True)
class Findings:
    """What a ledger tells of a run."""

    steps: int = 0
    samples: int = 0
    shards: int = 0  # that were begun
    of_shards: int = 0  # that the stream has
    lanes: int = 0
    epochs: int = 0  # that every lane has completed
    starts: int = 0  # of the run: 1, and one for each resume
    again: int = 0  # steps that were trained again after a resume
    workers: int = 0  # that have taken part
    lost: int = 0  # workers that were there at a step, and not at a later one
    torn: int = 0  # lines that a killed writer has left incomplete

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def read_ledgers(paths: Iterable[Path]) -> list[bytes]:
    """Return the lines of ledgers, or of those in folders. Raises ``LedgerError`` if there is none."""
    lines: list[bytes] = []
    for path in paths:
        file = path / NAME if path.is_dir() else path
        try:
            lines += file.read_bytes().split(b"\n")
        except OSError as e:
            raise LedgerError(
                f"there is no ledger {file}: {e.strerror}",
                hint="a run with a stream writes it into its checkpoints' folder, else into its --log-dir",
            ) from e
    return [line for line in lines if line]


def audit(lines: Sequence[bytes]) -> Findings:
    """Return what a ledger tells. Raises ``Violation`` for the first thing that is wrong; ``LedgerError``: it is none.

    >>> head = b'{"ledger": 1, "start": "a", "shards": ["x"], "lanes": 1}'
    >>> line = b'{"start":"a","step":0,"samples":2,"used":[[0,[[0,0,0,2]]]],"ends":[],"to":[[0,0,0,2]]}'
    >>> audit([head, line]).samples
    2
    >>> audit([head, line.replace(b"0,0,0,2]]]]", b"0,0,1,3]]]]")])
    Traceback (most recent call last):
    holdfast.data.audit.Violation: step 0: sample 0 of x was lost (epoch 0: the step has used samples 1..2)
    """
    read = [read_line(line) for line in lines]
    known = [line for line in read if line is not None]
    heads = [line for line in known if "ledger" in line]
    if not heads or any("step" not in line and "ledger" not in line for line in known):
        raise LedgerError("this is no ledger of a stream", hint=f"its file is called {NAME}")
    _refuse_damage(known, heads[0])
    cut = [(head["lanes"], head["shards"]) for head in heads]
    for one in cut[1:]:
        if one != cut[0]:
            raise Violation("the stream had other shards or lanes after a resume", hint="its positions are void then")
    found = Findings(lanes=cut[0][0], of_shards=len(cut[0][1]), torn=len(read) - len(known))
    names = cut[0][1]
    _count_workers(found, known)
    audited = _Audit(lanes=found.lanes, names=names)
    for record in _valid(found, [line for line in known if "step" in line]):
        audited.step(record)
        found.steps += 1
        found.samples += record["samples"]
    found.shards = len({shard for (_, shard), number in audited.taken.items() if number})
    found.epochs = min(audited.epoch_of(lane) for lane in range(found.lanes))
    return found


def _refuse_damage(known: Sequence[Line], head: Line) -> None:
    """Raise ``LedgerError`` for a line that no writer writes: the audit could end in anything, or never."""
    for number, line in enumerate(known, 1):
        if not (_is_head(line) if "ledger" in line else _is_head(head) and _is_record(line, head)):
            raise LedgerError(
                f"line {number} of the ledger is damaged: {str(dict(line))[:80]}",
                hint="only torn lines are expected; was the file edited, or its disk full?",
            )


def _is_head(line: Line) -> bool:
    """Whether a first line names its start and shards, and has a lane for some of them each."""
    shards, lanes = line.get("shards"), line.get("lanes")
    named = isinstance(shards, list) and all(isinstance(name, str) for name in shards)
    return isinstance(line.get("start"), str) and named and type(lanes) is int and 1 <= lanes <= len(line["shards"])


def _is_record(line: Line, head: Line) -> bool:
    """Whether a step's line has what ``StreamFeed`` records, about shards and lanes that there are."""
    used, ends, to = line.get("used"), line.get("ends"), line.get("to")
    reads = isinstance(used, list) and all(isinstance(read, list) and len(read) == 2 for read in used)
    if not reads or not all(isinstance(read[1], list) for read in line["used"]):
        return False
    spans = [span for _, found in line["used"] for span in found]
    if not (_are_rows(spans, 4) and _are_rows(ends, 3) and _are_rows(to, 4)):
        return False
    shards = [row[1] for row in (*spans, *line["ends"])] + [row[2] for row in line["to"]]
    known = all(shard < len(head["shards"]) for shard in shards) and all(row[0] < head["lanes"] for row in line["to"])
    workers = line.get("workers", [])
    numbered = type(line.get("step")) is int and type(line.get("samples")) is int
    named = isinstance(workers, list) and all(isinstance(name, str) for name in [*workers, line.get("start")])
    return known and numbered and named


def _are_rows(rows: Any, length: int) -> bool:
    """Whether these are lists of so many whole numbers from 0 on."""
    return isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == length and all(type(number) is int and number >= 0 for number in row)
        for row in rows
    )


def _count_workers(found: Findings, known: Sequence[Line]) -> None:
    seen: set[str] = set()
    gone: set[tuple[str, str]] = set()
    before: tuple[str, set[str]] = ("", set())
    for line in known:
        if "workers" in line:
            now = (line["start"], set(line["workers"]))
            gone |= {(now[0], worker) for worker in before[1] - now[1] if before[0] == now[0]}
            seen |= {f"{line['start']} {worker}" for worker in now[1]}
            before = now
    found.workers, found.lost = len(seen), len(gone)


def _valid(found: Findings, records: Sequence[Line]) -> Iterator[Line]:
    """Yield the records that count, step by step: a later start replaces those of earlier ones from its first step on.

    Raises ``Violation`` if a step is missing, or if two records of the same start contradict each other.
    """
    chosen: dict[int, Line] = {}
    starts: list[str] = []
    for record in records:
        step, start = record["step"], record["start"]
        if start not in starts:
            starts.append(start)
            replaced = [each for each in chosen if each >= step]
            found.again += len(replaced)
            for each in replaced:
                del chosen[each]
        elif step in chosen and _content(chosen[step]) != _content(record):
            raise Violation(f"step {step}: two records of it contradict each other", hint="please report this")
        chosen[step] = record
    found.starts = len(starts)
    for number, step in enumerate(sorted(chosen)):
        if step != number:
            raise Violation(f"step {number} is not in the ledger, but step {step} is")
        yield chosen[step]


def _content(record: Line) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("workers", "start")}


@dataclass(kw_only=True)
class _Audit:
    """Follows the lanes of a stream from step to step."""

    lanes: int
    names: Sequence[str]
    taken: dict[Place, int] = field(default_factory=lambda: defaultdict(int))  # samples of a shard that are used
    ended: dict[Place, int] = field(default_factory=dict)  # samples of shards that were read to their end
    at: dict[int, Place] = field(default_factory=dict)  # by lane: where it is

    def step(self, record: Line) -> None:
        """Take a step's record into account. Raises ``Violation``."""
        at = f"step {record['step']}"
        number = sum(self._use(at, *span) for _, spans in record["used"] for span in spans)
        if number != record["samples"]:
            raise Violation(f"{at}: it has {record['samples']} samples, and has used {number}")
        for epoch, shard, samples in record["ends"]:
            self._compare(at, epoch, shard, samples, "which has ended there")
            self.ended[epoch, shard] = samples
        for lane, epoch, shard, taken in record["to"]:
            if taken:
                self._compare(at, epoch, shard, taken, "where the run is")
            if self.at.get(lane) != (epoch, shard):
                self._look_behind(at, lane, epoch)
                self.at[lane] = (epoch, shard)

    def _use(self, at: str, epoch: int, shard: int, first: int, stop: int) -> int:
        place, expected = (epoch, shard), self.taken[epoch, shard]
        if first > expected:
            raise Violation(
                f"{at}: {_samples(expected, first)} of {self.names[shard]} {_were(expected, first)} lost",
                hint=f"epoch {epoch}: the step has used {_samples(first, stop)}",
            )
        if first < expected or place in self.ended:
            end = min(stop, expected)
            again = f"{_samples(first, end)} of {self.names[shard]} {_were(first, end)} used twice"
            raise Violation(f"{at}: {again}", hint=f"epoch {epoch}")
        self.taken[place] = stop
        return stop - first

    def _compare(self, at: str, epoch: int, shard: int, samples: int, why: str) -> None:
        used = self.taken[epoch, shard]
        if used < samples:
            lost = _samples(used, samples)
            raise Violation(
                f"{at}: {lost} of {self.names[shard]} {_were(used, samples)} lost", hint=f"epoch {epoch}, {why}"
            )
        if used > samples:
            raise Violation(f"{at}: {self.names[shard]} has {samples} samples, and {used} are used", hint=why)

    def _look_behind(self, at: str, lane: int, epoch: int) -> None:
        """Raise ``Violation`` if a lane has left a shard before its end. ``epoch``: the one that it has come to."""
        mine = range(lane, len(self.names), self.lanes)
        for shard in mine:
            if epoch and (epoch - 1, shard) not in self.ended:
                raise Violation(
                    f"{at}: {self.names[shard]} was left after {self.taken.get((epoch - 1, shard), 0)} samples",
                    hint=f"epoch {epoch - 1}",
                )
        under_way = [shard for shard in mine if self.taken.get((epoch, shard)) and (epoch, shard) not in self.ended]
        if len(under_way) > 1:
            names = " and ".join(self.names[shard] for shard in under_way)
            raise Violation(f"{at}: one lane reads {names} at once", hint=f"epoch {epoch}")

    def epoch_of(self, lane: int) -> int:
        """Return the number of epochs that a lane has completed."""
        mine, epoch = range(lane, len(self.names), self.lanes), 0
        while all((epoch, shard) in self.ended for shard in mine):
            epoch += 1
        return epoch


def _samples(first: int, stop: int) -> str:
    return f"sample {first}" if stop - first == 1 else f"samples {first}..{stop - 1}"


def _were(first: int, stop: int) -> str:
    return "was" if stop - first == 1 else "were"
