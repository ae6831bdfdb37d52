"""The keeper of the zygote's process: it sends orders, takes in reports, and starts a new zygote when one ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Sequence
from typing import Any

from holdfast.cluster import preload, signals
from holdfast.cluster.events import Events
from holdfast.cluster.zygote import command_line

Started = Callable[[str, int], None]  # a worker's name, its pid
Exited = Callable[[int, int], None]  # a worker's pid, its exit code
Replaced = Callable[[Collection[str]], None]  # names of workers that the new zygote still forks


class ZygoteKeeper:
    """The socket to the zygote, and the orders that it has not been sent yet.

    ``given``: the socket to a zygote that runs already; None: start one. ``preload``: modules that zygotes import
    beside torch, and ``folder``: the script's, where some of them may be. ``say`` shows a notice.
    """

    def __init__(
        self,
        given: socket.socket | None,
        *,
        preload: Sequence[str],
        folder: str,
        events: Events,
        say: Callable[[str], None],
    ) -> None:
        self._preload, self._folder = list(preload), folder
        self._events, self._say = events, say
        self._socket = given if given is not None else start_zygote(self._preload, folder)
        self._socket.setblocking(False)
        self._pid: int | None = None
        self._doomed = False  # the zygote was killed; what it is still sent would be lost
        self._deaths = 0  # zygotes in a row that have ended before they were ready
        self._orders: list[tuple[bytes, socket.socket]] = []  # orders for the zygote, with the workers' lifelines

    def order(self, order: dict[str, Any], lifeline: socket.socket) -> None:
        """Have a worker forked, as ``zygote.Order`` says. ``lifeline``: the worker's end of it."""
        self._orders.append((json.dumps(order).encode(), lifeline))
        self._send_orders()

    def _send_orders(self) -> None:
        """Send the zygote its orders; try again later if its socket is full, as while it imports torch."""
        while self._orders and not self._doomed:
            data, lifeline = self._orders[0]
            try:
                socket.send_fds(self._socket, [data], [lifeline.fileno()])
            except BlockingIOError:
                asyncio.get_running_loop().call_later(0.02, self._send_orders)
                return
            except OSError:
                return  # the zygote has ended; the next one gets the orders
            lifeline.close()
            del self._orders[0]

    async def hear(self, *, started: Started, exited: Exited, replaced: Replaced) -> None:
        """Take in the zygote's reports, for ever: each worker's pid and exit code. Start a new zygote if it ends.

        Raises ``UsageError`` if a module of ``preload`` cannot be imported, or its import ends the process.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self._socket, 2**16)
            except ConnectionResetError:  # it has ended with orders unread: told once, and before its last reports
                continue
            except OSError:
                data = b""
            message = json.loads(data) if data else {}
            if not data:
                self._replace(replaced)
            elif "ready" in message:
                self._pid, self._deaths = message["ready"], 0
                self._events.write("zygote", pid=self._pid)
            elif "started" in message:
                started(message["started"], message["pid"])
            elif "exited" in message:
                exited(message["exited"], message["code"])
            elif "threaded" in message:  # it begins anew without that module
                self._preload.remove(message["threaded"])
                self._say(f"holdfast: {preload.left_out(message['threaded'], message['threads'])}")
            elif "unfit" in message:
                raise preload.refusal(message)

    def _replace(self, replaced: Replaced) -> None:
        """Start a new zygote. The old one's workers live on, but nobody reports their exit codes.

        Raises ``UsageError`` if it seems that the import of a module ends zygotes, which no new one would survive.
        """
        self._deaths += self._pid is None
        if self._preload and self._deaths > 1:  # a single one may have been killed by chance
            raise preload.fatal(self._preload)
        self._events.write("zygote-restart")
        replaced({json.loads(data)["worker"] for data, _ in self._orders})
        self._socket = start_zygote(self._preload, self._folder)
        self._socket.setblocking(False)
        self._pid, self._doomed = None, False
        self._send_orders()

    def kill(self) -> None:
        """Kill a zygote that hangs, if its pid is known. ``hear`` starts another, which gets further orders."""
        if self._pid is not None and not self._doomed:
            self._doomed = True
            os.kill(self._pid, signal.SIGKILL)


def start_zygote(further: Sequence[str] = (), folder: str = "") -> socket.socket:
    """Start a zygote; return the socket to it, which carries orders one way and reports the other.

    ``further``: modules that it imports beside torch; ``folder``: the script's, where some of them may be.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # Not waited for: it ends by itself when our end of the socket closes.
    with signals.held():
        command = command_line(theirs.fileno(), further, folder)
        subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours
