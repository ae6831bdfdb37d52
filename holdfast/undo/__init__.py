"""Undoing an update: rules for each optimizer, the ledger of what was changed, eager updates.

``undo_step`` takes back an optimizer's last step, ``check`` tells whether that is possible, and ``Lamb`` is an
optimizer that keeps what undoing needs.
"""

from holdfast.undo.lamb import Lamb
from holdfast.undo.undo import check, undo_step

__all__ = ["Lamb", "check", "undo_step"]
