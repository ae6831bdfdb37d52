"""What the ranks of a save tell each other: first what they hold, then what they have written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast import codec
from holdfast.checkpoint import frozen_saving, index
from holdfast.checkpoint.disk import checksum
from holdfast.checkpoint.frozen_saving import stored_beside
from holdfast.checkpoint.held import Held
from holdfast.checkpoint.objects import Described, describe
from holdfast.checkpoint.pieces import Box, Ref
from holdfast.checkpoint.places import Place
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.rules.hand_cut import Local, Plain
from holdfast.checkpoint.safetensors_writer import Written, bytes_of
from holdfast.checkpoint.who_writes import HeldBoxes
from holdfast.checks import truth

SMALL = 1 << 20  # bytes; copies of larger parameters and slots are compared in samples, or hashing would take longest
SAMPLES = 16  # stretches of a sampled tensor, SMALL bytes together


def prepare(
    tree: Mapping[str, Any], ranks: Ranks, place: Mapping[str, int] | None, trainable_only: bool, member: Place | None
) -> tuple[Described, bytes]:
    """A description of what this rank saves, and the text about it for the other ranks.

    ``member``: the checkpoint's path, if it is one of a series. The first rank says what the series has already.
    """
    truth("trainable_only", trainable_only)
    described = describe(tree, rank=ranks.rank, trainable_only=trainable_only)
    said = {
        "id": index.new_id(),
        "tree": codec.encode(described.tree, lambda value: value.name if isinstance(value, Ref) else None, "tree"),
        "tensors": {
            name: [
                codec.dtype_name(held.dtype),
                held.shape,
                [[part.box.offset, part.box.shape] for part in held.parts],
                name in described.leading,
                _digest(held, sample=name in described.sampled) if ranks.size > 1 else None,
            ]
            for name, held in described.held.items()
        },
        "place": dict(place or {}),
        "derived": [name for name, held in described.held.items() if held.derived],
        "tied": described.tied,
        "frozen": described.frozen,
        "buffers": described.buffers,
        "still": sorted(described.still),
        "left_out": sorted(described.left_out),
        "stored": None if member is None or ranks.rank else frozen_saving.to_json(stored_beside(member)),
    }
    return described, json.dumps(said).encode()


def agreed(what: str, everybody: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tensors of which every rank that knows them says that they are frozen, or left out."""
    names = dict.fromkeys(name for said in everybody for name in said[what])
    return [name for name in names if all(name in said[what] for said in everybody if name in said["tensors"])]


def _digest(held: Held, *, sample: bool) -> str | None:
    """A checksum by which ranks notice that copies of a tensor differ; None if this rank holds only a part of it.

    Parts that a script has cut by hand, without rules, look like copies: such a save must not succeed. Large
    tensors that are most likely equal (``sample``) are compared in samples.
    """
    whole = [part.tensor for part in held.parts if part.box.shape == held.shape and part.box.numel]
    if not whole:
        return None
    enough = sample and whole[0].nbytes > SMALL and whole[0].is_contiguous()
    return checksum(bytes_of(_samples(whole[0]) if enough else whole[0]))


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Some stretches of a large tensor, evenly spread."""
    flat = tensor.view(-1)
    length = SMALL // SAMPLES // tensor.element_size()
    return torch.cat([flat[start : start + length] for start in range(0, flat.numel(), flat.numel() // SAMPLES)])


def holdings(said: Mapping[str, Any]) -> dict[str, HeldBoxes]:
    """What a rank has said that it holds."""
    return {
        name: HeldBoxes(
            shape=tuple(shape),
            dtype=codec.dtype_of(dtype),
            boxes=tuple(Box(offset=tuple(offset), shape=tuple(size)) for offset, size in boxes),
            leading=leading,
            digest=digest,
        )
        for name, (dtype, shape, boxes, leading, digest) in said["tensors"].items()
    }


def plain(said: Mapping[str, Any]) -> dict[str, Plain]:
    """The plain tensors of a rank: only rules can tell what they are parts of."""
    derived = set(said["derived"])
    return {
        name: Plain(shape=holding.shape, dtype=holding.dtype)
        for name, holding in holdings(said).items()
        if name not in derived
    }


def cut(holdings: Mapping[str, HeldBoxes], parts: Mapping[str, Local]) -> dict[str, HeldBoxes]:
    """What a rank holds of tensors that were cut by hand, by the places that rules give its parts."""
    return {
        name: HeldBoxes(
            shape=part.shape,
            dtype=holdings[name].dtype,
            boxes=tuple(box for box, _ in part.boxes),
            leading=holdings[name].leading,
            digest=holdings[name].digest if part.shape == part.own else None,
        )
        for name, part in parts.items()
    }


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """A rank's report: the file that it has written, who wrote it (for people), and what is in it.

    ``shared``: what it has written for the whole series, under the same name in the shared folder; None: nothing.
    ``digests``: of frozen tensors, those boxes that were this rank's to write or to leave out.
    """

    file: str
    writer: str
    written: Written
    shared: Written | None = None
    digests: Mapping[str, Sequence[tuple[Box, str]]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The number of bytes that were written."""
        return self.written.bytes + (0 if self.shared is None else self.shared.bytes)


def write_report(report: WriteReport) -> bytes:
    """A report as JSON, for :func:`read_report`."""
    written = [[one.bytes, one.checksums, dict(one.offsets)] for one in (report.written, report.shared) if one]
    found = {name: [[box.offset, box.shape, digest] for box, digest in boxes] for name, boxes in report.digests.items()}
    return json.dumps([report.file, report.writer, written, found]).encode()


def read_report(text: bytes) -> WriteReport:
    """The report that :func:`write_report` has written."""
    file, writer, files, found = json.loads(text)
    written = [Written(bytes=size, checksums=tuple(sums), offsets=offsets) for size, sums, offsets in files]
    digests = {
        name: [(Box(offset=tuple(offset), shape=tuple(size)), digest) for offset, size, digest in boxes]
        for name, boxes in found.items()
    }
    shared = written[1] if len(written) > 1 else None
    return WriteReport(file=file, writer=writer, written=written[0], shared=shared, digests=digests)
