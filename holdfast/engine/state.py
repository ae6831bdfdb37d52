"""The state of a run, unit by unit: for workers that lack some of it, for checkpoints, and for its hash.

A worker may hold only some layers. The parts of several workers combine to one checkpoint and one hash, the same as
those of a worker that holds everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.objects import Absent, PartialModule
from holdfast.engine.agreement import MODEL, SCRIPT, SETTINGS, SLOTS, Digests, NewHash, combine, digest_of
from holdfast.engine.averages import Ema, average_dtype
from holdfast.engine.holdings import Holdings
from holdfast.engine.model import LayeredModel, Unit
from holdfast.engine.names import Held, Named, Names
from holdfast.engine.plain import in_order
from holdfast.engine.progress import Progress
from holdfast.engine.script_state import ScriptState
from holdfast.engine.shards import local, whole
from holdfast.engine.update import Update
from holdfast.errors import CheckpointError, UsageError


class State:
    """Reads and writes this worker's units of the model and the optimizer, and the state that all workers share.

    ``progress`` has what else a joiner needs to know, such as the step; ``script`` is the script's own state. Any unit
    with memory may be written, but only units in ``holdings`` are read: memory whose values never arrived must not be
    taken for state. Without ``holdings``, every unit with memory counts. ``look`` is called with each unit before it is
    sent, and with None before all are saved or hashed. It may raise.
    """

    def __init__(
        self,
        model: LayeredModel,
        update: Update,
        progress: Progress,
        *,
        holdings: Holdings | None = None,
        script: ScriptState | None = None,
        look: Callable[[Unit | None], None] = lambda unit: None,
    ) -> None:
        self.model = model
        self.update = update
        self.progress = progress
        self._holdings = holdings
        self.script = ScriptState() if script is None else script
        self.remarks: list[str] = []  # on the checkpoint that was restored last, in words
        self._look = look
        self._names = Names(model)
        self._extra = self._names.extra()

    def is_held(self, unit: Unit) -> bool:
        """Whether this worker holds a unit with the run's values."""
        return self.model.is_held(unit) if self._holdings is None else unit.number in self._holdings.held

    # --- from worker to worker -------------------------------------------------------------------

    def common(self) -> Any:
        """Return the state that is the same on every worker: settings of the optimizer, progress, the script's own."""
        told = self.script.told()
        return {"settings": self.update.settings(), "progress": self.progress.to_json(), "script": told}

    def set_common(self, value: Any) -> None:
        """Take over what ``common`` returned on another worker."""
        self.update.set_settings(value["settings"])
        self.progress.take(value["progress"])
        self.script.hear(value["script"])

    def read(self, unit: Unit) -> Any:
        """Return the values of a unit that is held here: parameters, buffers, and the optimizer's slots."""
        assert self.is_held(unit), f"unit {unit.number} is not here"
        self._look(unit)
        trained = [p for p in unit.parameters if p.requires_grad]
        # Buffers are copied: a forward pass may change them while they are being sent.
        copies = [local(buffer).clone() for buffer in unit.buffers]
        parameters = [local(p) for p in unit.parameters]
        value = {"parameters": parameters, "buffers": copies, "slots": self.update.slots(trained)}
        if unit.number in self._extra:
            saved = self.model.module.state_dict()
            value["extra"] = {name: saved[name] for name in self._extra[unit.number]}
        return value

    @torch.no_grad()
    def write(self, unit: Unit, value: Any) -> None:
        """Write what ``read`` returned on another worker into a unit that has memory here."""
        assert self.model.is_held(unit), f"unit {unit.number} has no memory here"
        for mine, theirs in zip(unit.tensors, [*value["parameters"], *value["buffers"]], strict=True):
            local(mine).copy_(theirs)
        self.update.set_slots([p for p in unit.parameters if p.requires_grad], value["slots"])
        if "extra" in value:
            self.model.module.load_state_dict(value["extra"], strict=False)

    def make_frozen(self) -> None:
        """Give layers with frozen weights their first values, where functions make them: a checkpoint may lack them."""
        frozen = [unit for unit in self.model.units if any(not p.requires_grad for p in unit.parameters)]
        self.model.make(unit for unit in frozen if self.model.is_held(unit) and self.model.can_make(unit))

    def filled(self) -> None:
        """Note that a checkpoint was read into all units with memory here, and forget what the others had."""
        _count_writes(unit for unit in self.model.units if self.model.is_held(unit))
        self.forget()

    def forget(self) -> None:
        """Drop the optimizer's slots of parameters that have no memory here."""
        self.update.forget([p for p in self.model.trainable if not self._names.has(p, self.model.is_held)])

    @contextmanager
    def others_keep_their_slots(self, units: Collection[int]) -> Iterator[None]:
        """Keep the slots of all other units while a checkpoint fills these: loading an optimizer clears the rest."""
        filled = {p for unit in self.model.units if unit.number in units for p in unit.parameters}
        slots = self.update.optimizer.state
        kept = {p: slot for p, slot in slots.items() if p not in filled}
        try:
            yield
        finally:
            slots.update(kept)
            _count_writes(unit for unit in self.model.units if unit.number in units)

    # --- checkpoints -----------------------------------------------------------------------------

    def tree(self) -> dict[str, Any]:
        """Return the content of a run's checkpoint: the sections that other tools expect, and "run" for ourselves.

        Units of other workers are there by name and shape, so that the trees of all workers form one checkpoint.
        """
        self._look(None)
        transient = self._transient(self.is_held)
        return {
            **self._sections(self.is_held),
            **self._averages(self.is_held, self.update.averages.copy),
            "scheduler": self.update.settings()["scheduler"],
            "step": self.progress.step,
            **({_STATE: self.script.saved()} if self.script else {}),
            "run": {"progress": self.progress.shared(), "transient": transient, "made_of": self._made_of()},
        }

    def targets(self, filled: Held | None = None) -> dict[str, Any]:
        """Return the tree that a checkpoint is read into, for ``restore``.

        Units for which ``filled`` is true are read in place; None: all that have memory here. The rest are values. The
        script's state is read with no unit, where all workers read what they share.
        """
        filled = filled or self.model.is_held
        own: dict[str, Any] = {_STATE: None} if filled is nothing else {}
        averages = self._averages(filled, self.update.averages.room)
        run = {"progress": None, "transient": self._transient(filled), "made_of": None}
        return {**self._sections(filled), **averages, "scheduler": None, "step": None, **own, "run": run}

    def fit(self, targets: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """Leave out of ``targets`` what the checkpoint does not have. ``saved``: its tree.

        The script's state keeps its first values, and averages begin again. Once, fast mode saved no non-persistent
        buffers: they get the values that their layers begin with, where a function makes the layer.
        """
        for ema in self.update.averages.all:
            if ema.name not in saved:
                targets.pop(ema.name, None)
                self.update.averages.drop(ema)
        if _STATE not in saved:
            targets.pop(_STATE, None)
        if saved["run"]["transient"]:
            return
        unsaved = {id(value) for value in targets["run"]["transient"].values() if isinstance(value, torch.Tensor)}
        targets["run"]["transient"] = {}
        units = [unit for unit in self.model.units if any(id(buffer) in unsaved for buffer in unit.buffers)]
        self.model.make(unit for unit in units if self.model.can_make(unit))

    def restore(self, filled: dict[str, Any]) -> None:
        """Take over the values that were read into ``targets``. Raises ``CheckpointError`` for another optimizer."""
        for what, before, now in zip(_MADE_OF, filled["run"]["made_of"], self._made_of(), strict=True):
            if before != now:
                raise CheckpointError(f"the {what} was a {before} and is a {now}", hint="resume with the same one")
        if self.update.scheduler is not None:
            self.update.scheduler.load_state_dict(filled["scheduler"])
        self.progress.take(filled["run"]["progress"])
        self.remarks = self.script.restore(filled.get(_STATE) or {}, self.progress.loop)
        for ema in self.update.averages.all:
            if ema.name not in filled:
                self.remarks.append(f"it has no {ema.name}, which begins with its weights")

    def _averages(self, held: Held, find: Callable[[Ema, nn.Parameter], torch.Tensor]) -> dict[str, Any]:
        """Return a section for each average of the weights. ``find`` returns that of a parameter that is held."""

        def one(ema: Ema, p: nn.Parameter) -> Any:
            # A stand-in of its own: it would else be taken for the parameter, or for another average of it.
            here = self._names.has(p, held)
            return find(ema, p) if here else Absent(tensor=torch.empty_like(p, dtype=average_dtype(p), device="meta"))

        trained = self._names.trained()
        return {ema.name: {name: one(ema, p) for name, p in trained.items()} for ema in self.update.averages.all}

    def _sections(self, held: Held) -> dict[str, Any]:
        saved = self._names.saved(held)
        absent = {name: _absent(one) for name, one in saved.items() if not one.held}
        return {"model": PartialModule(module=self.model.module, absent=absent), "optimizer": self.update.optimizer}

    def _transient(self, held: Held) -> dict[str, Any]:
        """Return the non-persistent buffers. Modules do not save them, but a run that resumes needs them.

        A layer that gets memory has no values in them, and forward passes may change them in fast mode.
        """
        return {name: one.value if one.held else _absent(one) for name, one in self._names.transient(held).items()}

    def _made_of(self) -> list[str]:
        return [type(getattr(self.update, what)).__name__ for what in _MADE_OF]

    # --- the hash --------------------------------------------------------------------------------

    def sha256(self, *, weights_only: bool = False) -> str:
        """Return the SHA-256 of names, shapes and bytes of weights, buffers, slots and the script's state.

        Raises ``HoldfastError`` if this worker does not hold all of them.
        """
        return self.combine([self.digests(weights_only=weights_only)], weights_only=weights_only)

    def digests(
        self, *, weights_only: bool = False, new: NewHash = hashlib.sha256, of_team: bool = True
    ) -> dict[str, str]:
        """Return a digest for each name that is held here: of weights and buffers, of each parameter's slots, and of
        each key of the script's state. ``new`` makes a hash, as in ``hashlib``. ``of_team``: of what a team has split
        the whole, one tensor after the other, for which all of its ranks call this; else this rank's part."""
        self._look(None)
        take = whole if of_team else local
        saved = self._names.saved(self.is_held)
        found = {MODEL + name: _digest(name, one.value, take, new) for name, one in saved.items() if one.held}
        if not weights_only:
            here = {name: p for name, p in self._names.trained().items() if self._names.has(p, self.is_held)}
            for name, p in here.items():
                (slots,) = self.update.slots([p], split=False)
                found[SLOTS + name] = _digest(name, dict(sorted(slots.items())), take, new)
            for key, value in self.script.plain().items():
                found[SCRIPT + key] = digest_of([key, in_order(value)], new)
        return found

    def combine(self, parts: Sequence[Digests], *, weights_only: bool = False, workers: Sequence[str] = ()) -> str:
        """Return the hash of the whole state from the digests of workers that together hold it. ``workers``: their
        names. Raises ``Drift`` if some have different values of the same."""
        return combine(self.names(weights_only=weights_only), parts, workers)

    def names(self, *, weights_only: bool = False) -> list[str]:
        """Return the names that the digests of all workers have together, in order."""
        names = [MODEL + name for name in self._names.saved(self.is_held)]
        if not weights_only:
            names += [SLOTS + name for name in self._names.trained()]
            names += [SCRIPT + key for key in self.script]
        return names

    def digest_of_settings(self, new: NewHash) -> dict[str, str]:
        """Return a digest of the optimizer's settings, or none if they are not plain values."""
        try:
            return {SETTINGS: digest_of(in_order(self.update.settings()), new)}
        except UsageError:
            return {}


_STATE = "state"  # the section of a checkpoint with the script's own state
_MADE_OF = ("optimizer", "scheduler")


def nothing(unit: Unit) -> bool:
    """Fill no unit: for ``targets``, to check a checkpoint and read only its values."""
    return False


def _digest(name: str, value: Any, take: Callable[[torch.Tensor], torch.Tensor], new: NewHash) -> str:
    """Return the digest of a tensor or of slots by name, with ``take`` applied to each tensor."""
    if isinstance(value, dict):
        return digest_of([name, {key: take(one) if torch.is_tensor(one) else one for key, one in value.items()}], new)
    return digest_of([name, take(value) if torch.is_tensor(value) else value], new)


def _absent(one: Named) -> Absent | None:
    return None if one.tensor is None else Absent(tensor=one.tensor)


def _count_writes(units: Iterable[Unit]) -> None:
    """Let torch count a write into each tensor: checkpoints are read into their memory without its knowledge."""
    for unit in units:
        for tensor in unit.tensors:
            torch.autograd.graph.increment_version(tensor)
