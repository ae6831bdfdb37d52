"""The coordinator's process, with strangers at its port."""

from __future__ import annotations

import os
import socket
import time

import pytest

from holdfast.cluster import wire
from tests import warm

TOKEN = "the right token of sixteen characters and more"
AGENT = {"role": "agent", "host": None, "agent": "a test", "slots": 0, "begun": False, "finished": False}


@pytest.mark.parametrize("strangers", [0, 128, 1100])
def test_peers_get_in_at_their_first_try_among_silent_strangers(strangers: int) -> None:
    """128 of them used to take all places, so that nobody who had lost its line came back: no failure was noticed."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        words = ("--listener", "{0}", "--judge", "holdfast.commit.settle:judge")
        environment = {**os.environ, "HOLDFAST_TOKEN": TOKEN}
        coordinator = warm.start(
            "holdfast.cluster.coordinator", *words, environment=environment, passed=[listener.fileno()]
        )
        try:
            wait_until_it_serves(listener.getsockname())
            held = [socket.create_connection(listener.getsockname()) for _ in range(strangers)]
            for _ in range(10):
                line = wire.Line(listener.getsockname(), TOKEN, AGENT)
                messages = line.waiting()
                while not messages:
                    messages = line.receive()
                assert messages[0]["type"] == "welcome"
                line.close()
            for stranger in held:
                stranger.close()
        finally:
            coordinator.kill()
            coordinator.wait()


def wait_until_it_serves(address: tuple[str, int]) -> None:
    for _ in range(50):
        try:
            wire.Line(address, TOKEN, AGENT).close()
            return
        except OSError:  # it is still starting
            time.sleep(0.1)
    raise AssertionError("no coordinator answers")
