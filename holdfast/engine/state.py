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

from holdfast import codec
from holdfast.checkpoint.objects import Absent, PartialModule, clean
from holdfast.engine.holdings import Holdings
from holdfast.engine.model import LayeredModel, Unit
from holdfast.engine.names import Held, Named, Names
from holdfast.engine.progress import Progress
from holdfast.engine.update import Update
from holdfast.errors import CheckpointError, HoldfastError

Digests = Mapping[str, str]


class State:
    """Reads and writes this worker's units of the model and the optimizer, and the state that all workers share.

    ``progress`` has what else a joiner needs to know, such as the step. Any unit with memory may be written, but only
    units in ``holdings`` are read: memory whose values never arrived must not be taken for state. Without ``holdings``,
    every unit with memory counts. ``look`` is called with each unit before it is sent, and with
    None before all are saved or hashed. It may raise.
    """

    def __init__(
        self,
        model: LayeredModel,
        update: Update,
        progress: Progress,
        *,
        holdings: Holdings | None = None,
        exact: bool = True,
        look: Callable[[Unit | None], None] = lambda unit: None,
    ) -> None:
        self.model = model
        self.update = update
        self.progress = progress
        self._holdings = holdings
        self._exact = exact
        self._look = look
        self._names = Names(model)
        self._extra = self._names.extra()

    def is_held(self, unit: Unit) -> bool:
        """Whether this worker holds a unit with the run's values."""
        return self.model.is_held(unit) if self._holdings is None else unit.number in self._holdings.held

    # --- from worker to worker -------------------------------------------------------------------

    def common(self) -> Any:
        """Return the state that is the same on every worker: settings of the optimizer, and progress."""
        return {"settings": self.update.settings(), "progress": self.progress.to_json()}

    def set_common(self, value: Any) -> None:
        """Take over what ``common`` returned on another worker."""
        self.update.set_settings(value["settings"])
        self.progress.take(value["progress"])

    def read(self, unit: Unit) -> Any:
        """Return the values of a unit that is held here: parameters, buffers, and the optimizer's slots."""
        assert self.is_held(unit), f"unit {unit.number} is not here"
        self._look(unit)
        trained = [p for p in unit.parameters if p.requires_grad]
        # Buffers are copied: a forward pass may change them while they are being sent.
        copies = [buffer.clone() for buffer in unit.buffers]
        value = {"parameters": list(unit.parameters), "buffers": copies, "slots": self.update.slots(trained)}
        if unit.number in self._extra:
            saved = self.model.module.state_dict()
            value["extra"] = {name: saved[name] for name in self._extra[unit.number]}
        return value

    @torch.no_grad()
    def write(self, unit: Unit, value: Any) -> None:
        """Write what ``read`` returned on another worker into a unit that has memory here."""
        assert self.model.is_held(unit), f"unit {unit.number} has no memory here"
        for mine, theirs in zip(unit.tensors, [*value["parameters"], *value["buffers"]], strict=True):
            mine.copy_(theirs)
        self.update.set_slots([p for p in unit.parameters if p.requires_grad], value["slots"])
        if "extra" in value:
            self.model.module.load_state_dict(value["extra"], strict=False)

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
            "scheduler": self.update.settings()["scheduler"],
            "step": self.progress.step,
            "run": {"progress": self.progress.to_json(), "transient": transient, "made_of": self._made_of()},
        }

    def targets(self, filled: Held | None = None) -> dict[str, Any]:
        """Return the tree that a checkpoint is read into, for ``restore``.

        Units for which ``filled`` is true are read in place; None: all that have memory here. The rest are values.
        """
        filled = filled or self.model.is_held
        run = {"progress": None, "transient": self._transient(filled), "made_of": None}
        return {**self._sections(filled), "scheduler": None, "step": None, "run": run}

    def fit(self, targets: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """Leave out of ``targets`` what the checkpoint does not have: once, fast mode saved no non-persistent buffers.

        They get the values that their layers begin with, where a function makes the layer. ``saved``: its tree.
        """
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

    def _sections(self, held: Held) -> dict[str, Any]:
        saved = self._names.saved(held)
        absent = {clean(name): _absent(one) for name, one in saved.items() if not one.held}
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
        """Return the SHA-256 of names, shapes and bytes of weights, buffers and the optimizer's slots.

        Raises ``HoldfastError`` if this worker does not hold all of them.
        """
        return self.combine([self.digests(weights_only=weights_only)], weights_only=weights_only)

    def digests(self, *, weights_only: bool = False) -> dict[str, str]:
        """Return a SHA-256 for each name that is held here: of weights and buffers, and of each parameter's slots."""
        self._look(None)
        saved = self._names.saved(self.is_held)
        found = {_MODEL + name: _digest([name, one.value]) for name, one in saved.items() if one.held}
        if not weights_only:
            here = {name: p for name, p in self._names.trained().items() if self._names.has(p, self.is_held)}
            for name, slots in zip(here, self.update.slots(list(here.values())), strict=True):
                found[_SLOTS + name] = _digest([name, dict(sorted(slots.items()))])
        return found

    def combine(self, parts: Sequence[Digests], *, weights_only: bool = False) -> str:
        """Return the hash of the whole state from the digests of workers that together hold it."""
        names = [_MODEL + name for name in self._names.saved(self.is_held)]
        if not weights_only:
            names += [_SLOTS + name for name in self._names.trained()]
        return combine(names, parts, copies_agree=self._exact)


_MODEL, _SLOTS = "model/", "optimizer/"
_MADE_OF = ("optimizer", "scheduler")


def combine(names: Sequence[str], parts: Sequence[Digests], *, copies_agree: bool = True) -> str:
    """Return one hash of several workers' digests, in the order of the names.

    Raises ``HoldfastError`` if a name is missing, or with ``copies_agree`` if two workers have different digests of it.

    >>> whole = combine(["a", "b"], [{"a": "12", "b": "34"}])
    >>> combine(["a", "b"], [{"b": "34"}, {"a": "12"}, {"b": "34"}]) == whole
    True
    """
    digest = hashlib.sha256()
    for name in names:
        found = list(dict.fromkeys(part[name] for part in parts if name in part))
        if not found:
            raise HoldfastError(f"no worker holds {name}", hint="the hash is of all layers: all workers must be asked")
        if copies_agree and len(found) > 1:
            raise HoldfastError(f"workers have different copies of {name}", hint="please report this")
        digest.update(f"{name} {found[0]}\n".encode())
    return digest.hexdigest()


def nothing(unit: Unit) -> bool:
    """Fill no unit: for ``targets``, to check a checkpoint and read only its values."""
    return False


def _absent(one: Named) -> Absent | None:
    return None if one.tensor is None else Absent(tensor=one.tensor)


def _digest(value: Any) -> str:
    text, tensors = codec.flatten(value)
    digest = hashlib.sha256(text)
    for tensor in tensors:
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


def _count_writes(units: Iterable[Unit]) -> None:
    """Let torch count a write into each tensor: checkpoints are read into their memory without its knowledge."""
    for unit in units:
        for tensor in unit.tensors:
            torch.autograd.graph.increment_version(tensor)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, of any dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
