"""Saves and loads with torch.distributed.checkpoint (DCP), whose import takes as long as that of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from holdfast.study.adapters.base import Wait


def save(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    with _caught():
        state_dict_saver.save(_state(model, optimizer), checkpoint_id=path)


def async_save(model: nn.Module, optimizer: Optimizer, path: Path) -> Wait:
    future: Any = state_dict_saver.async_save(_state(model, optimizer), checkpoint_id=path)
    return _caught()(future.result)


def load(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    wanted = _state(model, optimizer)
    with _caught():
        state_dict_loader.load(wanted, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state as DCP wants it: the optimizer's by names of parameters, not by numbers."""
    weights, slots = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": slots}


@contextmanager
def _caught() -> Iterator[None]:
    """Turn DCP's errors, which are no ``Exception``, into one: the server catches only those."""
    try:
        yield
    except CheckpointException as e:
        raise RuntimeError(str(e)) from e
