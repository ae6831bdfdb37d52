"""Reads Megatron's older folders: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, a file for each model-parallel rank.

Each file numbers its layers and experts as if there were no others; here they get the numbers they have in the whole.
The fp32 weights of the optimizer are taken where there are any, since the model's own are rounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from holdfast.checkpoint.formats import pickled
from holdfast.checkpoint.formats.megatron_optimizer import named_optimizer
from holdfast.checkpoint.formats.pickled import Foreign
from holdfast.checkpoint.pieces import Stored
from holdfast.errors import CheckpointError

FILE = "model_optim_rng.pt"
EXTRA = "the extra states of modules (..._extra_state): what each rank has of them"
AXES = ("tp", "pp", "ep")
_ARGS = dict(zip(AXES, ("tensor", "pipeline", "expert"), strict=True))
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER = re.compile(r"((?:.*?\.)?layers)\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.(?:local_experts\.|experts\.linear_fc[12]\.(?:weight|bias)))(\d+)(\..*|)")
_HEADS = ("output_layer.weight", "word_embeddings_for_head.weight")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The content of one file: parameters in the model's order and the optimizer, by their names in the whole model."""

    file: str
    place: Mapping[str, int]
    states: Mapping[str, Any]
    model: Mapping[str, Stored] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)


def is_legacy(path: Path) -> bool:
    """Whether a folder has a file for each model-parallel rank."""
    return any(_FOLDER.fullmatch(one.parent.name) for one in path.glob(f"mp_rank_*/{FILE}"))


def read_ranks(path: Path, left_out: list[str]) -> list[Rank]:
    """All ranks of a checkpoint, the first rank first."""
    ranks = _named(_read(path), path)
    if any(key.endswith("_extra_state") and value is not None for rank in ranks for _, key, value in _tensors(rank)):
        left_out.append(EXTRA)
    if any("rng_state" in rank.states for rank in ranks):
        left_out.append("rng_state: what each rank has of it")
    ranks = [replace(rank, optimizer=named_optimizer(rank.states, rank.model, rank.file, left_out)) for rank in ranks]
    complete = all(rank.optimizer for rank in ranks)
    return [rank if complete else replace(rank, optimizer={}) for rank in ranks]


def args_of(states: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the run, if the file has them."""
    args = states.get("args")
    return args.fields if isinstance(args, Foreign) else {}


# --- the files ------------------------------------------------------------------------------------


def _read(path: Path) -> list[Rank]:
    folders = [one.parent for one in sorted(path.glob(f"mp_rank_*/{FILE}")) if _FOLDER.fullmatch(one.parent.name)]
    read = {folder.name: _states(folder / FILE, path) for folder in folders}
    args = args_of(next(iter(read.values())))
    ranks = [Rank(file=f"{name}/{FILE}", place=_place(name, args), states=states) for name, states in read.items()]
    _refuse_incomplete(ranks, args, path)
    return sorted(ranks, key=lambda rank: tuple(rank.place.values()))


def _states(file: Path, root: Path) -> dict[str, Any]:
    states = pickled.load(file, root=root)
    if not isinstance(states, dict) or not any(key.startswith("model") for key in states):
        raise CheckpointError(f"{file} has no model", hint="is it one of Megatron's?")
    return states


def _place(folder: str, args: Mapping[str, Any]) -> dict[str, int]:
    """The place of a rank, from its folder's name, which leaves out axes (pipeline, experts) of size 1."""
    match = _FOLDER.fullmatch(folder)
    assert match is not None
    tp, second, third = (int(number or 0) for number in match.groups())
    experts = match[3] is None and args.get("pipeline_model_parallel_size") == 1
    return {"tp": tp, "pp": 0, "ep": second} if experts else {"tp": tp, "pp": second, "ep": third}


def _refuse_incomplete(ranks: Sequence[Rank], args: Mapping[str, Any], path: Path) -> None:
    there = {tuple(rank.place.values()): rank.file for rank in ranks}
    known = [args.get(f"{word}_model_parallel_size") for word in _ARGS.values()]
    seen = [1 + max(place[i] for place in there) for i in range(3)]
    sizes = [size if isinstance(size, int) else many for size, many in zip(known, seen, strict=True)]
    for place in product(*map(range, sizes)):
        if place not in there:
            name = f"mp_rank_{place[0]:02d}" + "".join(f"_{place[i]:03d}" for i in (1, 2) if sizes[i] > 1)
            raise CheckpointError(f"{path / name / FILE} is missing", hint="copy the whole checkpoint")
    for place, file in there.items():
        if any(at >= size for at, size in zip(place, sizes, strict=True)):
            layout = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
            raise CheckpointError(f"{path / file} has no place in {layout}, which the run had", hint="remove it")
    if sizes[2] > 1 and args.get("expert_tensor_parallel_size") not in (None, sizes[0]):
        raise CheckpointError(f"{path}: experts are cut among other ranks than the rest", hint="save it as torch_dist")


# --- the names ------------------------------------------------------------------------------------


def _named(ranks: Sequence[Rank], path: Path) -> list[Rank]:
    """All ranks with their parameters under the names in the whole model."""
    layers = _first_layers(ranks, path)
    experts = {rank.file: _experts(rank) for rank in ranks}
    named = []
    for rank in ranks:
        model: dict[str, Stored] = {}
        for chunk, local, stored in _tensors(rank):
            if not isinstance(stored, Stored) or local.endswith("_extra_state"):
                continue
            name = _renumbered(local, layers[rank.place["pp"], chunk], rank.place["ep"] * experts[rank.file])
            if name in model:
                raise CheckpointError(f"{path / rank.file} has {name} twice")
            model[name] = stored
        named.append(replace(rank, model=model))
    return [replace(rank, model=_untied(rank, named)) for rank in named]


def _tensors(rank: Rank) -> Iterator[tuple[int, str, Any]]:
    """Triples of a virtual stage's number, a name in it, and the value."""
    for key, section in rank.states.items():
        if match := re.fullmatch(r"model(\d*)", key):
            for name, value in _flattened(section):
                yield int(match[1] or 0), name, value


def _flattened(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flattened(value, (*path, str(key)))
    else:
        yield ".".join(path), node


def _first_layers(ranks: Sequence[Rank], path: Path) -> dict[tuple[int, int], dict[str, int]]:
    """For each stage and virtual stage, the number of its first layer, by the name of the list of layers.

    Layers are counted through all stages, then through those stages' second virtual ones, and so on.
    """
    held: dict[tuple[int, int], dict[str, set[int]]] = {}
    for rank in ranks:
        mine: dict[int, dict[str, set[int]]] = {}
        for chunk, name, _ in _tensors(rank):
            lists = mine.setdefault(chunk, {})
            if match := _LAYER.fullmatch(name):
                lists.setdefault(match[1], set()).add(int(match[2]))
        for chunk, lists in mine.items():
            if held.setdefault((chunk, rank.place["pp"]), lists) != lists:
                raise CheckpointError(f"{path / rank.file} has other layers than the ranks beside it")
            for name, numbers in lists.items():
                if numbers != set(range(len(numbers))):
                    raise CheckpointError(f"{path / rank.file} has the layers {sorted(numbers)} of {name}, with gaps")
    first: dict[tuple[int, int], dict[str, int]] = {}
    count: dict[str, int] = {}
    for chunk, stage in sorted(held):
        first[stage, chunk] = dict(count)
        for name, numbers in held[chunk, stage].items():
            count[name] = count.get(name, 0) + len(numbers)
    return first


def _experts(rank: Rank) -> int:
    """The number of experts of each layer on a rank."""
    return len({match[2] for _, name, _ in _tensors(rank) if (match := _EXPERT.fullmatch(name))})


def _renumbered(name: str, first: Mapping[str, int], first_expert: int) -> str:
    if match := _LAYER.fullmatch(name):
        name = f"{match[1]}.{int(match[2]) + first.get(match[1], 0)}.{match[3]}"
    if match := _EXPERT.fullmatch(name):
        name = f"{match[1]}{int(match[2]) + first_expert}{match[3]}"
    return name


def _untied(rank: Rank, ranks: Sequence[Rank]) -> dict[str, Stored]:
    """A rank's model, in which the last stage's copy of tied embeddings has the name of the embeddings."""
    tied = args_of(rank.states).get("untie_embeddings_and_output_weights") is False
    heads = _HEADS if tied else _HEADS[1:]
    names = {name for one in ranks for name in one.model if name.endswith("embedding.word_embeddings.weight")}
    if len(names) != 1 or names & rank.model.keys():
        return dict(rank.model)
    (embedding,) = names
    return {embedding if name.endswith(heads) else name: stored for name, stored in rank.model.items()}
