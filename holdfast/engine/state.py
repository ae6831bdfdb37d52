"""The state of a run, unit by unit: for who lacks some of it, for checkpoints, and for the hash that proves exactness.

A worker holds some layers. What several workers hold adds up: to one checkpoint, and to one hash, the same as
those of a worker that holds everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    """Reads and writes what this worker holds of the model and the optimizer, and what all workers share.

    ``progress`` is whatever else a joiner needs to know, such as the step. What has memory is filled, but only what
    ``holdings`` lists is read: memory whose values never came must not be taken for state. Without ``holdings``,
    all that has memory counts.
    """

    def __init__(
        self,
        model: LayeredModel,
        update: Update,
        progress: Progress,
        *,
        holdings: Holdings | None = None,
        exact: bool = True,
    ) -> None:
        self.model = model
        self.update = update
        self.progress = progress
        self._holdings = holdings
        self._exact = exact
        self._names = Names(model)
        self._extra = self._names.extra()

    def is_held(self, unit: Unit) -> bool:
        """Whether a unit is here, as it should be."""
        return self.model.is_held(unit) if self._holdings is None else unit.number in self._holdings.held

    # --- from worker to worker -------------------------------------------------------------------

    def common(self) -> Any:
        """What is the same on every worker, whatever it holds."""
        return {"settings": self.update.settings(), "progress": self.progress.to_json()}

    def set_common(self, value: Any) -> None:
        self.update.set_settings(value["settings"])
        self.progress.take(value["progress"])

    def read(self, unit: Unit) -> Any:
        """A unit that is held here."""
        assert self.is_held(unit), f"unit {unit.number} is not here"
        trained = [p for p in unit.parameters if p.requires_grad]
        # Buffers are copied: a forward pass may change them before what is sent has arrived.
        copies = [buffer.clone() for buffer in unit.buffers]
        value = {"parameters": list(unit.parameters), "buffers": copies, "slots": self.update.slots(trained)}
        if unit.number in self._extra:
            saved = self.model.module.state_dict()
            value["extra"] = {name: saved[name] for name in self._extra[unit.number]}
        return value

    @torch.no_grad()
    def write(self, unit: Unit, value: Any) -> None:
        """Puts what was read elsewhere into the memory of a unit that is held here."""
        assert self.model.is_held(unit), f"unit {unit.number} has no memory here"
        for mine, theirs in zip(unit.tensors, [*value["parameters"], *value["buffers"]], strict=True):
            mine.copy_(theirs)
        self.update.set_slots([p for p in unit.parameters if p.requires_grad], value["slots"])
        if "extra" in value:
            self.model.module.load_state_dict(value["extra"], strict=False)

    def forget(self) -> None:
        """Drops what the optimizer keeps for parameters that have no memory here (any more)."""
        self.update.forget([p for p in self.model.trainable if not self._names.has(p, self.model.is_held)])

    @contextmanager
    def others_keep_their_slots(self, units: Collection[int]) -> Iterator[None]:
        """While these units alone are filled: who fills an optimizer clears what is not to be filled."""
        filled = {p for unit in self.model.units if unit.number in units for p in unit.parameters}
        slots = self.update.optimizer.state
        kept = {p: slot for p, slot in slots.items() if p not in filled}
        try:
            yield
        finally:
            slots.update(kept)

    # --- checkpoints -----------------------------------------------------------------------------

    def tree(self) -> dict[str, Any]:
        """What a checkpoint of a run holds: what other tools expect, and what only we need.

        Of what others hold it has names and shapes, so that the trees of all workers are one checkpoint.
        """
        transient = self._transient(self.is_held)
        return {
            **self._sections(self.is_held),
            "scheduler": self.update.settings()["scheduler"],
            "step": self.progress.step,
            "run": {"progress": self.progress.to_json(), "transient": transient, "made_of": self._made_of()},
        }

    def targets(self, filled: Held | None = None) -> dict[str, Any]:
        """What a checkpoint fills: units in place (all that have memory here), the rest as values for ``restore``."""
        filled = filled or self.model.is_held
        run = {"progress": None, "transient": self._transient(filled), "made_of": None}
        return {**self._sections(filled), "scheduler": None, "step": None, "run": run}

    def restore(self, filled: dict[str, Any]) -> None:
        """Takes over the values that were read with ``targets``."""
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
        """Buffers that a module does not want to be saved; a run that goes on exactly needs them all the same."""
        if not self._exact:  # there they may differ between workers
            return {}
        return {name: one.value if one.held else _absent(one) for name, one in self._names.transient(held).items()}

    def _made_of(self) -> list[str]:
        return [type(getattr(self.update, what)).__name__ for what in _MADE_OF]

    # --- the proof -------------------------------------------------------------------------------

    def sha256(self, *, weights_only: bool = False) -> str:
        """Over names, shapes and bytes of weights and buffers, and of the optimizer's slots: all must be held here."""
        return self.combine([self.digests(weights_only=weights_only)], weights_only=weights_only)

    def digests(self, *, weights_only: bool = False) -> dict[str, str]:
        """A SHA-256 for each name that is held here: of weights and buffers, and of each parameter's slots."""
        saved = self._names.saved(self.is_held)
        found = {_MODEL + name: _digest([name, one.value]) for name, one in saved.items() if one.held}
        if not weights_only:
            here = {name: p for name, p in self._names.trained().items() if self._names.has(p, self.is_held)}
            for name, slots in zip(here, self.update.slots(list(here.values())), strict=True):
                found[_SLOTS + name] = _digest([name, dict(sorted(slots.items()))])
        return found

    def combine(self, parts: Sequence[Digests], *, weights_only: bool = False) -> str:
        """The hash of the whole state from the digests of workers that together hold it."""
        names = [_MODEL + name for name in self._names.saved(self.is_held)]
        if not weights_only:
            names += [_SLOTS + name for name in self._names.trained()]
        return combine(names, parts, copies_agree=self._exact)


_MODEL, _SLOTS = "model/", "optimizer/"
_MADE_OF = ("optimizer", "scheduler")


def combine(names: Sequence[str], parts: Sequence[Digests], *, copies_agree: bool = True) -> str:
    """One hash from digests that several workers have, in the order of the names.

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
    """Of ``targets``: no tensor is filled, the checkpoint is checked, and the values come."""
    return False


def _absent(one: Named) -> Absent | None:
    return None if one.tensor is None else Absent(tensor=one.tensor)


def _digest(value: Any) -> str:
    text, tensors = codec.flatten(value)
    digest = hashlib.sha256(text)
    for tensor in tensors:
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, whatever its dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
