"""Readers of what sinks have written: each step's value, as the tools themselves read it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.journal import rows


def jsonl(folder: Path, name: str = "loss") -> list[tuple[int, Any]]:
    """Every line of the file, in its order: twice the same step would be seen."""
    lines = (folder / rows.NAME).read_text().splitlines()
    return [(row["step"], row[name]) for row in map(json.loads, lines) if name in row]


def tensorboard(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    """What TensorBoard shows: files in order, without what was purged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def wandb(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    """What the offline folders have, in the order of their making: each replaces the steps from its first one on."""
    steps: list[tuple[int, float]] = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_ctime_ns):
        history = [*_wandb_history(file, name)]
        steps = [(step, value) for step, value in steps if not history or step < history[0][0]] + history
    return steps


def _wandb_history(file: Path, name: str) -> Iterator[tuple[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _log_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if name in items:
                yield int(items.get("_step", record.history.step.num)), items[name]


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after wandb's own header; half a record at the end is left out.

    Blocks of 32 KiB have fragments: a checksum, a length, a type (whole, first, middle, last), and bytes.
    """
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for a fragment: the block is filled up
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        fragment = data[place + 7 : place + 7 + length]
        if not kind or len(fragment) < length:
            return
        whole = fragment if kind in (1, 2) else whole + fragment
        place += 7 + length
        if kind in (1, 4):
            yield whole


def mlflow(folder: Path, uri: str, name: str = "loss") -> list[tuple[int, float]]:
    """The history of a metric in the one run that there is."""
    from mlflow import MlflowClient

    history = MlflowClient(tracking_uri=uri).get_metric_history((folder / "mlflow.id").read_text().strip(), name)
    return [(metric.step, metric.value) for metric in history]
