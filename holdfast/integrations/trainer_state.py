"""The state of a transformers ``Trainer`` as text, so that it is committed with each step: for joiners and resumes.

What differs between workers is left out: which one is the first, how long things took, and paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

OF_A_WORKER = ("is_local_process_zero", "is_world_process_zero", "best_model_checkpoint")  # a path is one, too
ELSEWHERE = ("log_history", "stateful_callbacks")  # the first is kept as lines, the others by their own state
# Ends of the names of what is measured in seconds: no two workers log the same.
OF_A_CLOCK = ("_runtime", "_samples_per_second", "_steps_per_second", "_tokens_per_second", "_preparation_time")


@dataclass(kw_only=True)
class Sums:
    """What a trainer keeps beside its state: the losses since the last log and before, and where it has saved."""

    since: float = 0.0  # of the steps since the last log
    logged: float = 0.0  # of those before
    logged_at: int = 0  # the step of the last log
    saved_at: int = 0  # the step of the last checkpoint
    best_at: int = 0  # the step of the best one


def timeless(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs without what a clock has measured.

    >>> timeless({"eval_loss": 0.5, "eval_runtime": 1.7})
    {'eval_loss': 0.5}
    """
    return {name: value for name, value in logs.items() if not name.endswith(OF_A_CLOCK)}


def to_text(state: TrainerState, control: TrainerControl, callbacks: Iterable[Any], sums: Sums) -> str:
    """Return all that lasts, but for the history of logs, as text that is the same on every worker."""
    left_out = (*OF_A_WORKER, *ELSEWHERE)
    kept = {each.name: getattr(state, each.name) for each in fields(TrainerState) if each.name not in left_out}
    of_callbacks = [[type(each).__name__, each.state().get("attributes", {})] for each in exportable(callbacks)]
    found = {"state": kept, "control": control.state()["args"], "callbacks": of_callbacks, "sums": vars(sums)}
    return json.dumps(found, sort_keys=True)


def of_text(text: str, state: TrainerState, control: TrainerControl, callbacks: Iterable[Any]) -> Sums:
    """Put into a trainer's objects what ``to_text`` has found in another's; return the sums."""
    found = json.loads(text)
    for name, value in found["state"].items():
        setattr(state, name, value)
    for name, value in found["control"].items():
        setattr(control, name, value)
    for callback, (name, attributes) in zip(exportable(callbacks), found["callbacks"], strict=False):
        if type(callback).__name__ == name:
            for attribute, value in attributes.items():
                setattr(callback, attribute, value)
    return Sums(**found["sums"])


def exportable(callbacks: Iterable[Any]) -> list[Any]:
    """Return the callbacks that say what of them lasts, such as that of early stopping."""
    return [each for each in callbacks if isinstance(each, ExportableState)]


def lines_of(history: Sequence[Mapping[str, Any]]) -> str:
    """Return a history of logs as text, a line for each entry.

    >>> lines_of([{"loss": 0.5, "step": 1}])
    '{"loss": 0.5, "step": 1}\\n'
    """
    return "".join(f"{json.dumps(entry)}\n" for entry in history)


def of_lines(text: str) -> list[dict[str, Any]]:
    """Return the history of logs that ``lines_of`` has made text of."""
    return [json.loads(line) for line in text.splitlines()]
