"""Rules in a script that has cut its tensors by hand: where each rank's plain tensors lie in the logical ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.checkpoint.held import Held, HeldPart
from holdfast.checkpoint.pieces import Box, Shape
from holdfast.checkpoint.rules import Fragment, Laid, Rules, lay_out
from holdfast.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Shape and dtype of a rank's plain tensor, which the other ranks need to know."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Local:
    """The place of a rank's tensor in the logical one.

    ``shape`` is the logical tensor's, ``own`` the rank's; ``boxes`` are pairs of a box in the logical tensor and the
    box in the rank's own that holds it.
    """

    shape: Shape
    own: Shape
    boxes: tuple[tuple[Box, Box], ...]

    def held(self, tensor: torch.Tensor) -> Held:
        """The parts of the logical tensor that lie in this memory."""
        return Held(
            shape=self.shape,
            dtype=tensor.dtype,
            parts=tuple(HeldPart(box=box, tensor=_view(tensor, box, inner)) for box, inner in self.boxes),
        )


def _view(tensor: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
    found = tensor.detach()[inner.slices()]
    return found if tuple(found.shape) == box.shape else found.view(box.shape)  # a range of a flat tensor


def locals_of(
    tensors: Sequence[Mapping[str, Plain]], places: Sequence[Mapping[str, int]], rules: Rules
) -> list[dict[str, Local]]:
    """For each rank, the places of its tensors in the logical ones. Pure: all ranks get the same result, or error.

    >>> from holdfast.checkpoint.rules import Rule, Shard
    >>> half = Plain(shape=(2, 3), dtype=torch.float32)
    >>> rules = Rules([Rule(match="model/w", pattern=Shard(dim=0))])
    >>> found = locals_of([{"model/w": half}] * 2, [{"tp": 0}, {"tp": 1}], rules)
    >>> found[1]["model/w"].shape, found[1]["model/w"].boxes[0][0].offset
    ((4, 3), (2, 0))
    """
    fragments = [
        Fragment(name=name, shape=plain.shape, dtype=plain.dtype, place=place, holder=rank)
        for rank, (mine, place) in enumerate(zip(tensors, places, strict=True))
        for name, plain in mine.items()
    ]
    found: list[dict[str, Local]] = [{} for _ in tensors]
    for name, laid in lay_out(fragments, rules).items():
        _refuse(name, laid, fragments)
        for index in dict.fromkeys(part.fragment for part in laid.parts):
            boxes = tuple((part.box, part.local) for part in laid.parts if part.fragment == index)
            found[fragments[index].holder][name] = Local(shape=laid.shape, own=fragments[index].shape, boxes=boxes)
    return found


def _refuse(name: str, laid: Laid, fragments: Sequence[Fragment]) -> None:
    if laid.mean:
        raise UsageError(f"{name} is partial: each rank has other values", hint="average them before they are saved")
    old = fragments[laid.parts[0].fragment].name if laid.parts else name
    if old != name:
        raise UsageError(
            f"a rule renames {old} to {name}", hint="in a script, rename when the checkpoint is opened or converted"
        )
