"""A server of the page, started as a user does it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.measuring import free_port
from tests.harness import wait_until
from tests.warm import Command

for needed in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed, reason="holdfast[watch] is not installed")


class Site:
    """The page of a server: ``link`` is what it has printed."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.url, _, fragment = link.partition("#")
        self.code = fragment.removeprefix("code=")
        self.host, self.port = str(urlsplit(self.url).hostname), int(urlsplit(self.url).port or 0)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """A GET, or with a body a POST from the page itself; headers in place of its own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            origin = self.url.rstrip("/")
            sent = {"origin": origin, "content-type": "application/json", **sent}
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text


@contextmanager
def site(*words: str, folder: Path) -> Iterator[Site]:
    """A server on a free port of loopback, which lives as long as this context."""
    command = Command("watch", *words, "--at", str(free_port()), folder=folder, name="watch")
    try:
        wait_until("it listens", lambda: "http" in command.stdout or command.poll() is not None)
        found = re.search(r"http://\S+", command.stdout)
        assert found, command.stderr
        yield Site(found[0])
    finally:
        command.kill()
        command.wait()
