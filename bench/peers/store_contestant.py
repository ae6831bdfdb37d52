"""One contestant of ``bench store``: saves and loads when it is told to. Runs in the peers' venv.

A save is done when the store has all of it; a load fills the tensors that the training has. Each turn has a key of its
own, which is removed at the next one.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.savers import SavedTraining

BUCKET = "race"
PART = 8 << 20  # bytes of a bare request
AT_ONCE = 6
Way = tuple[Callable[[SavedTraining, str], None], Callable[[SavedTraining, str], None]]


def _holdfast() -> Way:
    from holdfast import checkpoint

    def tree(state: SavedTraining) -> dict[str, Any]:
        return {"model": state.model, "optimizer": state.optimizer}

    return (
        lambda state, key: checkpoint.save(f"s3://{BUCKET}/{key}", tree(state)),
        lambda state, key: (checkpoint.load(f"s3://{BUCKET}/{key}", tree(state)), None)[1],
    )


def _server() -> Way:
    """As many bytes by bare requests, without a look at them."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True, "timeout": "120s"}
    )

    def save(state: SavedTraining, key: str) -> None:
        parts = (t.detach().reshape(-1).view(torch.uint8).numpy().data for t in state.tensors() if t.dim())
        obstore.put(store, key, parts, chunk_size=PART, max_concurrency=AT_ONCE)

    def load(state: SavedTraining, key: str) -> None:
        size = obstore.head(store, key)["size"]

        def part(start: int) -> None:
            obstore.get_range(store, key, start=start, end=min(start + PART, size))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(part, range(0, size, PART)))

    return save, load


def _dcp() -> Way:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    from bench.savers import _group

    options: Any = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}, "skip_instance_cache": True}

    def save(state: SavedTraining, key: str) -> None:
        _group()
        dcp_save(state.state_dict(), storage_writer=FsspecWriter(f"s3://{BUCKET}/{key}", **options))

    def load(state: SavedTraining, key: str) -> None:
        _group()
        wanted = state.state_dict()
        dcp_load(wanted, storage_reader=FsspecReader(f"s3://{BUCKET}/{key}", **options))
        set_state_dict(
            state.model, state.optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"]
        )

    return save, load


def _state(state: SavedTraining) -> dict[str, Any]:
    return {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}


def _fill(state: SavedTraining, loaded: dict[str, Any]) -> None:
    state.model.load_state_dict(loaded["model"])
    state.optimizer.load_state_dict(loaded["optimizer"])


def _connector() -> Way:
    from s3torchconnector import S3Checkpoint, S3ClientConfig  # type: ignore[import-not-found]

    config = S3ClientConfig(force_path_style=True)
    files = S3Checkpoint(region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)

    def save(state: SavedTraining, key: str) -> None:
        with files.writer(f"s3://{BUCKET}/{key}") as writer:
            torch.save(_state(state), writer)

    def load(state: SavedTraining, key: str) -> None:
        with files.reader(f"s3://{BUCKET}/{key}") as reader:
            _fill(state, torch.load(reader, weights_only=True))

    return save, load


def _boto3() -> Way:
    import boto3  # type: ignore[import-not-found]

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")

    def save(state: SavedTraining, key: str) -> None:
        text = io.BytesIO()
        torch.save(_state(state), text)
        text.seek(0)
        client.upload_fileobj(text, BUCKET, key)

    def load(state: SavedTraining, key: str) -> None:
        text = io.BytesIO()
        client.download_fileobj(BUCKET, key, text)
        text.seek(0)
        _fill(state, torch.load(text, weights_only=True))

    return save, load


WAYS: dict[str, Callable[[], Way]] = {
    "the server": _server,
    "holdfast": _holdfast,
    "DCP, s3fs": _dcp,
    "s3torchconnector": _connector,
    "boto3": _boto3,
}


def _memory(key: str) -> float:
    """A line of the kernel about this process's memory, in MB."""
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def _remove(key: str) -> None:
    from holdfast.checkpoint.places import Remote

    folder = Remote("s3", BUCKET, key)
    for place in [folder, *(each for each, _ in folder.store.walk(folder))]:
        place.unlink()


def main(name: str, megabytes: int) -> None:
    """Take turns until the input ends."""
    state = SavedTraining(megabytes)
    save, load = WAYS[name]()
    own = name.replace(" ", "-").replace(",", "")
    for line in sys.stdin:
        key = f"{own}/{int(line)}"
        _remove(f"{own}/{int(line) - 1}")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        before, begin = _memory("VmRSS"), time.monotonic()
        save(state, key)
        saved = time.monotonic()
        state.scramble()
        loading = time.monotonic()
        load(state, key)
        loaded = time.monotonic()
        extra = _memory("VmHWM") - before
        if name != "the server":
            state.check(name)
        print(json.dumps({"save": saved - begin, "load": loaded - loading, "extra_mb": extra}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
