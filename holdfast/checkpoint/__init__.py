"""Checkpoints: saved as the run is, loaded as anything. Usable alone, from any PyTorch script."""

from holdfast.checkpoint.formats import open_checkpoint
from holdfast.checkpoint.loading import load
from holdfast.checkpoint.saving import PendingSave, async_save, save, wait_for_saves

__all__ = ["PendingSave", "async_save", "load", "open_checkpoint", "save", "wait_for_saves"]
