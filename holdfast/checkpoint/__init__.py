"""Checkpoints that are independent of the layout: saved by any number of ranks, loaded by any other.

Usable alone, from any PyTorch script. How the modules build on each other:

- ``pieces``: the vocabulary (box, piece, tensor entry, catalogue); ``trees``: walks through what was saved
- ``disk``: blocks of bytes; ``safetensors_writer``, ``tensor_reader`` and ``transfer``: tensors to and from files
- ``index``: the file that makes a checkpoint exist; ``series``: the checkpoints of one run
- ``objects`` and ``held``: what this rank has; ``ranks`` and ``who_writes``: what all have, and who writes which part
- ``saving`` and ``loading`` (with ``optimizer_loading``): the functions that scripts call
- ``rules``: a language for layouts that cannot be derived; ``formats``: readers and writers of other programs' files
- ``listing``, ``inspection``, ``verify``, ``diff``, ``convert``: the work of ``holdfast ckpt``
"""

from holdfast.checkpoint.formats import open_checkpoint
from holdfast.checkpoint.loading import load
from holdfast.checkpoint.saving import PendingSave, async_save, save, wait_for_saves

__all__ = ["PendingSave", "async_save", "load", "open_checkpoint", "save", "wait_for_saves"]
