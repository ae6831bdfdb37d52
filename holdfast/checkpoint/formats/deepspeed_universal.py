"""Reads DeepSpeed's universal checkpoints: a folder for each parameter, a file for each of its tensors.

A path is the checkpoint's folder, whose file ``latest_universal`` names a tag, or the folder of a tag.
:mod:`holdfast.checkpoint.formats.deepspeed_universal_write` writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.formats import pickled
from holdfast.checkpoint.formats.deepspeed import catalogue_of, tree_of
from holdfast.checkpoint.formats.deepspeed_files import INCOMPLETE, names_in, sort_files, tag_folder
from holdfast.checkpoint.formats.deepspeed_states import Column, add_frozen, add_module, add_tied, read_states
from holdfast.checkpoint.formats.deepspeed_tp import renamed_by
from holdfast.checkpoint.formats.deepspeed_universal_write import REST, SLOTS, write
from holdfast.checkpoint.formats.files import pointer_of
from holdfast.checkpoint.pieces import Catalogue, Shape, Stored, entry_of
from holdfast.checkpoint.rules import Rules
from holdfast.errors import CheckpointError

__all__ = ["open", "recognise", "write"]

POINTER = "latest_universal"


def recognise(path: Path) -> bool:
    """Whether a folder is a universal checkpoint; one that also has the original checkpoint is taken for that."""
    try:
        if (path / "latest").is_file():
            return False
        return (tag_folder(path, POINTER, anywhere=True) / "zero" / "optimizer_state.pt").is_file()
    except (CheckpointError, OSError):
        return False


@dataclass(kw_only=True)
class _UniversalFolder:
    """A universal checkpoint's folder: model states by rank, and the shapes of each group of parameters."""

    folder: Path
    models: dict[tuple[int, int], dict[str, Any]]
    per_worker: bool
    optimizer: dict[str, Any]
    files: set[str] = field(default_factory=set)

    @property
    def groups(self) -> list[dict[str, Shape]]:
        """Names and shapes of the parameters of each group, from all pipeline stages."""
        groups: list[dict[str, Shape]] = []
        for model in self.models.values():
            for number, shapes in enumerate(model.get("param_shapes") or []):
                self._check_names(shapes)
                groups += [{}] * (number + 1 - len(groups))
                groups[number] = {**groups[number], **{name: tuple(shape) for name, shape in shapes.items()}}
        return groups

    def _check_names(self, names: Iterable[Any]) -> None:
        """Refuses names that lead elsewhere: each is the name of a folder."""
        for name in names:
            if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
                reason = f"{self.folder}: the model states have a parameter {name!r}, which is no folder in zero"
                raise CheckpointError(reason, hint="do not trust this checkpoint")

    @property
    def parallel(self) -> bool:
        """Whether there were several model-parallel ranks."""
        return len({mp for mp, _ in self.models}) > 1


def open(path: Path, rules: Rules | None = None) -> Catalogue:
    """The catalogue of a universal checkpoint; reads pickles and no tensor. Rules can rename."""
    folder = tag_folder(path, POINTER)
    source = _read(folder)
    column = Column()
    _add_atoms(column, source)
    _add_groups(column, source)
    _add_rest(column, source)
    column = renamed_by(column, rules)
    tree = tree_of(column, source.models, {(0, 0): source.optimizer}, numbered=False)
    _restore(tree)
    read = [*pointer_of(folder, path, POINTER), *sorted(source.files)]
    return catalogue_of("deepspeed-universal", folder, column, tree, read, {})


def _restore(tree: dict[str, Any]) -> None:
    """Restores the tree of a checkpoint that ``deepspeed_universal_write`` wrote, in place."""
    client = tree.get("client_state", {})
    if REST in client:
        rest = client.pop(REST)
        for key in {"step", "deepspeed"} - set(rest) | ({"client_state"} if not client else set()):
            tree.pop(key, None)
        tree.update(rest)


def _read(folder: Path) -> _UniversalFolder:
    state = folder / "zero" / "optimizer_state.pt"
    if not state.is_file():
        raise CheckpointError(f"{state} is missing", hint="is it a universal checkpoint of DeepSpeed?")
    names = [name for name in names_in(folder) if name.endswith("_model_states.pt")]
    plain = [name for name in names if name.startswith("mp_rank_")]  # those of ZeRO-3 are the same if both are there
    files = sort_files(plain or names, where=str(folder))
    if (0, 0) not in files.model:
        raise CheckpointError(f"{folder / 'mp_rank_00_model_states.pt'} is missing", hint=INCOMPLETE)
    return _UniversalFolder(
        folder=folder,
        models={place: read_states(folder, name) for place, name in sorted(files.model.items())},
        per_worker=files.per_worker,
        optimizer=read_states(folder, "zero/optimizer_state.pt"),
        files={"zero/optimizer_state.pt", *files.model.values()},
    )


def _add_atoms(column: Column, source: _UniversalFolder) -> None:
    """Adds the trained parameters: weights and slots."""
    for group in source.groups:
        kept: dict[str, dict[str, Any]] = {}
        for name, shape in group.items():
            atoms = _atoms(source, source.folder / "zero" / name, None if source.parallel else shape)
            if "fp32" not in atoms:
                missing = source.folder / "zero" / name / "fp32.pt"
                raise CheckpointError(f"{missing} is missing, the weights of {name}", hint=INCOMPLETE)
            column.weights[name] = entry_of(atoms.pop("fp32"))
            kept[name] = atoms
        slots = sorted({slot for atoms in kept.values() for slot in atoms})
        for name, atoms in kept.items():
            absent = [slot for slot in slots if atoms and slot not in atoms]
            if absent:  # DeepSpeed keeps one state for all parameters of a group
                missing = source.folder / "zero" / name / f"{absent[0]}.pt"
                raise CheckpointError(f"{missing} is missing, the {absent[0]} of {name}", hint=INCOMPLETE)
            column.state[name] = {slot: _leaf(atoms[slot]) for slot in slots if slot in atoms}
            column.state[name].update(_atoms(source, source.folder / SLOTS / name, None))


def _leaf(value: Any) -> Any:
    return entry_of(value) if isinstance(value, Stored) else value


def _atoms(source: _UniversalFolder, folder: Path, shape: Shape | None) -> dict[str, Any]:
    """The values in a parameter's folder, by the names of the files."""
    atoms: dict[str, Any] = {}
    if not folder.is_dir():
        return atoms
    for name in sorted(names_in(folder)):
        if name.endswith(".pt"):
            source.files.add((folder / name).relative_to(source.folder).as_posix())
            found = pickled.load(folder / name, root=source.folder)
            atoms[name.removesuffix(".pt")] = _atom(found, shape, folder / name)
    return atoms


def _atom(found: Any, shape: Shape | None, path: Path) -> Any:
    """The tensor in a file. From ZeRO-3 it is flat, and only the model states know its shape."""
    if isinstance(found, dict) and "param" in found:
        return found["param"]
    if path.stem == "step" or path.parts[-3] == SLOTS or not isinstance(found, Stored) or found.shape == ():
        return found
    if shape is None:
        raise CheckpointError(f"{path} is flat, and nothing says which shape it had", hint="convert it without TP")
    if math.prod(found.shape) != math.prod(shape):
        reason = f"{path} has {math.prod(found.shape)} elements, its parameter has the shape {shape}"
        raise CheckpointError(reason, hint=INCOMPLETE)
    return found.reshaped(shape)


def _add_rest(column: Column, source: _UniversalFolder) -> None:
    """Adds buffers and frozen parameters: in their own dtype from the model states, else from their folders."""
    first = source.models[0, 0]
    module = dict(first.get("module") or {})
    column.buffers = list(dict.fromkeys(n for model in source.models.values() for n in model.get("buffer_names") or []))
    if not source.parallel:
        if first.get("frozen_param_fragments"):
            add_frozen(column, [model for (mp, _), model in source.models.items() if mp == 0])
        add_tied(column, first.get("shared_params") or {}, module, source.per_worker)
        add_module(column, module, source.per_worker)
    for folder in sorted((source.folder / "zero").iterdir()):
        name = folder.name
        if not folder.is_dir() or name in column.weights or name in column.tied:
            continue
        atoms = _atoms(source, folder, None)
        if source.parallel:  # ds_to_universal copies the first rank's part, as if it were all
            column.left_out.append(f"{name}: it was not trained, and only one rank's part of it is there")
        elif isinstance(atoms.get("fp32"), Stored):
            column.weights[name] = entry_of(atoms["fp32"])
            if name not in column.buffers:
                column.frozen.append(name)
    add_tied(column, first.get("shared_params") or {}, module, source.per_worker)
    for name in [*column.buffers, *(first.get("frozen_param_shapes") or [])]:
        if name not in column.weights and name not in column.tied and not source.parallel:
            missing = source.folder / "zero" / name / "fp32.pt"
            raise CheckpointError(f"{missing} is missing, the value of {name}", hint=INCOMPLETE)


def _add_groups(column: Column, source: _UniversalFolder) -> None:
    """Adds groups of hyper-parameters, and from ZeRO-3 values that many parameters share."""
    groups = source.groups
    inner = source.optimizer.get("optimizer_state_dict") or {}
    for number, shapes in enumerate(groups):
        for slot, value in (inner.get("state") or {}).get(number, {}).items():
            if not isinstance(value, Stored) or value.shape == ():
                for name in shapes:
                    if column.state[name]:
                        column.state[name].setdefault(slot, _leaf(value))
    for group in source.optimizer.get("param_groups") or []:
        members = group["params"]
        if all(isinstance(member, int) and member < len(groups) for member in members):
            members = [name for member in members for name in groups[member]]
        column.groups.append({**group, "params": members})
    known = {name for group in column.groups for name in group["params"]}
    unknown = [name for shapes in groups for name in shapes if name not in known]
    if unknown:
        column.left_out.append(f"hyper-parameters of {unknown[0]}: optimizer_state.pt has no group for it")
        column.groups.append({"params": unknown})
