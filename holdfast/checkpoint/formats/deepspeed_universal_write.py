"""Writes DeepSpeed's universal checkpoints, which DeepSpeed loads as ZeRO-1, 2 and 3 alike.

Each stage looks for other things, and all of them are there: model states under both names, and an
``optimizer_state.pt`` with what ZeRO-1 and 2 read (hyper-parameters of every group) and what ZeRO-3 reads (one
step, and one group's hyper-parameters, which it gives to all groups: so it gets those that are the same in all,
and keeps the script's own where they differ). One tensor at a time is in memory. These are pickles, because
DeepSpeed reads nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.disk import Progress, explained, silent, sync_folder
from holdfast.checkpoint.formats.deepspeed_extras import KEPT, OWN
from holdfast.checkpoint.formats.output import appearing
from holdfast.checkpoint.pieces import Catalogue, Ref, Shape
from holdfast.checkpoint.tensor_reader import read_tensor
from holdfast.checkpoint.trees import replace_refs, some
from holdfast.errors import CheckpointError
from holdfast.words import count

SLOTS = "slots"  # the folder of slots that DeepSpeed cannot load, beside its folder "zero", of which it loads all files
REST = "holdfast"  # the key for sections of the tree that have no place in DeepSpeed's files
VERSION = "0.19.8"  # of DeepSpeed, whose files these are
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # exact in fp32


def write(catalogue: Catalogue, path: Path, *, progress: Progress = silent, tag: str | None = None) -> None:
    """Writes a folder with one tag in it, for ``load_checkpoint(path)`` with ``load_universal_checkpoint`` set.

    DeepSpeed restores neither buffers nor frozen parameters from it; they are there for other readers. Its
    ZeRO-3 loads Adam's state only.
    """
    plan = _Plan.of(catalogue)
    tag = tag or f"global_step{plan.step}_universal"
    with appearing(path) as unfinished:
        with explained(unfinished, "write"):
            (unfinished / tag / "zero").mkdir(parents=True)
        _write_tensors(plan, unfinished / tag, progress)
        _write_states(plan, unfinished / tag)
        with explained(unfinished, "write"):
            (unfinished / "latest_universal").write_text(tag)
            for folder, _, _ in os.walk(unfinished):
                sync_folder(Path(folder))


@dataclass(kw_only=True)
class _Plan:
    """The plan of a checkpoint: groups of parameters, the slots of each group that DeepSpeed holds, and the rest."""

    catalogue: Catalogue
    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    others: list[str]
    step: int
    slots: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, catalogue: Catalogue) -> _Plan:
        """The plan for a catalogue; ``CheckpointError`` if DeepSpeed could not load it."""
        optimizer = catalogue.tree.get("optimizer")
        where = catalogue.root
        if not isinstance(optimizer, dict) or not optimizer.get("param_groups"):
            reason = f"{where} has no optimizer, without which DeepSpeed loads no universal checkpoint"
            raise CheckpointError(reason, hint="write the weights as safetensors and let the script load them")
        model: dict[str, Any] = catalogue.tree.get("model") or {}
        trained = [name for group in optimizer["param_groups"] for name in group["params"]]
        for name in trained:
            if name not in model:
                reason = f"{where}: the optimizer's parameter {name!r} is not a name in the model"
                raise CheckpointError(reason, hint="DeepSpeed's universal checkpoints need the parameters' names")
        _check_names(model)
        known = {*trained, *catalogue.tied}
        others = [name for name, value in model.items() if name not in known and isinstance(value, Ref)]
        step = catalogue.tree.get("step")
        plan = cls(
            catalogue=catalogue,
            groups=optimizer["param_groups"],
            state=optimizer.get("state", {}),
            others=others,
            step=step if isinstance(step, int) else 0,
        )
        plan.slots = [plan._slots_of(group["params"]) for group in plan.groups]
        return plan

    @property
    def filled_in(self) -> list[str]:
        """Parameters for which the optimizer lacks a state that others in their group have."""
        groups = zip(self.groups, self.slots, strict=True)
        return [name for group, slots in groups for name in group["params"] if not {*slots} <= self.kept(name).keys()]

    def shape(self, name: str) -> Shape:
        """The shape of a parameter."""
        return self.catalogue.tensors[self.catalogue.tree["model"][name].name].shape

    def kept(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a parameter."""
        return self.state.get(name, {})

    def read(self, value: Any) -> Any:
        """A value of the tree, with its tensors read."""
        return replace_refs(value, lambda ref: read_tensor(self.catalogue, ref.name))

    def fits(self, name: str, value: Any) -> bool:
        """Whether DeepSpeed can hold a slot: one element for each element of the parameter."""
        return isinstance(value, Ref) and self.catalogue.tensors[value.name].shape == self.shape(name)

    def _slots_of(self, names: list[str]) -> list[str]:
        """The slots of a group that DeepSpeed can hold."""
        fits: dict[str, bool] = {}
        for name in names:
            for slot, value in self.kept(name).items():
                fits[slot] = fits.get(slot, slot != "step") and self.fits(name, value)
        return [slot for slot, does in fits.items() if does]


def changes(catalogue: Catalogue) -> list[str]:
    """Changes that :func:`write` makes to a checkpoint, in words."""
    plan = _Plan.of(catalogue)
    said = []
    if filled := plan.filled_in:
        had = f"that {count(len(filled), 'parameter')}, as {filled[0]}, had no state in the optimizer"
        said.append(f"{had} (DeepSpeed gives them zeros and the step of their group)")
    extra = [
        name for name, value in catalogue.tree["model"].items() if value is not None and not isinstance(value, Ref)
    ]
    return said + [f"the model's {some(extra)}, which is not a tensor"] * bool(extra)


def _check_names(model: Mapping[str, Any]) -> None:
    for name in model:
        if "/" in name or name in ("", ".", "..", "optimizer_state.pt"):
            raise CheckpointError(f"{name!r} cannot be the name of a folder", hint="rename it by a rule")


def _write_tensors(plan: _Plan, folder: Path, progress: Progress) -> None:
    for group, slots in zip(plan.groups, plan.slots, strict=True):
        step = _step_of(plan, group)
        for name in group["params"]:
            place = folder / "zero" / name
            _save(place / "fp32.pt", {"param": _fp32(plan, plan.catalogue.tree["model"][name], name)}, progress)
            if step is not None and (slots or plan.kept(name)):
                _save(place / "step.pt", step, progress)
            for slot in slots:
                value = plan.kept(name).get(slot)
                # DeepSpeed keeps one state for a whole group: a parameter that never had a gradient has zeros.
                tensor = torch.zeros(plan.shape(name)) if value is None else _fp32(plan, value, f"{name} ({slot})")
                _save(place / f"{slot}.pt", {"param": tensor}, progress)
            for slot, value in plan.kept(name).items():
                if slot not in slots and slot != "step":
                    _save(folder / SLOTS / name / f"{slot}.pt", plan.read(value), progress)
    for name in plan.others:
        tensor = plan.read(plan.catalogue.tree["model"][name])
        _save(folder / "zero" / name / "fp32.pt", {"param": tensor}, progress)


def _fp32(plan: _Plan, ref: Any, what: str) -> torch.Tensor:
    """A tensor as DeepSpeed's optimizers have it."""
    tensor: torch.Tensor = plan.read(ref)
    if tensor.dtype not in _FLOATS:
        reason = f"{plan.catalogue.root}: {what} is {tensor.dtype}, and DeepSpeed's optimizers are fp32"
        raise CheckpointError(reason, hint="convert to another format, which keeps it as it is")
    return tensor.float()


def _step_of(plan: _Plan, group: Mapping[str, Any]) -> Any:
    """The step of a group; ``CheckpointError`` if its parameters differ, since DeepSpeed has one for all of them."""
    steps = {name: plan.read(plan.kept(name)["step"]) for name in group["params"] if "step" in plan.kept(name)}
    if not steps:
        return None
    first, *_ = steps
    for name, step in steps.items():
        if float(step) != float(steps[first]):
            reason = f"{name} is at step {float(step):g}, {first} at {float(steps[first]):g}"
            hint = "DeepSpeed has one step for all parameters of a group"
            raise CheckpointError(f"{plan.catalogue.root}: {reason}", hint=hint)
    return steps[first]


def _write_states(plan: _Plan, folder: Path) -> None:
    groups: list[dict[str, Any]] = [plan.read(group) for group in plan.groups]
    step = next((s for s in (_step_of(plan, group) for group in plan.groups) if s is not None), groups[0].get("step"))
    common = {key: value for key, value in groups[0].items() if key != "params" and _same_in(groups, key)}
    kept = plan.catalogue.tree.get("deepspeed") or {}
    version = kept.get("ds_version", VERSION)
    optimizer = {
        "ds_version": version,
        "param_groups": groups,
        "optimizer_state_dict": {
            "state": {0: {} if step is None else {"step": step}},
            "param_groups": [{**common, "params": []}],
        },
    }
    _save(folder / "zero" / "optimizer_state.pt", optimizer, silent)
    states = _model_states(plan, kept, version)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # ZeRO-1 and 2; ZeRO-3
        _save(folder / name, states, silent)


def _same_in(groups: list[dict[str, Any]], key: str) -> bool:
    first = groups[0][key]
    for group in groups[1:]:
        value = group.get(key)
        if type(value) is not type(first):
            return False
        if not (torch.equal(first, group[key]) if isinstance(first, torch.Tensor) else value == first):
            return False
    return True


def _model_states(plan: _Plan, kept: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The model states: what ``load_checkpoint`` reads beside the tensors, and how the parameters are grouped."""
    catalogue = plan.catalogue
    client = plan.read(catalogue.tree.get("client_state") or {})
    for key in client:
        if key in OWN or key == REST:
            raise CheckpointError(f"{catalogue.root}: client_state has the key {key}, which is DeepSpeed's own")
    own = ("model", "optimizer", "lr_scheduler", "client_state")
    rest = {key: plan.read(value) for key, value in catalogue.tree.items() if key not in own}
    return {
        **{key: plan.read(kept.get(key)) for key in KEPT},
        "module": {},  # a folder for each of them
        "buffer_names": [name for name in catalogue.buffers if name in plan.others],
        "optimizer": None,
        "param_shapes": [{name: torch.Size(plan.shape(name)) for name in group["params"]} for group in plan.groups],
        "frozen_param_shapes": {n: torch.Size(plan.shape(n)) for n in plan.others if n not in catalogue.buffers},
        "frozen_param_fragments": None,
        "shared_params": dict(catalogue.tied),
        "lr_scheduler": plan.read(catalogue.tree.get("lr_scheduler")),
        "skipped_steps": kept.get("skipped_steps", 0),
        "global_steps": plan.step,
        "global_samples": kept.get("global_samples", 0),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": version,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        **client,
        REST: rest,
    }


def _save(path: Path, value: Any, progress: Progress) -> None:
    with explained(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
    progress(sum(tensor.nbytes for tensor in _tensors(value)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
