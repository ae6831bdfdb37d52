"""Compares two checkpoints of any formats, tensor by tensor and value by value, in bounded memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.checkpoint.diff_tensors import Pair, Tally, compare
from holdfast.checkpoint.disk import Progress, silent
from holdfast.checkpoint.pieces import Catalogue, Ref, TensorEntry, path_of
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.checkpoint.trees import Leaves, groups_of, leaf_name, leaves, shape_text
from holdfast.codec import dtype_name
from holdfast.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Row:
    """One difference between two checkpoints.

    ``kind`` is "values" (of a tensor), "dtype", "shape", "value" (of something else), "only in A" or "only in B".
    ``a`` and ``b`` say what is there; ``differing`` of ``elements`` differ, by at most ``largest``.
    """

    name: str
    kind: str
    a: str = ""
    b: str = ""
    differing: int = 0
    elements: int = 0
    largest: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values; JSON has no infinity and no NaN."""
        largest = self.largest if self.largest is None or math.isfinite(self.largest) else str(self.largest)
        return {**vars(self), "largest": largest}


@dataclass(kw_only=True)
class CheckpointDiff:
    """All differences between two checkpoints, how much is equal, and what was not compared.

    ``equal`` tensors have the same bits, ``close`` ones are within the tolerance, ``values`` counts other equal
    values. Only ``sections`` were compared; ``only_a`` and ``only_b`` are sections of one side.
    """

    rows: list[Row] = field(default_factory=list)
    equal: int = 0
    close: int = 0
    values: int = 0
    sections: list[str] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        return not self.rows

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        shown = {name: value for name, value in vars(self).items() if name != "rows"}
        return {"same": self.same, **shown, "rows": [row.to_json() for row in self.rows]}


def parse_rename(text: str) -> tuple[re.Pattern[str], str]:
    """A pattern and its replacement from ``regex=replacement``; ``UsageError`` if it is not that.

    >>> parse_rename("^model/transformer[.]=model/")[1]
    'model/'
    """
    pattern, sign, replacement = text.partition("=")
    try:
        regex = re.compile(pattern)
        regex.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text} is not a regular expression and its replacement: {error}") from error
    if not sign or not pattern:
        raise UsageError(f"--rename {text} is not REGEX=REPLACEMENT", hint="such as 'model/module[.]=model/'")
    return regex, replacement


class Comparison:
    """A comparison of two catalogues.

    Making it decides, without reading a tensor, which tensors and values belong together; :meth:`run` compares them.
    ``sections`` are the keys of the tree to compare (default: all that both have), ``renames`` change names of A first,
    elements that differ by at most ``tolerance`` are close. Raises ``UsageError`` for a section or a rename that
    fits nothing.
    """

    def __init__(
        self,
        a: Catalogue,
        b: Catalogue,
        *,
        sections: Sequence[str] = (),
        renames: Sequence[tuple[re.Pattern[str], str]] = (),
        tolerance: float | None = None,
    ) -> None:
        self.a, self.b, self.tolerance = a, b, tolerance
        self.result = CheckpointDiff()
        self._choose(sections)
        left = leaves({key: a.tree[key] for key in self.result.sections})
        right = leaves({key: b.tree[key] for key in self.result.sections})
        self.pairs: list[Pair] = []
        self._twins: dict[Pair, list[str]] = {}
        self._match(self._numbered(_renamed(left, renames), right), right)

    @property
    def bytes(self) -> int:
        """The number of bytes that :meth:`run` will read."""
        return sum(self.a.tensors[pair.a].nbytes + self.b.tensors[pair.b].nbytes for pair in self.pairs)

    def run(self, *, progress: Progress = silent) -> CheckpointDiff:
        """Reads all pairs of tensors and returns what differs; ``progress`` is called with the bytes read."""
        tallies = compare(self.a, self.b, self.pairs, tolerance=self.tolerance or 0.0, progress=progress)
        for pair, tally in tallies.items():
            for name in [pair.name, *self._twins.get(pair, [])]:
                self._conclude(replace(pair, name=name), tally)
        self.result.rows.sort(key=lambda row: row.kind.startswith("only"))
        return self.result

    def _choose(self, sections: Sequence[str]) -> None:
        for name in sections:
            if name not in self.a.tree and name not in self.b.tree:
                known = ", ".join(map(str, dict.fromkeys([*self.a.tree, *self.b.tree])))
                raise UsageError(f"neither checkpoint has a section {name!r}", hint=f"they have {known}")
        wanted = [key for key in dict.fromkeys([*self.a.tree, *self.b.tree]) if not sections or key in sections]
        self.result.sections = [key for key in wanted if key in self.a.tree and key in self.b.tree]
        self.result.only_a = [key for key in wanted if key not in self.b.tree]
        self.result.only_b = [key for key in wanted if key not in self.a.tree]
        # A missing section is a difference if it was asked for; else it is only named. Two checkpoints without
        # a common section are different.
        told = sections or not self.result.sections
        asked = [("only in A", self.result.only_a), ("only in B", self.result.only_b)] if told else []
        self.result.rows += [Row(name=name, kind=kind) for kind, names in asked for name in names]

    def _numbered(self, left: Leaves, right: Leaves) -> Leaves:
        """Leaves of A in which an optimizer's parameters are called as in B.

        Only where one goes by numbers and the other by names: both list their parameters in the same order.
        """
        for section in self.result.sections:
            ours, theirs = _parameters(self.a.tree[section]), _parameters(self.b.tree[section])
            if len(ours) == len(theirs) > 0 and (_by_number(ours) != _by_number(theirs)):
                self.result.notes.append(f"one {section} goes by numbers: its parameters are compared in their order")
                begins = {
                    leaf_name((section, part, x)) + "/": leaf_name((section, part, y)) + "/"
                    for part in ("state", "param_groups")
                    for x, y in zip(ours, theirs, strict=True)
                }
                left = {_moved(name, begins): value for name, value in left.items()}
        return left

    def _match(self, left: Leaves, right: Leaves) -> None:
        known: dict[tuple[str, str], Pair] = {}
        for name in (name for name in left if name in right):
            x, y = left[name], right[name]
            if isinstance(x, Ref) and isinstance(y, Ref):
                pair = known.setdefault((x.name, y.name), Pair(name=name, a=x.name, b=y.name))
                if pair.name != name:  # tied on both sides: read once
                    self._twins.setdefault(pair, []).append(name)
            elif not _same(_number(self.a, x), _number(self.b, y)):
                self.result.rows.append(Row(name=name, kind="value", a=_text(x), b=_text(y)))
            else:
                self.result.values += 1
        for name, pair in [(pair.name, pair) for pair in known.values()]:
            x, y = self.a.tensors[pair.a], self.b.tensors[pair.b]
            if x.shape == y.shape:
                self.pairs.append(pair)
            else:
                self.result.rows.append(Row(name=name, kind="shape", a=shape_text(x.shape), b=shape_text(y.shape)))
        self._left_out()
        self._only("only in A", left, right)
        self._only("only in B", right, left)

    def _left_out(self) -> None:
        """Compares frozen weights that neither checkpoint holds, by their digests."""
        for name in (name for name in self.a.left_out if name in self.b.left_out):
            if path_of(name)[0] in self.result.sections and (same := _same_content(self.a, self.b, name)) is not True:
                if same is None:
                    self.result.notes.append(f"{name} is in neither, and was cut otherwise: not compared")
                else:
                    self.result.rows.append(Row(name=name, kind="value", a="frozen, left out", b="other weights"))

    def _only(self, kind: str, here: Leaves, there: Leaves) -> None:
        """Notes what only one side has. A second name of a tensor that both sides have is no difference."""
        shared = {value.name for name, value in here.items() if isinstance(value, Ref) and name in there}
        for name in (name for name in here if name not in there):
            value = here[name]
            if isinstance(value, Ref) and value.name in shared:
                self.result.notes.append(f"{name}, {kind}, is a second name of {value.name}")
            else:
                a, b = (_text(value), "") if kind == "only in A" else ("", _text(value))
                self.result.rows.append(Row(name=name, kind=kind, a=a, b=b))

    def _conclude(self, pair: Pair, tally: Tally) -> None:
        x, y = self.a.tensors[pair.a], self.b.tensors[pair.b]
        if x.dtype == y.dtype and not tally.differing:
            self.result.equal += 1
        elif self.tolerance is not None and not tally.beyond:
            self.result.close += 1
        else:
            kind = "values" if x.dtype == y.dtype else "dtype"
            row = Row(name=pair.name, kind=kind, a=dtype_name(x.dtype), b=dtype_name(y.dtype))
            counted = tally.differing if self.tolerance is None else tally.beyond
            self.result.rows.append(replace(row, differing=counted, elements=_numel(x), largest=tally.largest))


# --- names ----------------------------------------------------------------------------------------


def _renamed(found: Leaves, renames: Sequence[tuple[re.Pattern[str], str]]) -> Leaves:
    made: Leaves = {}
    for name, value in found.items():
        new = name
        for pattern, replacement in renames:
            new = pattern.sub(replacement, new)
        if new in made:
            raise UsageError(f"--rename gives two things the name {new}", hint="make the expression more exact")
        made[new] = value
    unused = [pattern.pattern for pattern, _ in renames if not any(map(pattern.search, found))]
    if unused:
        raise UsageError(f"--rename {unused[0]} matches no name in A", hint="holdfast ckpt inspect lists the names")
    return made


def _parameters(optimizer: Any) -> list[Any]:
    return [name for group in groups_of(optimizer) or () for name in group["params"]]


def _by_number(parameters: Sequence[Any]) -> bool:
    return all(isinstance(name, int) for name in parameters)


def _moved(name: str, begins: Mapping[str, str]) -> str:
    cut = 0
    while (cut := name.find("/", cut) + 1) > 0:
        if name[:cut] in begins:
            return begins[name[:cut]] + name[cut:]
    return name


# --- values ---------------------------------------------------------------------------------------


def _number(catalogue: Catalogue, value: Any) -> Any:
    """A tensor of one element as a number: some formats keep an optimizer's step as a tensor, some as a number."""
    if isinstance(value, Ref) and _numel(catalogue.tensors[value.name]) == 1:
        return read_tensor(catalogue, value.name).item()
    return value


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal. A tuple may have become a list, an integer a float; 0.0 and -0.0 are not equal."""
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b)


def _text(value: Any) -> str:
    return "a tensor" if isinstance(value, Ref) else repr(value)


def _numel(entry: TensorEntry) -> int:
    return math.prod(entry.shape)


def _same_content(a: Catalogue, b: Catalogue, name: str) -> bool | None:
    """Whether two checkpoints that hold no copy of a frozen tensor had the same; None if their digests cannot tell."""
    x, y = a.digests[name], b.digests[name]
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    if [box for box, _ in x.boxes] != [box for box, _ in y.boxes]:
        return None
    return x.boxes == y.boxes
