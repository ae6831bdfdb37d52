"""``load``: a checkpoint of any format into modules, optimizers and tensors in any layout.

A load is planned first (everything is checked, nothing is changed), then carried out.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast import codec
from holdfast.checkpoint.formats import open_checkpoint
from holdfast.checkpoint.frozen_loading import FrozenCheck, left_out_of
from holdfast.checkpoint.held import Held, held_of
from holdfast.checkpoint.objects import (
    Absent,
    PartialModule,
    absent_in,
    check_tree,
    clean,
    describe,
    is_plain,
    memory_of,
    parameter_names,
    tensors_of,
    unwrap,
)
from holdfast.checkpoint.optimizer_loading import fill_optimizer
from holdfast.checkpoint.pieces import NUMPY, PER_RANK, Catalogue, Ref, name_of, whole
from holdfast.checkpoint.places import Remote
from holdfast.checkpoint.progress_bar import bar
from holdfast.checkpoint.rank_values import PerRank, is_per_rank
from holdfast.checkpoint.ranks import Ranks, current, together
from holdfast.checkpoint.rules import Rules, parameter_of
from holdfast.checkpoint.rules.hand_cut import Local, Plain, locals_of
from holdfast.checkpoint.safetensors_writer import bytes_of
from holdfast.checkpoint.saving import join_saves
from holdfast.checkpoint.tensor_reader import Want, find, read
from holdfast.checkpoint.trees import is_optimizer, some
from holdfast.checks import truth
from holdfast.errors import CheckpointError, UsageError

Path_ = tuple[Any, ...]


def _check(into: dict[str, Any], **settings: object) -> None:
    check_tree(into)
    for name, value in settings.items():
        truth(name, value)


def load(
    path: str | os.PathLike[str] | Remote | Catalogue,
    into: dict[str, Any],
    *,
    strict: bool = True,
    cast: bool = False,
    group: dist.ProcessGroup | None = None,
    ranks: Ranks | None = None,
    rules: Rules | None = None,
    place: Mapping[str, int] | None = None,
    trainable_only: bool = False,
) -> dict[str, Any]:
    """Loads a checkpoint: fills modules, optimizers and tensors in place, sets values, and returns ``into``.

    ``path`` is a checkpoint of any format that can be read, or what ``open_checkpoint`` gave. As with
    :func:`save`, every rank of the process group calls it, each reads only what it holds, and ``rules`` and
    ``place`` say what plain tensors in ``into`` are parts of. Names in ``into`` that the checkpoint lacks are
    an error, and so, unless ``strict=False``, are names of the checkpoint that no rank takes (but whole
    sections may be left out). A tensor of another dtype is refused unless ``cast=True``. Everything is checked
    before the first byte is changed, except the data itself: after an error that says a file is damaged, or
    that tied tensors differ in it, what was to be filled must not be used. ``group`` is the process group (default:
    all ranks), ``ranks`` replaces it by another way to talk.

    ``trainable_only=True``, for a checkpoint that was saved so: parameters that were frozen at the save are not filled,
    but compared with their digests, and refused if they are others. Make the base first, as it was then.

    Raises ``NoCheckpoint`` if there is none, ``CheckpointError`` if it is damaged or does not fit ``into``,
    ``UsageError`` if ``into`` cannot be filled.

    >>> import tempfile
    >>> from holdfast.checkpoint import save
    >>> folder, model = tempfile.mkdtemp(), nn.Linear(2, 1)
    >>> save(folder, {"model": model, "step": 7})
    >>> load(folder, {"model": nn.Linear(2, 1), "step": 0})["step"]
    7
    """
    ranks = ranks or current(group)
    together(ranks, "load", lambda: _check(into, strict=strict, cast=cast, trainable_only=trainable_only))
    # A save in the background: it may be what is loaded, and its ranks talk over the same group.
    together(ranks, "load", join_saves)
    opened = together(ranks, "load", lambda: path if isinstance(path, Catalogue) else open_checkpoint(path))
    _refuse_different(ranks.exchange(_identity(opened, strict=strict, trainable_only=trainable_only)))
    layout = {} if rules is None else _layout(into, rules, place or {}, ranks)
    filler = Filler(opened, cast=cast, layout=layout, rank=ranks.rank, trainable_only=trainable_only)
    together(ranks, "load", lambda: filler.plan(into))
    if trainable_only:
        filler.frozen.report(ranks)
    if strict:
        filler.refuse_unexpected([json.loads(text) for text in ranks.exchange(json.dumps(filler.left).encode())])
    together(ranks, "load", filler.carry_out)
    return into


def _identity(catalogue: Catalogue, **settings: bool) -> bytes:
    """A text that tells whether ranks have opened the same checkpoint, since our data files have unique names.

    ``settings``: those by which ranks talk to each other, so they must be the same.
    """
    files = {name: file.bytes for name, file in sorted(catalogue.files.items())}
    return json.dumps([catalogue.format, str(catalogue.root), files, settings]).encode()


def _refuse_different(said: Sequence[bytes]) -> None:
    """Refuses ranks that have opened different checkpoints, or load them with different settings.

    A network file system may show an old state, and a folder's newest checkpoint may just have changed.
    """
    first, *others = [json.loads(text) for text in said]
    for rank, other in enumerate(others, start=1):
        if first[0] != other[0] or first[2] != other[2]:
            raise CheckpointError(f"rank 0 has opened {first[1]}, but rank {rank} {other[1]}, which is another one")
        for name, value in first[3].items():
            if other[3][name] != value:
                raise UsageError(
                    f"{name} is {value} on rank 0, but {other[3][name]} on rank {rank}", hint="one for all"
                )


def _layout(into: dict[str, Any], rules: Rules, place: Mapping[str, int], ranks: Ranks) -> dict[str, Local]:
    """For each plain tensor of ``into``, its place in the logical one, by the rules.

    Slots of optimizers do not exist yet: they go by their parameters.
    """
    models = {key: target for key, target in into.items() if not isinstance(target, Optimizer)}
    held = together(ranks, "load", lambda: describe(models, rank=ranks.rank).held)
    mine = {name: (codec.dtype_name(one.dtype), one.shape) for name, one in held.items() if not one.derived}
    said = [json.loads(text) for text in ranks.exchange(json.dumps([mine, place]).encode())]
    plain = [
        {name: Plain(shape=tuple(shape), dtype=codec.dtype_of(dtype)) for name, (dtype, shape) in tensors.items()}
        for tensors, _ in said
    ]
    lenient = Rules((), base=rules)  # a rule for slots alone matches nothing here
    return locals_of(plain, [place for _, place in said], lenient)[ranks.rank]


class Filler:
    """A plan of one load: which boxes to read into which memory, and what to set once they are read.

    :meth:`plan` makes it and checks everything, :meth:`carry_out` reads and sets. ``layout`` says by rules what
    plain tensors are parts of, ``rank`` whose values of ``per_rank`` are taken. ``trainable_only``:
    parameters that were frozen at the save are compared, not filled.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        cast: bool,
        layout: Mapping[str, Local],
        rank: int = 0,
        trainable_only: bool = False,
    ) -> None:
        self.catalogue = catalogue
        self.rank = rank
        self.trainable_only = trainable_only
        self.frozen = FrozenCheck(catalogue)
        self.cast = cast
        self.layout = layout
        self.names: Mapping[int, Sequence[str]] = {}  # of parameters, by their ids
        self.absent: frozenset[int] = frozenset()  # ids of parameters whose slots are others' to fill
        self.wants: list[Want] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor, str]] = []  # target, second copy, name: must be equal
        self.later: list[Callable[[], Any]] = []  # what is set after all is read
        self.tied: dict[str, str] = {}  # second names, with the first ones
        self._taken: set[int] = set()  # ids of tensors that are used for slots
        self._filled: dict[Any, str] = {}  # memory, and the tensor that fills it
        self.left: dict[str, list[str]] = {}  # what each section of the checkpoint has and nothing here takes

    def plan(self, into: dict[str, Any]) -> None:
        """Checks everything and plans the reads; changes nothing in ``into``."""
        self.names, self.absent = parameter_names(into), absent_in(into)
        self.tied = self._ties(into)
        for key, target in into.items():
            if key not in self.catalogue.tree:
                found = ", ".join(map(repr, self.catalogue.tree)) or "nothing"
                raise CheckpointError(f"{self.catalogue.root} has no {key!r}", hint=f"it has {found}")
            self._set(into, key, self.fill(target, self.catalogue.tree[key], (key,)))
        self.frozen.carry_out()

    def _ties(self, into: dict[str, Any]) -> dict[str, str]:
        """Tied names of the checkpoint that stand for the same tensor in every section that is filled here."""
        sections = [
            node
            for key, target in into.items()
            if isinstance(target, nn.Module | PartialModule) and isinstance(node := self.catalogue.tree.get(key), dict)
        ]
        return {
            name: first
            for name, first in self.catalogue.tied.items()
            if all(node.get(name) == node.get(first) for node in sections if name in node)
        }

    def carry_out(self) -> None:
        """Reads everything that is planned, compares tied copies, then sets values."""
        total = sum(want.out.nbytes for want in self.wants)
        with torch.no_grad(), bar(f"loading {self.catalogue.root}", total) as progress:
            read(self.catalogue, self.wants, progress=progress)
        for target, copy, name in self.copies:
            if not np.array_equal(bytes_of(target), bytes_of(copy)):
                raise CheckpointError(
                    f"{self.catalogue.root}: {name} differs from the tensor that it is tied to here",
                    hint="do not tie them, or save them tied",
                )
        for finish in self.later:
            finish()
        if left_out := self.catalogue.details.get("left_out"):
            warnings.warn(f"{self.catalogue.root}: not read: {some(list(left_out))}", stacklevel=2)

    def fill(self, target: Any, node: Any, path: Path_) -> Any:
        """Plans to fill a target from a node of the tree; returns what will stand in the target's place."""
        if isinstance(target, nn.Module | PartialModule):
            self._module(PartialModule.of(target), node, path)
            return target
        if isinstance(target, Optimizer) and is_plain(target):
            if not is_optimizer(node):
                raise CheckpointError(f"{self.catalogue.root}: {name_of(path)} is not an optimizer's state")
            fill_optimizer(self, target, node, path)
            return target
        if isinstance(target, torch.Tensor | Absent):
            self.tensor(target, node, path)
            return target
        if isinstance(target, PerRank):
            return self._per_rank(target, node, path)
        if isinstance(target, dict) and target and (isinstance(node, dict) or _is_filled(target)):
            return self._dict(target, node, path)
        if isinstance(target, list | tuple) and any(map(_is_filled, target)):
            return self._list(target, node, path)
        if hasattr(target, "load_state_dict"):
            value = self.value(node)
            self.later.append(lambda: target.load_state_dict(value))
            return target
        return self.value(node)

    def value(self, node: Any) -> Any:
        """A node of the tree as a value, with new tensors that will be filled."""
        if isinstance(node, Ref):
            entry = find(self.catalogue, node.name)
            out = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            self.wants.append(Want(name=node.name, box=whole(entry.shape), out=out))
            return out
        if isinstance(node, dict):
            if node.keys() == {NUMPY}:
                return self.value(node[NUMPY]).numpy()  # the same memory: it will be filled
            if is_per_rank(node):
                return {int(rank): self.value(item) for rank, item in node[PER_RANK].items()}
            return {key: self.value(item) for key, item in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self.value(item) for item in node)
        return node

    def _per_rank(self, target: PerRank, node: Any, path: Path_) -> Any:
        if not is_per_rank(node):
            raise CheckpointError(
                f"{self.catalogue.root}: {name_of(path)} was saved for all ranks, not for each",
                hint="save it with per_rank, or load it without",
            )
        mine = str(self.rank)
        if mine not in node[PER_RANK]:  # there were fewer ranks
            return target.value
        return self.fill(target.value, node[PER_RANK][mine], (*path, PER_RANK, mine))

    def tensor(self, target: torch.Tensor | Absent, node: Any, path: Path_) -> None:
        """Plans to read the boxes of a tensor that this worker holds."""
        name, held = self._fitting(target, node, path)
        memory = memory_of(target)
        if memory is not None and self._filled.setdefault(memory, name) != name:
            self.copy(target, node, path)
            return
        self.wants += [Want(name=name, box=part.box, out=part.tensor) for part in held.parts]

    def copy(self, target: torch.Tensor | Absent, node: Any, path: Path_) -> None:
        """Plans to check that a tensor of the checkpoint equals another one that fills the same memory."""
        name, held = self._fitting(target, node, path)
        for part in held.parts:
            read = torch.empty_like(part.tensor)
            self.wants.append(Want(name=name, box=part.box, out=read))
            self.copies.append((part.tensor, read, name))

    def _fitting(self, target: torch.Tensor | Absent, node: Any, path: Path_) -> tuple[str, Held]:
        name, root = name_of(path), self.catalogue.root
        if not isinstance(node, Ref):
            if isinstance(node, dict) and PER_RANK in node:
                raise CheckpointError(
                    f"{root}: {name} is a value of each rank", hint="mark it with per_rank(…) here too"
                )
            raise CheckpointError(f"{root}: {name} is not a tensor in the checkpoint, but {node!r}")
        entry = find(self.catalogue, node.name)
        held = target.held if isinstance(target, Absent) else self._held(target, path)
        if held.shape != entry.shape:
            raise CheckpointError(f"{root}: {name} has shape {entry.shape}, not {held.shape}")
        if held.dtype != entry.dtype and not self.cast:
            raise CheckpointError(
                f"{root}: {name} is {entry.dtype}, not {held.dtype}", hint="cast=True converts, and may lose bits"
            )
        return node.name, held

    def _held(self, target: torch.Tensor, path: Path_) -> Held:
        name, local = name_of(path), self.local(path)
        if any(n > 1 and s == 0 for n, s in zip(target.shape, target.stride(), strict=True)):
            raise UsageError(f"{name} is one element in many places", hint="clone it before it is filled")
        return local.held(target) if local and local.own == tuple(target.shape) else held_of(target, name)

    def take(self, tensor: torch.Tensor) -> bool:
        """Whether an optimizer's tensor may be filled in place; a second slot that shares it gets memory of its own."""
        new = id(tensor) not in self._taken
        self._taken.add(id(tensor))
        return new

    def local(self, path: Path_) -> Local | None:
        """The place in the logical tensor that a rule gives a tensor; an optimizer's slot goes by its parameter."""
        name = name_of(path)
        return self.layout.get(name) or self.layout.get(parameter_of(name) or "")

    def _set(self, target: Any, key: Any, value: Any) -> None:
        self.later.append(lambda: target.__setitem__(key, value))

    def _dict(self, target: dict[Any, Any], node: Any, path: Path_) -> dict[Any, Any]:
        if not isinstance(node, dict):
            raise CheckpointError(f"{self.catalogue.root}: {name_of(path)} is not a dict in the checkpoint")
        self.refuse_missing([key for key in target if key not in node], path)
        self.leave([key for key in node if key not in target], path)
        for key, item in target.items():
            self._set(target, key, self.fill(item, node[key], (*path, key)))
        return target

    def _list(self, target: Any, node: Any, path: Path_) -> Any:
        if not isinstance(node, list | tuple) or len(node) != len(target):
            raise CheckpointError(f"{self.catalogue.root}: {name_of(path)} is not a list of {len(target)}")
        return type(target)([self.fill(t, n, (*path, i)) for i, (t, n) in enumerate(zip(target, node, strict=True))])

    def _module(self, part: PartialModule, node: Any, path: Path_) -> None:
        if not isinstance(node, dict):
            raise CheckpointError(f"{self.catalogue.root}: {name_of(path)} is not a module's state")
        targets, inner = {**tensors_of(part.module), **part.absent}, unwrap(part.module)
        # Only a module's own parameters and buffers are filled in place. Values that its state_dict makes up (extra
        # state, hooks) are given to its load_state_dict. Tied names share memory, and are filled once.
        own = {id(tensor) for tensor in (*inner.parameters(), *inner.buffers(), *filter(None, part.absent.values()))}
        memory = {name: memory_of(target) for name, target in targets.items() if id(target) in own}
        frozen = self._frozen(targets, node, path)
        known = {memory[name] for name in memory if name in node or name in frozen} - {None}
        # A second name of a tied weight need not be there: its first one fills it.
        self.refuse_missing([name for name in targets if name not in node and memory.get(name) not in known], path)
        gone = [name for name in left_out_of(self.catalogue, path) if name not in targets]
        self.leave([name for name in [*node, *gone] if name not in targets and name not in self.tied], path)
        filled: dict[Any, Ref] = {}
        for name in (name for name in targets if name in node and name not in frozen):
            if name not in memory:
                if name not in part.absent:
                    self._through(inner, name, node[name])
            elif memory[name] is None or memory[name] not in filled:
                self.tensor(targets[name], node[name], (*path, name))
                filled[memory[name]] = node[name]
            elif node[name] != filled[memory[name]]:
                self.copy(targets[name], node[name], (*path, name))

    def _frozen(self, targets: Mapping[str, Any], node: dict[str, Any], path: Path_) -> set[str]:
        """The names of a module that were frozen at the save and are compared; without ``trainable_only`` none.

        Raises ``CheckpointError`` if they are not in the checkpoint, and not to be compared either.
        """
        saved = {name: self.catalogue.digests.get(name_of((*path, name))) for name in targets}
        found = {name for name, digested in saved.items() if digested is not None}
        if self.trainable_only:
            for name in found:
                held = target.held if isinstance(target := targets[name], Absent) else self._held(target, (*path, name))
                self.frozen.add(name_of((*path, name)), held)
            return found
        if absent := [name for name in found if name not in node]:
            raise CheckpointError(
                f"{self.catalogue.root}: {name_of(path)} was saved without its frozen weights, {some(sorted(absent))}",
                hint="make the base as it was then, and load with trainable_only=True",
            )
        return set()

    def _through(self, module: nn.Module, name: str, node: Any) -> None:
        """Plans to hand a value to the module's ``load_state_dict``: extra state, and values that its hooks make."""
        value = self.value(node)
        raw = next(key for key in module.state_dict() if clean(key) == name)

        def take() -> None:
            if raw in module.load_state_dict({raw: value}, strict=False).unexpected_keys:
                raise CheckpointError(f"{self.catalogue.root}: the module does not take {name}, though it gave it")

        self.later.append(take)

    def refuse_missing(self, names: list[Any], path: Path_) -> None:
        """Raises ``CheckpointError`` if there are names that the checkpoint lacks."""
        if names:
            raise CheckpointError(f"{self.catalogue.root}: {name_of(path)} has no {some(names)}")

    def leave(self, names: list[Any], path: Path_) -> None:
        """Notes names of the checkpoint that this worker does not take; a worker with another stage may."""
        self.left[name_of(path)] = list(map(str, names))

    def refuse_unexpected(self, everybody: Sequence[Mapping[str, list[str]]]) -> None:
        """Raises ``CheckpointError`` for names that no rank takes; all ranks have the same lists and raise alike."""
        for section in dict.fromkeys(section for left in everybody for section in left):
            first, *others = [left[section] for left in everybody if section in left]
            if names := [name for name in first if all(name in other for other in others)]:
                raise CheckpointError(
                    f"{self.catalogue.root}: {section} has {some(names)}, which nothing here takes",
                    hint="strict=False leaves it out",
                )


def _is_filled(target: Any) -> bool:
    """Whether a target is filled in place, rather than replaced by what was saved."""
    if isinstance(target, dict):
        return any(map(_is_filled, target.values()))
    if isinstance(target, list | tuple):
        return any(map(_is_filled, target))
    return isinstance(target, torch.Tensor | Absent | PartialModule | PerRank) or hasattr(target, "load_state_dict")
