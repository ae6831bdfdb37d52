"""Loading: any readable checkpoint into whatever layout the caller has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.formats import open_checkpoint
from holdfast.checkpoint.layout import held_of
from holdfast.checkpoint.merge import is_optimizer
from holdfast.checkpoint.objects import NUMPY, memory_of, parameter_names, tensors_of, unwrap
from holdfast.checkpoint.pieces import Catalogue, Ref, name_of, whole
from holdfast.checkpoint.progress import bar
from holdfast.checkpoint.read import Want, find, read
from holdfast.checkpoint.slots import fill_optimizer
from holdfast.errors import CheckpointError

Path_ = tuple[Any, ...]


def load(
    path: str | os.PathLike[str],
    into: dict[str, Any],
    *,
    strict: bool = True,
    cast: bool = False,
) -> dict[str, Any]:
    """Fills modules, optimizers and tensors in place, sets values, and returns ``into``.

    ``path`` is a checkpoint of any format that can be read; each rank reads only what it holds. Names in
    ``into`` that the checkpoint lacks are an error, and so, unless ``strict=False``, are names that only the
    checkpoint has (but whole sections may be left out). A tensor of another dtype is refused unless
    ``cast=True``. Everything is checked before the first byte is changed, except the data itself: after an
    error that says a file is damaged, what was to be filled must not be used.

    >>> import tempfile
    >>> from holdfast.checkpoint import save
    >>> folder, model = tempfile.mkdtemp(), nn.Linear(2, 1)
    >>> save(folder, {"model": model, "step": 7})
    >>> load(folder, {"model": nn.Linear(2, 1), "step": 0})["step"]
    7
    """
    return fill(open_checkpoint(path), into, strict=strict, cast=cast)


def fill(catalogue: Catalogue, into: dict[str, Any], *, strict: bool = True, cast: bool = False) -> dict[str, Any]:
    """As :func:`load`, from a catalogue that is already open."""
    filler = Filler(catalogue, parameter_names(into), strict=strict, cast=cast)
    for key, target in into.items():
        if key not in catalogue.tree:
            raise CheckpointError(
                f"{catalogue.root} has no {key!r}", hint=f"it has {', '.join(map(repr, catalogue.tree)) or 'nothing'}"
            )
        into[key] = filler.fill(target, catalogue.tree[key], (key,))
    with torch.no_grad(), bar(f"loading {catalogue.root}", sum(want.out.nbytes for want in filler.wants)) as progress:
        read(catalogue, filler.wants, progress=progress)
    for finish in filler.later:
        finish()
    for key, node in into.items():
        into[key] = _as_numpy(node)
    return into


class Filler:
    """Collects what has to be read where, and what is left to do when it has been."""

    def __init__(self, catalogue: Catalogue, names: Mapping[int, str], *, strict: bool, cast: bool) -> None:
        self.catalogue = catalogue
        self.names = names
        self.strict = strict
        self.cast = cast
        self.wants: list[Want] = []
        self.later: list[Callable[[], None]] = []

    def fill(self, target: Any, node: Any, path: Path_) -> Any:
        if isinstance(target, nn.Module):
            self._module(target, node, path)
            return target
        if isinstance(target, Optimizer):
            if not is_optimizer(node):
                raise CheckpointError(f"{self.catalogue.root}: {name_of(path)} is not an optimizer's state")
            fill_optimizer(self, target, node, path)
            return target
        if isinstance(target, torch.Tensor):
            self.tensor(target, node, path)
            return target
        if isinstance(target, dict) and target and isinstance(node, dict):
            return self._dict(target, node, path)
        if hasattr(target, "load_state_dict"):
            value = self.value(node)
            self.later.append(lambda: target.load_state_dict(_as_numpy(value)))
            return target
        return self.value(node)

    def value(self, node: Any) -> Any:
        """What was saved, tensors in memory of their own."""
        if isinstance(node, Ref):
            entry = find(self.catalogue, node.name)
            out = torch.empty(entry.shape, dtype=entry.dtype)
            self.wants.append(Want(name=node.name, box=whole(entry.shape), out=out))
            return out
        if isinstance(node, dict):
            return {key: self.value(item) for key, item in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self.value(item) for item in node)
        return node

    def tensor(self, target: torch.Tensor, node: Any, path: Path_) -> None:
        """Wants the boxes that this worker holds of the target."""
        name, root = name_of(path), self.catalogue.root
        if not isinstance(node, Ref):
            raise CheckpointError(f"{root}: {name} is not a tensor in the checkpoint, but {node!r}")
        entry = find(self.catalogue, node.name)
        held = held_of(target, name)
        if held.shape != entry.shape:
            raise CheckpointError(f"{root}: {name} has shape {entry.shape}, not {held.shape}")
        if held.dtype != entry.dtype and not self.cast:
            raise CheckpointError(
                f"{root}: {name} is {entry.dtype}, not {held.dtype}", hint="cast=True converts, and may lose bits"
            )
        self.wants += [Want(name=node.name, box=part.box, out=part.tensor) for part in held.parts]

    def _dict(self, target: dict[Any, Any], node: dict[Any, Any], path: Path_) -> dict[Any, Any]:
        self.refuse_missing([key for key in target if key not in node], path)
        self.refuse_unexpected([key for key in node if key not in target], path)
        for key in target:
            target[key] = self.fill(target[key], node[key], (*path, key))
        return target

    def _module(self, module: nn.Module, node: Any, path: Path_) -> None:
        if not isinstance(node, dict):
            raise CheckpointError(f"{self.catalogue.root}: {name_of(path)} is not a module's state")
        targets = tensors_of(module)
        known = {memory_of(t) for name, t in targets.items() if name in node and isinstance(t, torch.Tensor)} - {None}
        # A second name of a tied weight need not be there: its first one fills it.
        tied = {n for n, t in targets.items() if isinstance(t, torch.Tensor) and memory_of(t) in known}
        self.refuse_missing([name for name in targets if name not in node and name not in tied], path)
        extra = [name for name in node if name not in targets and name not in self.catalogue.tied]
        self.refuse_unexpected(extra, path)
        filled: set[Any] = set()
        for name in (name for name in targets if name in node):
            target = targets[name]
            if not isinstance(target, torch.Tensor):
                self._extra_state(module, name, node[name])
            elif memory_of(target) is None or memory_of(target) not in filled:
                filled.add(memory_of(target))
                self.tensor(target, node[name], (*path, name))

    def _extra_state(self, module: nn.Module, name: str, node: Any) -> None:
        value = self.value(node)
        self.later.append(lambda: unwrap(module).load_state_dict({name: _as_numpy(value)}, strict=False) and None)

    def refuse_missing(self, names: list[Any], path: Path_) -> None:
        if names:
            raise CheckpointError(f"{self.catalogue.root}: {name_of(path)} has no {_some(names)}")

    def refuse_unexpected(self, names: list[Any], path: Path_) -> None:
        if names and self.strict:
            raise CheckpointError(
                f"{self.catalogue.root}: {name_of(path)} has {_some(names)}, which nothing here takes",
                hint="strict=False leaves it out",
            )


def _some(names: list[Any]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more


def _as_numpy(node: Any) -> Any:
    """Puts numpy arrays back where they were."""
    if isinstance(node, dict):
        if node.keys() == {NUMPY}:
            return node[NUMPY].numpy()
        return {key: _as_numpy(item) for key, item in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_as_numpy(item) for item in node)
    return node
