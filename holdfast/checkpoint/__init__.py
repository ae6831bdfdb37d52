"""Checkpoints that are independent of the layout: saved by any number of ranks, loaded by any other.

Usable alone, from any PyTorch script. How the modules build on each other:

- ``pieces``: the vocabulary (box, piece, tensor entry, catalogue); ``trees``: walks through what was saved
- ``places``: folders of this machine and of object stores; ``object_store`` and ``s3_uploads``: requests to these;
  ``lease_on_store`` and ``copying``: the lease there, and copies of checkpoints to there
- ``disk``: blocks of bytes; ``safetensors_writer``, ``tensor_reader`` and ``transfer``: tensors to and from files
- ``index``: the file that makes a checkpoint exist; ``series`` and ``newest_sound``: the checkpoints of one run
- ``objects``, ``rank_values`` and ``held``: what this rank has; ``ranks`` and ``who_writes``: what all have, and who
  writes which part
- ``saving`` and ``loading`` (with ``optimizer_loading``): the functions that scripts call
- ``rules``: a language for layouts that cannot be derived; ``formats``: readers and writers of other programs' files
- ``listing``, ``inspection``, ``verify``, ``diff``, ``convert``: the work of ``holdfast ckpt``
"""

from holdfast.checkpoint.formats import open_checkpoint
from holdfast.checkpoint.loading import load
from holdfast.checkpoint.newest_sound import latest
from holdfast.checkpoint.rank_values import per_rank
from holdfast.checkpoint.saving import PendingSave, async_save, save, wait_for_saves
from holdfast.errors import CheckpointError, NoCheckpoint

__all__ = [
    "CheckpointError",
    "NoCheckpoint",
    "PendingSave",
    "async_save",
    "latest",
    "load",
    "open_checkpoint",
    "per_rank",
    "save",
    "wait_for_saves",
]
