"""Makes the tree of a foreign checkpoint canonical: usual names of sections, parameters by name, plain values.

Scripts call their sections "model" or "state_dict", number parameters or name them, save a bare state_dict or
wrap everything once more. What can be told for certain is made the same; the rest stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.formats.files import files_of
from holdfast.checkpoint.formats.pickled import Foreign
from holdfast.checkpoint.pieces import Catalogue, Ref, Stored, TensorEntry, catalogue_tree, entry_of, name_of
from holdfast.checkpoint.trees import groups_of
from holdfast.errors import CheckpointError

# Names that scripts give to a section, by its canonical name.
_SECTIONS = {
    "model": ("model", "state_dict", "model_state_dict"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optim"),
}
Tree = dict[str, Any]


def assemble(*, format: str, root: Path, tree: Mapping[Any, Any], where: Path, read: Iterable[str] = ()) -> Catalogue:
    """The catalogue of a tree whose tensors are ``Stored`` or ``TensorEntry``, after making it canonical.

    ``read`` are the files that were read for it, ``where`` what errors call the checkpoint.
    """
    changed: list[str] = []
    made = canonical(tree, where=where, changed=changed)
    model: Tree = made["model"] if isinstance(made.get("model"), dict) else {}
    tied = find_tied(model)
    if tied:
        made["model"] = {name: value for name, value in model.items() if name not in tied}
    try:
        found, tensors = catalogue_tree(made)
    except AssertionError as error:  # {1: …, "1": …}
        raise CheckpointError(f"{where}: {error}", hint="use names that differ as texts") from error
    if tied:
        found["model"] = {
            name: Ref(name=name_of(("model", tied[name]))) if name in tied else found["model"][name] for name in model
        }
    files = files_of(root, tensors, read)
    details = {"left_out": changed} if changed else {}
    return Catalogue(format=format, root=root, tensors=tensors, tree=found, files=files, tied=tied, details=details)


def canonical(tree: Mapping[Any, Any], *, where: Path, changed: list[str] | None = None) -> Tree:
    """A tree with sections under their usual names, the optimizer by names, and plain values only (:func:`plain`).

    ``changed`` collects in words what has become something else. Raises ``CheckpointError`` if two sections could be
    the model or the optimizer.

    >>> canonical({"model_state_dict": {}, "epoch": 3}, where=Path("a.pt"))
    {'model': {}, 'epoch': 3}
    """
    made = _sections(_unwrapped(plain(dict(tree), changed)), where)
    if "model" not in made:
        made = _with_model(made)
    if isinstance(made.get("optimizer"), dict):
        names = made["model"] if isinstance(made.get("model"), dict) else ()
        made["optimizer"] = _optimizer(made["optimizer"], names, where)
    return made


def plain(value: Any, changed: list[str] | None = None, path: tuple[Any, ...] = ()) -> Any:
    """A value as any format can keep it: foreign objects as dicts, arrays and sets as lists, devices as texts.

    ``changed`` collects in words what has become something else.

    >>> said: list[str] = []
    >>> plain({"seen": {2, 1}, "x": 1 + 2j}, said), said[0]
    ({'seen': [1, 2], 'x': '(1+2j)'}, 'that seen was a set: it is a list now')
    """

    def became(was: str, now: str) -> None:
        if changed is not None:
            changed.append(f"that {name_of(path)} was a {was}: it is a {now} now")

    if isinstance(value, dict):
        return {_key(key): plain(item, changed, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item, changed, (*path, number)) for number, item in enumerate(value))
    if isinstance(value, set | frozenset):
        became("set", "list")
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, Foreign):
        made = {"class": f"{value.module}.{value.name}"}
        if value.args:
            made["args"] = plain(value.args, changed, (*path, "args"))
        state = value.state
        return {**made, **({"state": plain(state, changed, (*path, "state"))} if state is not None else {})}
    if isinstance(value, np.ndarray):
        became(f"numpy array of {value.dtype}", "list")  # its bytes are in the pickle, not in a place of the file
        return value.tolist()
    if isinstance(value, torch.device | complex):
        became(type(value).__name__ + " number" * isinstance(value, complex), "text")
        return str(value)
    return value


def _key(key: Any) -> Any:
    return key if key is None or isinstance(key, str | int | float | bytes) else str(plain(key))


def is_tensor(value: Any) -> bool:
    """Whether a value of a tree that is being read stands for a tensor."""
    return isinstance(value, Stored | TensorEntry)


def _unwrapped(tree: Tree) -> Tree:
    """Takes off a wrapper with nothing else in it: ``{"app": {"model": …, "optim": …}}``."""
    if len(tree) == 1:
        name, inside = next(iter(tree.items()))
        names = {alias for aliases in _SECTIONS.values() for alias in aliases}
        if name not in names and isinstance(inside, dict) and any(isinstance(inside.get(n), dict) for n in names):
            return inside
    return tree


def _sections(tree: Tree, where: Path) -> Tree:
    renamed: dict[Any, str] = {}
    for section, aliases in _SECTIONS.items():
        present = [name for name in aliases if name in tree and (name == section or isinstance(tree[name], dict))]
        if len(present) > 1:
            raise CheckpointError(
                f"{where} has {' and '.join(map(repr, present))}, either of which could be the {section}",
                hint="save it again with one of them",
            )
        renamed.update(dict.fromkeys(present, section))
    return {renamed.get(name, name): value for name, value in tree.items()}


def _with_model(tree: Tree) -> Tree:
    """A tree in which tensors that lie bare are the section "model".

    They are one if there is nothing else (a state_dict), or if an optimizer beside them knows all its names from them.
    """
    tensors = {name: value for name, value in tree.items() if is_tensor(value) and isinstance(name, str)}
    rest = {name: value for name, value in tree.items() if name not in tensors}
    if tensors and all(isinstance(name, str) and name.endswith("_extra_state") for name in rest):
        return {"model": tree}
    optimizer = rest.get("optimizer")
    if tensors and isinstance(optimizer, dict):
        known = _parameters(optimizer, tensors)
        if known and known <= tensors.keys():
            return {"model": tensors, **rest}
    return tree


def find_tied(model: Mapping[str, Any]) -> dict[str, str]:
    """Second names of the same bytes, each with the first name.

    >>> a = Stored(file="a.pt", offset=64, dtype=torch.float32, shape=(2,), strides=(1,))
    >>> find_tied({"embed": a, "bias": 3, "head": a})
    {'head': 'embed'}
    """
    first: dict[TensorEntry, str] = {}
    tied: dict[str, str] = {}
    for name, value in model.items():
        if is_tensor(value):
            entry = entry_of(value) if isinstance(value, Stored) else value
            known = first.setdefault(entry, name) if entry.nbytes else name
            if known != name:
                tied[name] = known
    return tied


# --- the optimizer --------------------------------------------------------------------------------


def _parameters(optimizer: Tree, model: Iterable[str]) -> set[Any]:
    if groups := groups_in(optimizer):
        return {name for group in groups for name in group.get("param_names") or group["params"]}
    state, settings = _split_flat(optimizer, set(model))
    return {*state, *settings}


def _optimizer(optimizer: Tree, model: Iterable[str], where: Path) -> Tree:
    groups = groups_in(optimizer)
    if groups is not None:
        rest = {key: value for key, value in optimizer.items() if key not in ("state", "param_groups")}
        state, groups = _by_name(optimizer.get("state") or {}, groups, where)
        return {"state": state, "param_groups": groups, **rest}
    flat = [key for key in optimizer if str(key).startswith(("state.", "param_groups."))]
    if flat and len(flat) == len(optimizer):
        state, settings = _split_flat(optimizer, set(model))
        return {"state": state, "param_groups": _regrouped(settings, state)}
    return optimizer


def groups_in(optimizer: Tree) -> list[Tree] | None:
    """The groups of what ``Optimizer.state_dict`` gives; None for anything else."""
    return groups_of(optimizer) if isinstance(optimizer.get("state", {}), dict) else None


def _by_name(state: dict[Any, Any], groups: list[Tree], where: Path) -> tuple[dict[Any, Any], list[Tree]]:
    """Names in the place of numbers, where torch has saved both."""
    if any(isinstance(key, int) for group in groups for key in group["params"]):  # DCP makes texts of all keys
        state = {int(key) if str(key).isdigit() else key: value for key, value in state.items()}
    if not all("param_names" in group for group in groups):
        return state, groups
    names: dict[Any, Any] = {}
    for group in groups:
        if len(group["params"]) != len(group["param_names"]):
            raise CheckpointError(f"{where}: a group of the optimizer has not one name for each parameter")
        names.update(zip(group["params"], group["param_names"], strict=True))
    if len(set(names.values())) < len(names) or not state.keys() <= names.keys():
        raise CheckpointError(f"{where}: the optimizer's parameters and their names do not match")
    made = [
        {key: value for key, value in {**group, "params": list(group["param_names"])}.items() if key != "param_names"}
        for group in groups
    ]
    return {names[key]: value for key, value in state.items()}, made


def _split_flat(optimizer: Tree, model: set[str]) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """DCP's flat form: ``state.<name>.<slot>`` and ``param_groups.<name>.<setting>``, where names have dots."""
    state: dict[str, Tree] = {}
    settings: dict[str, Tree] = {}
    for key, value in optimizer.items():
        section, _, rest = str(key).partition(".")
        name, path = _split_name(rest, model)
        node = (state if section == "state" else settings).setdefault(name, {})
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return state, settings


def _split_name(text: str, model: set[str]) -> tuple[str, list[str]]:
    """A parameter's name and what follows: the longest name that the model has, or all but the last part."""
    for dot in reversed([found.start() for found in re.finditer(r"\.", text)]):
        if text[:dot] in model:
            return text[:dot], text[dot + 1 :].split(".")
    name, _, last = text.rpartition(".")
    return name, [last]


def _regrouped(settings: Mapping[str, Tree], state: Mapping[str, Tree]) -> list[Tree]:
    """Parameters with the same settings are one group; which groups there were is not in the file."""
    groups: dict[str, Tree] = {}  # by their settings as text: comparing each with each takes long where there are many
    for name in {**settings, **state}:
        wanted = settings.get(name, {})
        key = repr(sorted(((str(key), _equal(value)) for key, value in wanted.items()), key=lambda item: item[0]))
        groups.setdefault(key, {"params": [], **wanted})["params"].append(name)
    return list(groups.values())


def _equal(value: Any) -> Any:
    """A value whose text is that of equal values: 1, 1.0 and True are equal."""
    if isinstance(value, list | tuple):
        return type(value)(map(_equal, value))
    return float(value) if isinstance(value, bool | int) and abs(value) < 1 << 53 else value
