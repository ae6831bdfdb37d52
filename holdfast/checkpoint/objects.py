"""Modules, optimizers and plain values as a tree of names, the same for every layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.checkpoint.disk import checksum
from holdfast.checkpoint.held import Held, held_of
from holdfast.checkpoint.pieces import NUMPY, PER_RANK, Ref, name_of
from holdfast.checkpoint.rank_values import PerRank
from holdfast.checkpoint.safetensors_writer import bytes_of
from holdfast.checkpoint.trees import refs
from holdfast.errors import UsageError
from holdfast.words import a_kind

# Parts that torch.compile and activation checkpointing put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Absent:
    """A tensor that only other workers hold. ``tensor`` gives its identity, shape and dtype, never its elements."""

    tensor: torch.Tensor

    @property
    def held(self) -> Held:
        """Held parts of the tensor on this worker: none."""
        return Held(shape=tuple(self.tensor.shape), dtype=self.tensor.dtype, parts=(), derived=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialModule:
    """A module with all names of the model, of which this worker lacks the values of some tensors.

    ``absent`` has those by name; None stands for something absent that is no tensor (a module's extra state). An
    optimizer beside it in the tree keeps nothing for absent parameters.

    >>> model = nn.Linear(2, 1)
    >>> described = describe({"model": PartialModule(module=model, absent={"bias": Absent(tensor=model.bias)})})
    >>> {name: len(held.parts) for name, held in described.held.items()}
    {'model/weight': 1, 'model/bias': 0}
    """

    module: nn.Module
    absent: Mapping[str, Absent | None] = field(default_factory=dict)

    @staticmethod
    def of(module: nn.Module | PartialModule) -> PartialModule:
        """A partial module as it is; a whole module as one of which nothing is absent."""
        return module if isinstance(module, PartialModule) else PartialModule(module=module)


@dataclass(kw_only=True)
class Described:
    """Description of what this worker saves: a tree with a ``Ref`` for each tensor, and the parts it holds of each.

    ``tied`` leads from second names to first ones; ``frozen`` and ``buffers`` are names in the model. ``still`` has the
    names of tensors that are frozen parameters, and ``left_out`` those of them that are not in the tree.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    leading: set[str] = field(default_factory=set)  # tensors that may differ between workers: the first one's counts
    # Parameters and slots. They are equal copies, unless a script has cut them by hand: samples are enough to tell.
    sampled: set[str] = field(default_factory=set)
    still: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)


def check_tree(tree: object) -> None:
    """Raise ``UsageError`` if what is to be saved or loaded is no dict."""
    if not isinstance(tree, Mapping):
        raise UsageError(f"{a_kind(tree)} is no dict of what a checkpoint holds", hint="as in {'model': model}")


def describe(tree: Mapping[str, Any], *, rank: int = 0, trainable_only: bool = False) -> Described:
    """Describes a tree of modules, optimizers, objects with a state_dict, tensors and values.

    ``rank``: of this worker, for values that each has for itself. ``trainable_only``: trained modules without their
    frozen parameters. Raises ``UsageError`` for a value that cannot be saved, and for two tensors of one name.

    >>> described = describe({"model": nn.Linear(2, 1), "step": 7})
    >>> sorted(described.held), described.tree["step"]
    (['model/bias', 'model/weight'], 7)
    """
    check_tree(tree)
    walker = _Walker(names=parameter_names(tree), absent=absent_in(tree), rank=rank)
    for key in tree:
        if not isinstance(key, str):
            raise UsageError(f"the key {key!r} is {a_kind(key)}", hint="name what is saved by text")
    walker.out.tree = {key: walker.walk(value, (key,)) for key, value in tree.items()}
    if trainable_only:
        walker.leave_frozen_out()
    return walker.out


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, torch.compile and the like."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif type(module).__name__ == "OptimizedModule":  # torch.compile's; importing its class takes a second
            module = module.get_submodule("_orig_mod")
        else:
            return module


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """A module's parameters and buffers (and extra state) by the names they have without wrappers."""
    return {clean(name): value for name, value in unwrap(module).state_dict(keep_vars=True).items()}


def clean(name: str) -> str:
    """A name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_names(tree: Any) -> dict[int, list[str]]:
    """The names of all parameters of the modules in a tree, by the parameters' ids; a tied parameter has several."""
    names: dict[int, list[str]] = {}
    for module in (part.module for part in _modules(tree)):
        # tensors_of first: it calls state_dict, and until then FSDP2 may have other parameters in the module than
        # the optimizer has.
        for name, value in (*tensors_of(module).items(), *unwrap(module).named_parameters(remove_duplicate=False)):
            if isinstance(value, nn.Parameter) and clean(name) not in names.setdefault(id(value), []):
                names[id(value)].append(clean(name))
    return names


def absent_in(tree: Any) -> frozenset[int]:
    """The ids of the tensors that are absent in the modules of a tree."""
    return frozenset(id(one.tensor) for part in _modules(tree) for one in part.absent.values() if one is not None)


def _modules(tree: Any) -> Iterator[PartialModule]:
    if isinstance(tree, nn.Module | PartialModule):
        yield PartialModule.of(tree)
    elif isinstance(tree, PerRank):
        yield from _modules(tree.value)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _modules(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _modules(value)


def names_in(optimizer: Optimizer, names: Mapping[int, Sequence[str]]) -> list[list[str | int]]:
    """The names of each group's parameters: from their module, from ``param_names``, or numbers as torch gives them.

    Raises ``UsageError`` if only some have names, or two have the same.
    """
    keys: list[list[str | int]] = []
    number = 0
    for group in optimizer.param_groups:
        own = group.get("param_names")
        keys.append([])
        for position, p in enumerate(group["params"]):
            keys[-1].append(names[id(p)][0] if id(p) in names else own[position] if own else number)
            number += 1
    used = [key for group in keys for key in group]
    nameless = any(isinstance(key, int) for key in used)
    if nameless and any(isinstance(key, str) for key in used):
        raise UsageError("the optimizer has parameters that are in no saved module", hint="save their module too")
    if len(set(used)) != len(used):
        twice = next(key for key in used if used.count(key) > 1)
        raise UsageError(f"two parameters of the optimizer are named {twice}", hint="one optimizer for each module")
    return keys


def memory_of(tensor: torch.Tensor | Absent) -> tuple[Any, ...] | None:
    """A key that is equal for two tensors in the same memory; None for a tensor without memory.

    A DTensor is its own key: whether it has memory differs between workers, but all of them must agree on which
    tensors are one. So is an absent tensor: its stand-in may stand in for others too.
    """
    if isinstance(tensor, Absent):
        return (id(tensor.tensor),)
    if isinstance(tensor, DTensor):
        return (id(tensor),)
    if not tensor.numel() or tensor.layout is not torch.strided:
        return None
    meaning = (str(tensor.dtype), tensor.is_conj(), tensor.is_neg())
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *meaning)


def is_plain(optimizer: Optimizer) -> bool:
    """Whether an optimizer is saved as groups and slots; one with a ``state_dict`` of its own saves itself."""
    kind = type(optimizer)
    return kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict


class _Walker:
    """Walks through a tree and collects a description of it."""

    def __init__(self, names: Mapping[int, Sequence[str]], absent: Collection[int], rank: int) -> None:
        self.names = names
        self.absent = absent
        self.rank = rank
        self.out = Described()
        self._seen: dict[tuple[Any, ...], tuple[str, Any]] = {}  # keeps the tensors alive, too: ids are reused
        self._sampled = False
        self._trained: set[str] = set()  # names of tensors that are trained parameters
        self._sections: list[dict[str, Any]] = []  # of modules that are trained
        self._alone = False  # within a value of this rank alone: its tensors are no copies of shared ones

    def walk(self, value: Any, path: tuple[Any, ...]) -> Any:
        """A value of the tree as it is saved, with a ``Ref`` in the place of each tensor."""
        if isinstance(value, nn.Module | PartialModule):
            return self._module(PartialModule.of(value), path)
        if isinstance(value, Optimizer) and is_plain(value):
            return self._optimizer(value, path)
        if isinstance(value, torch.Tensor | Absent):
            return self._tensor(value, path)
        if isinstance(value, PerRank):
            return self._per_rank(value, path)
        if isinstance(value, np.ndarray):
            return {NUMPY: self._tensor(_from_numpy(value, name_of(path)), path)}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            for mark in (NUMPY, PER_RANK):
                if mark in value:
                    raise UsageError(f"{name_of(path)} has a key {mark!r}", hint="it is what values are marked with")
            return {key: self.walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.walk(item, (*path, i)) for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if hasattr(value, "state_dict"):
            return self.walk(value.state_dict(), path)
        if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype):
            return value
        raise UsageError(
            f"{name_of(path)} is {a_kind(value)}, which cannot be saved",
            hint="modules, optimizers, things with a state_dict, tensors, numbers, strings, lists and dicts can",
        )

    def _per_rank(self, value: PerRank, path: tuple[Any, ...]) -> dict[str, Any]:
        if self._alone:
            raise UsageError(f"{name_of(path)} is per_rank inside of per_rank", hint="one is enough")
        self._alone = True
        mine = self.walk(value.value, (*path, PER_RANK, str(self.rank)))
        self._alone = False
        return {PER_RANK: {str(self.rank): mine}}

    def _tensor(self, tensor: torch.Tensor | Absent, path: tuple[Any, ...]) -> Ref:
        name = name_of(path)
        memory = None if self._alone else memory_of(tensor)
        if memory is not None and memory in self._seen:
            return Ref(name=self._seen[memory][0])
        if name in self.out.held:
            raise UsageError(f"two tensors are named {name}", hint="keys that read the same are one name")
        self.out.held[name] = tensor.held if isinstance(tensor, Absent) else held_of(tensor, name)
        if self._sampled:
            self.out.sampled.add(name)
        if memory is not None:
            self._seen[memory] = (name, tensor)
        return Ref(name=name)

    def _module(self, part: PartialModule, path: tuple[Any, ...]) -> dict[str, Any]:
        section: dict[str, Any] = {}
        for name, value in tensors_of(part.module).items():
            if name in part.absent and part.absent[name] is None:
                continue
            self._sampled = isinstance(value, nn.Parameter)
            section[name] = ref = self.walk(part.absent.get(name, value), (*path, name))
            self._sampled = False
            if isinstance(ref, Ref) and ref.name != name_of((*path, name)):  # the memory was seen under another name
                first = next((n for n, other in section.items() if other == ref), None)
                if first not in (None, name):
                    self.out.tied[name] = str(first)
            if isinstance(value, nn.Parameter):
                if not value.requires_grad:
                    self.out.frozen.append(name)
                if isinstance(ref, Ref) and not self._alone:
                    (self._trained if value.requires_grad else self.out.still).add(ref.name)
            elif isinstance(value, torch.Tensor):
                self.out.buffers.append(name)
                self.out.leading.add(name_of((*path, name)))
        self.out.still -= self._trained  # one memory may have a frozen and a trained parameter
        if any(ref.name in self._trained for ref in section.values() if isinstance(ref, Ref)):
            self._sections.append(section)
        return section

    def leave_frozen_out(self) -> None:
        """Takes frozen parameters out of modules that are trained.

        What something else in the tree refers to is saved with that. A module of which nothing is trained is not a base
        with an adapter, but perhaps an average of weights, which changes: it is saved whole.
        """
        for section in self._sections:
            for name in [name for name, ref in section.items() if isinstance(ref, Ref) and ref.name in self.out.still]:
                del section[name]
        self.out.left_out = self.out.still - {ref.name for ref in refs(self.out.tree)}

    def _optimizer(self, optimizer: Optimizer, path: tuple[Any, ...]) -> dict[str, Any]:
        keys = names_in(optimizer, self.names)
        known = {p for group in optimizer.param_groups for p in group["params"]}
        for stray in optimizer.state:
            if stray not in known:
                shown = stray if isinstance(stray, str) else f"{a_kind(stray)}"
                raise UsageError(f"{name_of(path)} keeps {shown} beside its parameters", hint="save it by itself")
        state, groups = {}, []
        for group, called in zip(optimizer.param_groups, keys, strict=True):
            for p, key in zip(group["params"], called, strict=True):
                if p in optimizer.state and id(p) not in self.absent:
                    # Slots of a sharded parameter may be plain tensors that differ between workers: no samples.
                    self._sampled = not isinstance(p, DTensor)
                    state[key] = self.walk(optimizer.state[p], (*path, "state", key))
                    self._sampled = False
            hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({"params": called, **self._settings(hyper, (*path, "param_groups"))})
        return {"state": state, "param_groups": groups}

    def _settings(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Settings of a group. A tensor among them is named by its content: equal ones are one on all workers."""
        if isinstance(value, dict):
            return {key: self._settings(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._settings(item, path) for item in value)
        if not isinstance(value, torch.Tensor):
            return self.walk(value, path)
        content = np.concatenate([bytes_of(value), np.frombuffer(f"{value.dtype}{value.shape}".encode(), np.uint8)])
        name = name_of((*path, checksum(content)))
        self.out.held.setdefault(name, held_of(value, name))
        return Ref(name=name)


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except TypeError as e:
        raise UsageError(f"{name} is a numpy array of {array.dtype}", hint="arrays of numbers can be saved") from e
