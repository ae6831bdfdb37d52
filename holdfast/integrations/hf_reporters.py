"""Callbacks of ``report_to``, such as TensorBoard's: the first worker has them, and the next one if it is lost.

They set themselves up when training begins. One that began on another worker than the first would never write.
"""

from __future__ import annotations

from typing import Any

from transformers.integrations import get_reporting_integration_callbacks


def take_out(trainer: Any) -> list[type]:
    """Take the callbacks of ``report_to`` out of a trainer; return their classes."""
    kinds = get_reporting_integration_callbacks(trainer.args.report_to)
    for kind in kinds:
        trainer.remove_callback(kind)
    return list(kinds)


def put_in(trainer: Any, kinds: list[type], *, has_begun: bool) -> None:
    """Give a trainer new callbacks of these classes. ``has_begun``: the others know that training has begun."""
    handler = trainer.callback_handler
    names = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
    for kind in kinds:
        trainer.add_callback(callback := kind())
        if has_begun:
            known = {name: getattr(handler, name) for name in names}
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, **known)
