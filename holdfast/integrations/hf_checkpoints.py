"""Checkpoints of the integrated ``Trainer``: ``checkpoint-N`` as transformers reads it, and ours to resume from."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints
from transformers.utils import is_peft_available

from holdfast.checkpoint import series
from holdfast.checkpoint.places import Place, place_of
from holdfast.cluster import faults
from holdfast.errors import UsageError
from holdfast.integrations.trainer_state import exportable
from holdfast.recovery.resume import Checkpoints
from holdfast.run import process

OURS = "holdfast"  # the folder in ``output_dir`` that trainings go on from
KEPT = 3  # of ours, unless ``save_total_limit`` says otherwise


def path_of(output_dir: str, step: int) -> str:
    """Return the folder of the checkpoint after a number of steps.

    >>> path_of("out", 500)
    'out/checkpoint-500'
    """
    return os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")


def root_of(output_dir: str, checkpoint: str | os.PathLike[str] | None) -> Place:
    """Return the folder of our checkpoints: what the script has named, or one in ``output_dir``.

    >>> str(root_of("out", None)), str(root_of("out", "s3://bucket/run"))
    ('out/holdfast', 's3://bucket/run')
    """
    return Path(output_dir) / OURS if checkpoint is None else place_of(checkpoint)


def settings_of(trainer: Any, root: Place, steps_per_epoch: int) -> Checkpoints | None:
    """Return the settings of our checkpoints: they come as often as those of transformers. None: no checkpoints."""
    args, strategy = trainer.args, str(trainer.args.save_strategy.value)
    if strategy == "no":
        return None
    steps = {"steps": int(trainer.state.save_steps), "epoch": steps_per_epoch}.get(strategy, 0)
    return Checkpoints(
        folder=str(root),
        every=steps if steps > 0 else "auto",
        keep=args.save_total_limit or KEPT,
        trainable_only=is_adapted(trainer.model),
    )


def is_adapted(model: Any) -> bool:
    """Return whether a model is one of PEFT: the script makes its frozen base each time."""
    if not is_peft_available():
        return False
    import peft

    return isinstance(model, peft.PeftModel | peft.PeftMixedModel)


def _step_of(path: str) -> int:
    """Return the number of a ``checkpoint-N``; -1: it is none."""
    found = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", Path(path).name)
    return int(found[1]) if found else -1


def check_resume(asked: str | bool | None, output_dir: str, root: Place) -> None:
    """Raise ``UsageError`` if there is no checkpoint like the one that a script wants to resume from.

    A ``checkpoint-N`` may be there before ours of the same step, which is written meanwhile. Scripts that look for the
    last one then find it: on a worker that joins, and if all were lost at that moment.
    """
    if asked is None or asked is False:
        return
    process.complete(root)
    steps = series.steps_in(root) if root.is_dir() else []
    if not steps and (asked is True or not root.is_dir()):
        raise UsageError(
            f"resume_from_checkpoint={asked!r}: there is no checkpoint in {root}",
            hint="leave it out: a training goes on by itself from what is there; weights of another one are "
            "Model.from_pretrained(…)",
        )
    if asked is True:
        return
    path = Path(asked)
    step = _step_of(asked)
    newest = max([*steps, *map(_step_of, sort_checkpoints(output_dir))], default=0)
    if step < 0 or path.absolute().parent != Path(output_dir).absolute() or step > newest:
        raise UsageError(
            f"resume_from_checkpoint={asked!r} is none of output_dir={output_dir!r}",
            hint=f"True, for the newest one there, of step {newest}",
        )


def write(trainer: Any, save_model: Callable[[str], None]) -> None:
    """Write ``checkpoint-N`` whole or not at all, then delete old ones. Called by one worker."""
    folder = path_of(trainer.args.output_dir, trainer.state.global_step)
    unfinished = os.path.join(trainer.args.output_dir, f".unfinished-{os.path.basename(folder)}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a worker that was lost here
    save_model(unfinished)
    if not trainer.args.save_only_model:
        trainer._save_optimizer_and_scheduler(unfinished)
    _write_state(trainer, os.path.join(unfinished, TRAINER_STATE_NAME))
    faults.point("write")
    Path(trainer.args.output_dir, OURS).mkdir(exist_ok=True)  # says whose it is, before ours of this step is written
    shutil.rmtree(folder, ignore_errors=True)  # of the same step, before a resume
    os.replace(unfinished, folder)
    rotate_checkpoints(trainer.args.output_dir, trainer.args.save_total_limit, trainer.state.best_model_checkpoint)


def _write_state(trainer: Any, path: str) -> None:
    found: dict[str, Any] = {}
    for callback in exportable([*trainer.callback_handler.callbacks, trainer.control]):
        found.setdefault(type(callback).__name__, []).append(callback.state())
    trainer.state.stateful_callbacks = {name: each if len(each) > 1 else each[0] for name, each in found.items()}
    trainer.state.save_to_json(path)


def rotate_at_end(trainer: Any) -> None:
    """Delete all checkpoints but the best one, if only one may stay. Called by one worker."""
    best = trainer.state.best_model_checkpoint
    if trainer.args.save_total_limit == 1 and best is not None:
        for folder in sort_checkpoints(trainer.args.output_dir):
            if Path(folder) != Path(best):
                shutil.rmtree(folder, ignore_errors=True)
