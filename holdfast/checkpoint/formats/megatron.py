"""Reads checkpoints of Megatron-LM and Megatron-core: torch_dist folders, and folders with a file for each rank.

A path may be an iteration's folder, or the folder of a run, of which the newest iteration is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.formats.canonical import plain
from holdfast.checkpoint.formats.files import files_of, pointer_of
from holdfast.checkpoint.formats.megatron_dist import Whole, is_dist, read_dist
from holdfast.checkpoint.formats.megatron_legacy import AXES, Rank, args_of, is_legacy, read_ranks
from holdfast.checkpoint.formats.megatron_rules import built_in
from holdfast.checkpoint.inside import check_inside, read_pointer
from holdfast.checkpoint.pieces import Catalogue, Stored, TensorEntry, catalogue_tree, name_of, path_of
from holdfast.checkpoint.rules import Fragment, Rules, merge
from holdfast.checkpoint.trees import merge_trees
from holdfast.errors import CheckpointError, UsageError

LATEST = "latest_checkpointed_iteration.txt"
_OWN = re.compile(r"model\d*|optimizer|rng_state|args|iteration|opt_param_scheduler")
Tree = dict[str, Any]


def recognise(path: Path) -> bool:
    """Whether a folder is a Megatron run's, or that of one of its iterations."""
    try:
        return path.is_dir() and ((path / LATEST).is_file() or is_dist(path) or is_legacy(path))
    except OSError:
        return False


def open(path: Path, *, rules: Rules | None = None) -> Catalogue:
    """The catalogue of a checkpoint. A user's rules come before the built-in ones; torch_dist they can only rename."""
    folder = newest(path)
    left_out: list[str] = []
    states: Mapping[str, Any]
    if is_dist(folder):
        whole = read_dist(folder, left_out)
        tree, states, read = _dist_tree(whole, rules), whole.common, whole.files
        details: Tree = {}
    elif is_legacy(folder):
        ranks = read_ranks(folder, left_out)
        tree, states, read = _open_legacy(ranks, rules, folder), ranks[0].states, [rank.file for rank in ranks]
        details = {axis: 1 + max(rank.place[axis] for rank in ranks) for axis in AXES}
    else:
        raise CheckpointError(f"{folder} is not a checkpoint of Megatron", hint="copy the whole folder")
    found, tensors = catalogue_tree({**tree, **_extras(states, left_out)})
    details["left_out"] = list(dict.fromkeys(left_out))
    files = files_of(folder, tensors, [*pointer_of(folder, path, LATEST), *read])
    return Catalogue(format="megatron", root=folder, tensors=tensors, tree=found, files=files, details=details)


def newest(path: Path) -> Path:
    """The folder of the iteration that a run's folder says is the newest; any other path as it is."""
    if not (path / LATEST).is_file():
        return path
    try:
        said = read_pointer(path / LATEST)
    except OSError as error:
        raise CheckpointError(f"{path / LATEST} cannot be read: {error.strerror}") from error
    if said != "release" and not re.fullmatch("[0-9]{1,18}", said):
        raise CheckpointError(f"{path / LATEST} says {said!r}, which is no iteration")
    folder = path / (said if said == "release" else f"iter_{int(said):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}, which {LATEST} names, is missing", hint="pass the folder of an iteration")
    check_inside(folder, path)
    return folder


def _extras(states: Mapping[str, Any], left_out: list[str]) -> Tree:
    """The values beside tensors: the step, the schedule, and under "megatron" what else the first rank has."""
    rest = {key: value for key, value in states.items() if not _OWN.fullmatch(key)}
    tree = {"step": states.get("iteration"), "opt_param_scheduler": states.get("opt_param_scheduler")}
    found = {**tree, "megatron": {**rest, "args": args_of(states)}}
    return {key: value for key, value in plain(found, left_out).items() if value is not None}


# --- torch_dist -----------------------------------------------------------------------------------


def _dist_tree(whole: Whole, rules: Rules | None) -> Tree:
    entries = {name_of(("model", name)): entry for name, entry in whole.model.items()}
    state: dict[str, Tree] = {}
    for name, slots in whole.state.items():
        for slot, value in slots.items():
            if isinstance(value, TensorEntry):
                entries[name_of(("optimizer", "state", name, slot))] = value
            else:
                state.setdefault(name, {})[slot] = value
    new = rules.renames(entries) if rules is not None else {name: name for name in entries}
    optimizer = {"state": state, "param_groups": whole.groups}
    return _tree({new[name]: entry for name, entry in entries.items()}, optimizer, new)


# --- a file for each rank -------------------------------------------------------------------------


def _open_legacy(ranks: Sequence[Rank], rules: Rules | None, folder: Path) -> Tree:
    fragments = list(_fragments(ranks))
    shapes = {fragment.name: fragment.shape for fragment in reversed(fragments)}
    version = ranks[0].states.get("checkpoint_version") or 0
    chosen = (rules or Rules([])).over(built_in(shapes, version=float(version)))
    axes = {axis: 1 + max(rank.place[axis] for rank in ranks) for axis in AXES}
    try:
        entries = merge(fragments, chosen, axes=axes)
    except UsageError as error:
        if rules is not None:
            raise
        raise CheckpointError(f"{folder}: {error}", hint="pass rules, see docs/checkpoint-rules.md") from error
    new = {name: target.name for name, target in chosen.targets(shapes).items()}
    try:
        rest = merge_trees([_untensored(rank.optimizer) for rank in ranks])
    except UsageError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return _tree(entries, rest, new)


def _fragments(ranks: Sequence[Rank]) -> Iterator[Fragment]:
    for number, rank in enumerate(ranks):
        masters = rank.optimizer.get("masters", {})
        tensors = {name_of(("model", name)): masters.get(name, stored) for name, stored in rank.model.items()}
        for name, slots in rank.optimizer.get("state", {}).items():
            for slot, value in slots.items():
                if isinstance(value, Stored):
                    tensors[name_of(("optimizer", "state", name, slot))] = value
        for name, stored in tensors.items():
            yield Fragment(
                name=name, shape=stored.shape, dtype=stored.dtype, place=rank.place, holder=number, stored=stored
            )


def _untensored(optimizer: Mapping[str, Any]) -> Tree:
    state = {
        name: {slot: value for slot, value in slots.items() if not isinstance(value, Stored)}
        for name, slots in optimizer.get("state", {}).items()
    }
    return {"state": state, "param_groups": list(optimizer.get("param_groups", []))}


# --- the tree -------------------------------------------------------------------------------------


def _tree(entries: Mapping[str, TensorEntry], optimizer: Tree, new: Mapping[str, str]) -> Tree:
    """The tree of model and optimizer; ``new`` leads from old names of tensors to the new ones."""
    called = {path_of(old)[1]: path_of(name)[-1] for old, name in new.items() if old.startswith("model/")}
    tree: Tree = {"model": {}}
    if optimizer["param_groups"]:
        groups = [{**g, "params": [called[name] for name in g["params"]]} for g in optimizer["param_groups"]]
        state = {called[name]: dict(slots) for name, slots in optimizer["state"].items()}
        tree["optimizer"] = plain({"state": state, "param_groups": groups})
    for name, entry in entries.items():
        *keys, last = path_of(name)
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = entry
    return tree
