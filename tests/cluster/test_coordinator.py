"""The coordinator's process, with strangers at its port."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import pytest

from holdfast.cluster import wire
from holdfast.cluster.desk import Desk
from tests import warm

TOKEN = "the right token of sixteen characters and more"
AGENT = {"host": None, "agent": "a test", "slots": 0, "begun": False, "finished": False, "over": 0, "run": False}
AGENT |= {"stays": False, **Desk(beat=1.0).hello(0.0)}


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
                assert asyncio.run(first_words(listener.getsockname()))["type"] == "welcome"
            for stranger in held:
                stranger.close()
        finally:
            coordinator.kill()
            coordinator.wait()


async def first_words(address: tuple[str, int]) -> wire.Message:
    """Connect as an agent; return what the coordinator says first."""
    reader, writer = await wire.connect(address, TOKEN, lambda: AGENT)
    try:
        return wire.decode(await asyncio.wait_for(reader.readline(), 20))
    finally:
        writer.close()


def wait_until_it_serves(address: tuple[str, int]) -> None:
    for _ in range(50):
        try:
            asyncio.run(first_words(address))
            return
        except OSError:  # it is still starting
            time.sleep(0.1)
    raise AssertionError("no coordinator answers")
