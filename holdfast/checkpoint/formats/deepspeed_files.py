"""The files of a DeepSpeed checkpoint, sorted by their names alone, and whether all of them are there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.inside import check_inside, read_pointer
from holdfast.errors import CheckpointError

# The hint of errors about missing files.
INCOMPLETE = "copy the whole folder again, or load an older checkpoint"

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_.*states\.pt|expp_rank_\d+_.*states\.pt")

Place = tuple[int, int]  # (model-parallel rank, data-parallel rank), or (layer, tensor-parallel rank)


@dataclass(kw_only=True)
class TagFiles:
    """The files of one tag folder: those of (model-parallel rank, data-parallel rank), those of (layer, tp).

    >>> files = sort_files(["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
    >>> files.model, files.optim
    ({(0, 0): 'mp_rank_00_model_states.pt'}, {(0, 1): 'bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt'})
    """

    model: dict[Place, str] = field(default_factory=dict)
    optim: dict[Place, str] = field(default_factory=dict)
    layers: dict[Place, str] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    per_worker: bool = False  # model states of every data-parallel rank: ZeRO-3


def sort_files(names: Iterable[str], *, where: str = "the folder") -> TagFiles:
    """Sorts files by their names; ``CheckpointError`` for two files of one place."""
    files = TagFiles()
    for name in sorted(names):
        if found := _OPTIM.fullmatch(name):
            _put(files.optim, (int(found[2]), int(found[1])), name, where)
        elif found := _MODEL.fullmatch(name):
            files.per_worker |= found[1] is not None
            _put(files.model, (int(found[2]), int(found[1] or 0)), name, where)
        elif found := _LAYER.fullmatch(name):
            _put(files.layers, (int(found[1]), int(found[2] or 0)), name, where)
        elif _EXPERT.fullmatch(name):
            files.experts.append(name)
    return files


def _put(known: dict[Place, str], place: Place, name: str, where: str) -> None:
    if place in known:
        raise CheckpointError(
            f"{where}: {known[place]} and {name} are the same part", hint="remove the one of another run"
        )
    known[place] = name


def check_grid(known: dict[Place, str], *, columns: int, rows: int, example: str, where: Path) -> None:
    """Refuses a grid of (model-parallel, data-parallel) ranks with missing or surplus files.

    ``example`` is a file's name with {mp} and {dp}, for the error.
    """
    for mp in range(columns):
        for dp in range(rows):
            if (mp, dp) not in known:
                name = example.format(mp=mp, dp=dp)
                raise CheckpointError(f"{where / name} is missing: one of {columns * rows} parts", hint=INCOMPLETE)
    for (mp, dp), name in known.items():
        if mp >= columns or dp >= rows:
            raise CheckpointError(
                f"{where / name} is one too many: the checkpoint was written by {rows} data-parallel and "
                f"{columns} model-parallel ranks",
                hint="remove what another run left behind",
            )


def tag_folder(path: Path, pointer: str, *, anywhere: bool = False) -> Path:
    """The folder with the files: the path itself, or the one that the file ``pointer`` in it names.

    A pointer to elsewhere than a folder beside it is refused, unless ``anywhere``: then nothing is opened yet.
    """
    latest = path / pointer
    try:
        if not latest.is_file():
            return path
        tag = read_pointer(latest)
    except OSError as error:
        raise CheckpointError(f"{latest} cannot be read: {error}") from error
    if not anywhere and (tag in ("", ".", "..") or Path(tag).name != tag):
        raise CheckpointError(
            f"{latest} names {tag[:300]!r}, which is no folder beside it", hint="do not trust this file"
        )
    if len(tag) > 255 or not (path / tag).is_dir():
        raise CheckpointError(
            f"{latest} names {tag[:300]}, but there is no such folder", hint="give the folder of a tag"
        )
    if not anywhere:
        check_inside(path / tag, path)
    return path / tag


def names_in(folder: Path) -> list[str]:
    """The files of a folder."""
    try:
        return [entry.name for entry in folder.iterdir() if entry.is_file()]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
