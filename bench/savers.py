"""Contestants of ``bench checkpoint``: ways to save and to load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from holdfast import checkpoint
from holdfast.checkpoint.disk import sync_folder

WIDTH = 1024  # of a layer, as in bench/peers/zero_checkpoint.py


class SavedTraining:
    """Model in training with its optimizer, of about so many megabytes in all."""

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(0)
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._input = torch.randn(16, WIDTH)
        self.train_step()
        self.nbytes = sum(3 * p.nbytes for p in self.model.parameters())

    def train_step(self) -> float:
        """Train one step; return its seconds."""
        begin = time.monotonic()
        self.model(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return time.monotonic() - begin

    def tensors(self) -> list[torch.Tensor]:
        """Return all weights and optimizer slots."""
        slots = [t for p in self.model.parameters() for t in self.optimizer.state[p].values()]
        return [*self.model.parameters(), *slots]

    @torch.no_grad()
    def scramble(self) -> None:
        """Remember a few numbers and overwrite all, so that a load that does nothing is noticed."""
        self._before = [float(t.reshape(-1)[-1]) for t in self.tensors()]
        for tensor in self.tensors():
            tensor.fill_(-7.0)

    def check(self, name: str) -> None:
        """Assert that the load of format ``name`` brought the remembered numbers back."""
        after = [float(t.reshape(-1)[-1]) for t in self.tensors()]
        assert after == self._before, f"{name} did not load what was saved"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.distributed.checkpoint takes it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    sync_folder(path.parent)


# --- torch.save ---------------------------------------------------------------------------------


def _save_torch(state: SavedTraining, folder: Path) -> None:
    path = folder / "state.pt"
    torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, path)
    _sync(path)


def _load_torch(state: SavedTraining, folder: Path) -> None:
    loaded = torch.load(folder / "state.pt", weights_only=True, mmap=True)
    state.model.load_state_dict(loaded["model"])
    state.optimizer.load_state_dict(loaded["optimizer"])


# --- safetensors --------------------------------------------------------------------------------


def _flat(state: SavedTraining) -> dict[str, torch.Tensor]:
    return {str(number): tensor.detach() for number, tensor in enumerate(state.tensors())}


def _save_safetensors(state: SavedTraining, folder: Path) -> None:
    path = folder / "state.safetensors"
    save_file(_flat(state), path)
    _sync(path)


@torch.no_grad()
def _load_safetensors(state: SavedTraining, folder: Path) -> None:
    loaded = load_file(folder / "state.safetensors")
    for name, tensor in _flat(state).items():
        tensor.copy_(loaded[name])


# --- torch.distributed.checkpoint ---------------------------------------------------------------


def _group() -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, thread_count=2, sync_files=True)


def _save_dcp(state: SavedTraining, folder: Path) -> None:
    _group()
    save(state.state_dict(), storage_writer=_writer(folder))


def _load_dcp(state: SavedTraining, folder: Path) -> None:
    _group()
    wanted = state.state_dict()
    load(wanted, checkpoint_id=str(folder))
    set_state_dict(state.model, state.optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])


Handle = tuple[Callable[[], Any], Callable[[], bool]]  # (wait, is it done)


def _async_dcp(state: SavedTraining, folder: Path) -> Handle:
    _group()
    future: Any = async_save(state.state_dict(), storage_writer=_writer(folder))
    return future.result, future.done


_stager: list[DefaultStager] = []


def _async_dcp_staged(state: SavedTraining, folder: Path) -> Handle:
    """Save with a stager that keeps its memory. It copies before it returns, as this loop changes the weights."""
    _group()
    if not _stager:
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        _stager.append(DefaultStager(options))
    future: Any = async_save(state.state_dict(), storage_writer=_writer(folder), async_stager=_stager[0])
    return future.result, future.done


# --- holdfast -----------------------------------------------------------------------------------


def _tree(state: SavedTraining) -> dict[str, Any]:
    return {"model": state.model, "optimizer": state.optimizer}


def _save_holdfast(state: SavedTraining, folder: Path) -> None:
    checkpoint.save(folder, _tree(state))


def _load_holdfast(state: SavedTraining, folder: Path) -> None:
    checkpoint.load(folder, _tree(state))


def _async_holdfast(state: SavedTraining, folder: Path) -> Handle:
    pending = checkpoint.async_save(folder, _tree(state))
    return pending.wait, lambda: pending.done


@dataclass(frozen=True, kw_only=True)
class DurableFormat:
    """Way to save durably, and to load what was saved into the same objects."""

    save: Callable[[SavedTraining, Path], None]
    load: Callable[[SavedTraining, Path], None]


FORMATS = {
    "torch.save": DurableFormat(save=_save_torch, load=_load_torch),
    "safetensors": DurableFormat(save=_save_safetensors, load=_load_safetensors),
    "DCP": DurableFormat(save=_save_dcp, load=_load_dcp),
    "holdfast": DurableFormat(save=_save_holdfast, load=_load_holdfast),
}
ASYNC: dict[str, Callable[[SavedTraining, Path], Handle]] = {
    "DCP async": _async_dcp,
    "DCP async, staged": _async_dcp_staged,
    "holdfast async": _async_holdfast,
}
