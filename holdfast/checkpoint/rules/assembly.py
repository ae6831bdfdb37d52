"""Assembles logical tensors out of fragments, by rules; a fragment that does not fit its rule is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, overload

import torch

from holdfast.checkpoint.pieces import Box, Piece, Shape, Stored, TensorEntry, entry_of, flat_boxes
from holdfast.checkpoint.rules.language import Rule, Rules, Target
from holdfast.checkpoint.rules.patterns import (
    FragmentPart,
    Misfit,
    Partial,
    PlacedFragment,
    Replicate,
    TensorBlock,
    assemble,
)
from holdfast.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """The part of a tensor that one holder has.

    ``place`` says where the holder stands along each axis of the layout, e.g. ``{"tp": 0, "pp": 1}``.
    ``unflattened`` is the shape before it was flattened, for a ``Flat`` fragment. ``stored`` is where its
    elements lie; what lies in several arrays is an ``TensorEntry``.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    place: Mapping[str, int]
    holder: int
    stored: Stored | TensorEntry | None = None
    unflattened: Shape | None = None

    @property
    def where(self) -> str:
        """The place as text, for errors."""
        return ", ".join(f"{axis} {at}" for axis, at in self.place.items()) or "no place"


@dataclass(frozen=True, kw_only=True)
class Laid:
    """A logical tensor and the parts of fragments that hold it. Parts with the same box are copies.

    ``mean``: each part has other values for the whole tensor, which is their mean.
    """

    shape: Shape
    dtype: torch.dtype
    parts: tuple[FragmentPart, ...]
    mean: bool = False


def lay_out(fragments: Sequence[Fragment], rules: Rules, *, axes: Mapping[str, int] | None = None) -> dict[str, Laid]:
    """The logical tensors that fragments make up, by their new names; from names, shapes and places alone.

    An axis has as many places as ``axes`` says, or else as the fragments show; then nobody notices that the last
    holder is missing altogether. Raises ``CheckpointError`` for fragments that do not fit their rule, ``UsageError``
    for rules that do not match every tensor exactly once.

    >>> from holdfast.checkpoint.rules import Shard
    >>> halves = [Fragment(name="w", shape=(2,), dtype=torch.float32, place={"tp": i}, holder=i) for i in range(2)]
    >>> lay_out(halves, Rules([Rule(match="w", pattern=Shard(dim=0))]))["w"].shape
    (4,)
    """
    sizes = _axis_sizes(fragments, axes or {})
    targets = rules.targets(fragment.name for fragment in fragments)
    placed = {(targets[one.name].seen, _spot(one)): one for one in fragments}
    groups: dict[str, list[int]] = {}
    for index, fragment in enumerate(fragments):
        groups.setdefault(targets[fragment.name].name, []).append(index)
    laid = {}
    for name, indices in groups.items():
        members = {index: fragments[index] for index in indices}
        old = fragments[indices[0]].name
        try:
            rule = _rule_of([(one, targets[one.name]) for one in members.values()], placed)
            laid[name] = _lay_out_one(members, rule, sizes)
        except Misfit as misfit:
            shown = name if name == old else f"{old} (renamed to {name})"
            raise CheckpointError(f"{shown}: {misfit}") from misfit
    return laid


def merge(
    fragments: Sequence[Fragment], rules: Rules, *, axes: Mapping[str, int] | None = None
) -> dict[str, TensorEntry]:
    """The logical tensors that stored fragments make up, as :func:`lay_out`; keeps all copies, see :func:`copies`."""
    entries = {}
    for name, laid in lay_out(fragments, rules, axes=axes).items():
        pieces = tuple(piece for part in laid.parts for piece in _pieces(fragments[part.fragment], part))
        if laid.mean and len(pieces) > len(laid.parts):
            raise CheckpointError(f"{name}: what is to be averaged must lie in one array on each holder")
        entries[name] = TensorEntry(shape=laid.shape, dtype=laid.dtype, pieces=pieces, mean=laid.mean)
    return entries


Part = TypeVar("Part", FragmentPart, Piece)


@overload
def copies(tensor: Laid) -> list[tuple[FragmentPart, FragmentPart]]: ...
@overload
def copies(tensor: TensorEntry) -> list[tuple[Piece, Piece]]: ...
def copies(tensor: Laid | TensorEntry) -> list[tuple[FragmentPart, FragmentPart]] | list[tuple[Piece, Piece]]:
    """Pairs that the rules declare to be equal: the first holder of each box with every other one.

    >>> both = [Fragment(name="w", shape=(2,), dtype=torch.float32, place={"tp": i}, holder=i) for i in range(2)]
    >>> laid = lay_out(both, Rules([Rule(match="w", pattern=Replicate())]))["w"]
    >>> [(a.fragment, b.fragment) for a, b in copies(laid)]
    [(0, 1)]
    """
    if tensor.mean:
        return []
    return _twins(tensor.parts) if isinstance(tensor, Laid) else _twins(tensor.pieces)


def _twins(held: Sequence[Part]) -> list[tuple[Part, Part]]:
    first: dict[Box, Part] = {}
    return [(first[one.box], one) for one in held if first.setdefault(one.box, one) is not one]


def _axis_sizes(fragments: Sequence[Fragment], known: Mapping[str, int]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for fragment in fragments:
        for axis, at in fragment.place.items():
            if not 0 <= at < known.get(axis, at + 1):
                places = f"has {known[axis]} places" if axis in known else "begins at 0"
                raise CheckpointError(f"{fragment.name} lies at {axis} {at}, but {axis} {places}")
            sizes[axis] = max(sizes.get(axis, 0), at + 1)
    return {**sizes, **known}


def _spot(fragment: Fragment) -> frozenset[tuple[str, int]]:
    return frozenset(fragment.place.items())


def _rule_of(
    members: Sequence[tuple[Fragment, Target]], placed: Mapping[tuple[str, frozenset[tuple[str, int]]], Fragment]
) -> Rule:
    """The rule of a tensor.

    A slot goes by its parameter's rule only if it has the parameter's shape on each holder. A single number, such as
    a step, cannot have been cut: it is the same everywhere.
    """
    rules = {target.rule for _, target in members}
    if len(rules) > 1:
        raise Misfit(f"tensors of different rules get this name: {', '.join(sorted(rule.match for rule in rules))}")
    rule = rules.pop()
    for fragment, target in members:
        if target.follows is None:
            continue
        parameter = placed.get((target.follows, _spot(fragment)))
        if parameter is not None and parameter.shape == fragment.shape:
            continue
        if all(math.prod(one.shape) == 1 for one, _ in members):
            return replace(rule, pattern=Replicate(), copies=(), rename=None)
        shape = "is not there" if parameter is None else f"has the shape {parameter.shape}"
        raise Misfit(
            f"it has the shape {fragment.shape} at {fragment.where}, but {target.follows}, whose rule it goes by, "
            f"{shape} there; give it a rule that matches its own name"
        )
    return rule


def _lay_out_one(members: Mapping[int, Fragment], rule: Rule, sizes: Mapping[str, int]) -> Laid:
    varying = _varying(list(members.values()))
    first = next(iter(members.values()))
    same = varying if isinstance(rule.pattern, Replicate) else [axis for axis in varying if axis in rule.copies]
    cut = [step.axis for step in rule.steps]
    mean = isinstance(rule.pattern, Partial)
    stray = [axis for axis in varying if axis not in same and axis not in cut]
    if stray and not mean:
        at = sorted({one.place[stray[0]] for one in members.values()})
        raise Misfit(
            f"it lies at {stray[0]} {', '.join(map(str, at))}, about which {rule} says nothing; "
            f"copies: [{stray[0]}] would declare that they are equal"
        )
    sets: dict[tuple[int, ...], list[PlacedFragment]] = {}
    for index, one in members.items():
        member = PlacedFragment(index=index, place=one.place, shape=one.shape, unflattened=one.unflattened)
        sets.setdefault(tuple(one.place[axis] for axis in (stray if mean else same)), []).append(member)
    if mean:  # copies of a value must not count twice
        sets = {at: group[:1] for at, group in sets.items()}
    blocks = [assemble(group, rule.steps, sizes) for group in sets.values()]
    _refuse_unlike(blocks, members)
    parts = tuple(part for block in blocks for part in block.parts)
    return Laid(shape=blocks[0].shape, dtype=first.dtype, parts=parts, mean=mean)


def _varying(members: Sequence[Fragment]) -> list[str]:
    """The axes along which a tensor's fragments lie at several places; refuses two fragments at one place."""
    first = members[0]
    seen: dict[frozenset[tuple[str, int]], Fragment] = {}
    for one in members:
        if one.dtype != first.dtype:
            raise Misfit(f"it is {first.dtype} at {first.where}, but {one.dtype} at {one.where}")
        if one.place.keys() != first.place.keys():
            raise Misfit(f"its places have different axes: {first.where}; {one.where}")
        twin = seen.setdefault(_spot(one), one)
        if twin is not one:
            raise Misfit(f"there are two fragments at {one.where}, of holders {twin.holder} and {one.holder}")
    return [axis for axis in first.place if len({one.place[axis] for one in members}) > 1]


def _refuse_unlike(blocks: Sequence[TensorBlock], members: Mapping[int, Fragment]) -> None:
    first = blocks[0]
    for block in blocks[1:]:
        if block.shape != first.shape:
            raise Misfit(f"its copies have different shapes: {first.shape} and {block.shape}")
        for a, b in zip(first.parts, block.parts, strict=False):
            if a.box != b.box:
                raise Misfit(
                    f"its copies are cut differently: {a.box} at {members[a.fragment].where}, "
                    f"{b.box} at {members[b.fragment].where}"
                )


def _pieces(fragment: Fragment, part: FragmentPart) -> Iterator[Piece]:
    """The pieces of a logical tensor that a part of a stored fragment gives."""
    assert fragment.stored is not None, f"{fragment.name} of holder {fragment.holder} is not stored"
    entry = fragment.stored if isinstance(fragment.stored, TensorEntry) else entry_of(fragment.stored)
    assert entry.shape == fragment.shape, f"{fragment.name} is stored as {entry.shape}, not {fragment.shape}"
    assert not entry.mean, f"{fragment.name} is not a part but a mean"
    for piece in entry.pieces:
        common = piece.box.intersect(part.local)
        if common is None:
            continue
        stored = piece.stored.part(common.relative_to(piece.box))
        begin = common.relative_to(part.local)
        if part.local.shape == part.box.shape:
            yield Piece(box=_shifted(begin, part.box), stored=stored)
            continue
        if not stored.is_contiguous:
            raise CheckpointError(f"{fragment.name} is flat, but in {stored.file} it is not contiguous")
        done = 0
        for box in flat_boxes(part.box.shape, begin.offset[0], begin.offset[0] + begin.numel):
            yield Piece(box=_shifted(box, part.box), stored=stored.flat(done, done + box.numel, box.shape))
            done += box.numel


def _shifted(box: Box, by: Box) -> Box:
    return Box(offset=tuple(a + b for a, b in zip(box.offset, by.offset, strict=True)), shape=box.shape)
