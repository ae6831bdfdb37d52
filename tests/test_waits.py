"""No wait without a limit: every call that can block for ever is known, with the reason why it ends.

The list in docs/recovery.md, "Waits and their bounds", is for people. This one is for the calls themselves. If this
test fails for a new call, give the call a timeout; or write here what ends it, and add it to that list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import holdfast

ROOMS = ("checkpoint", "cluster", "commit", "data", "engine", "log", "recovery", "run", "sync", "undo")
NOT_IN_A_RUN = ("formats", "profile", "rules")  # folders of commands

# Calls without a timeout if they have at most so many arguments: `", ".join(names)` has one more.
LIMITED_BY_AN_ARGUMENT = {"wait": 0, "join": 0, "get": 0, "acquire": 0, "result": 0, "wait_for": 1, "poll": 0}
# Calls that have no argument for a timeout.
BLOCKING = {
    *("recv", "recv_into", "recv_fds", "recvmsg", "sock_recv", "sock_accept", "sock_sendall", "sendall"),
    *("readline", "readexactly", "readuntil", "create_connection", "open_connection", "getaddrinfo", "select"),
    *("waitpid", "communicate", "flock", "lockf", "allreduce", "allgather", "barrier", "wait_closed"),
}

GENERATION = "it ends with the generation: docs/recovery.md says what ends that"
HANDSHAKE = "wire.HANDSHAKE_SECONDS: around it, or as the socket's timeout"
IDLE = "a thread, or a process, that waits for work: nobody waits for it"
LIFE = "as long as the process has to live"
READABLE = "called when there is something to read, or without blocking"
WRITER = "in the thread that writes a checkpoint: the Saver waits for it with limits"
USERS = "a script's own wait for its disk, or its own process group, which has a timeout"

KNOWN = {
    "checkpoint/background.py Work.wait join": USERS,
    "checkpoint/disk.py _reserve join": WRITER,
    "checkpoint/disk.py in_parallel result": WRITER,
    "checkpoint/ranks.py Distributed._exchange allgather": USERS,
    "checkpoint/ranks.py Distributed._exchange allreduce": USERS,
    "checkpoint/ranks.py Distributed._exchange wait": USERS,
    "checkpoint/saving.py join_saves join": USERS,
    "checkpoint/saving.py wait_for_saves join": USERS,
    "checkpoint/saving.py wait_for_saves wait": USERS,
    "cluster/agent.py Agent._line_of readline": "three heartbeat timeouts around it",
    "cluster/agent.py Agent.run wait": LIFE,
    "cluster/client.py Client._end sendall": "a few hundred bytes: they fit into the socket",
    "cluster/client.py Client._from_agent recv": READABLE,
    "cluster/client.py Client._stay_connected select": "until the next heartbeat",
    "cluster/coordinator.py Coordinator._hear readline": "the roster closes the connection of a silent peer",
    "cluster/coordinator.py Coordinator.serve wait": LIFE,
    "cluster/faults.py point acquire": "a fault that was asked for",
    "cluster/gate.py Gate._explain sock_recv": "one second around it",
    "cluster/gate.py Gate._explain sock_sendall": "one second around it",
    "cluster/gate.py Gate._hear recv": READABLE,
    "cluster/gate.py Gate._hello readline": HANDSHAKE,
    "cluster/group.py Group.start recv": "it posts a receive of Gloo, and waits for nothing",
    "cluster/keeper.py CoordinatorKeeper.__init__ getaddrinfo": "the resolver has timeouts of its own",
    "cluster/keeper.py CoordinatorKeeper._is_over wait": "a timeout around it, or the end of the run",
    "cluster/keeper.py CoordinatorKeeper.keep wait": LIFE,
    "cluster/keeper.py CoordinatorKeeper.let_end wait": "a timeout around it, the end of the run, or after SIGKILL",
    "cluster/local.py LocalWorkers._hear recv": READABLE,
    "cluster/local.py LocalWorkers.hear_zygote sock_recv": IDLE,
    "cluster/store.py GenerationStore.take wait_for": GENERATION,
    "cluster/waiter.py _Waiter._serve get": IDLE,
    "cluster/waiter.py wait_for acquire": "a new lock, which nobody else has",
    "cluster/wire.py Line.__init__ create_connection": HANDSHAKE,
    "cluster/wire.py Line._fill recv": HANDSHAKE,
    "cluster/wire.py Line._receive recv": HANDSHAKE,
    "cluster/wire.py Line._write sendall": HANDSHAKE,
    "cluster/wire.py Line.send sendall": HANDSHAKE,
    "cluster/wire.py _prove readexactly": HANDSHAKE,
    "cluster/wire.py accept readline": HANDSHAKE,
    "cluster/wire.py connect open_connection": HANDSHAKE,
    "cluster/wire.py connect readexactly": HANDSHAKE,
    "cluster/wire.py connect readline": HANDSHAKE,
    "cluster/zygote.py _tell_agent sendall": "it fits into the socket, or the worker counts as stuck",
    "cluster/zygote.py serve recv_fds": READABLE,
    "cluster/zygote.py serve select": IDLE,
    "cluster/zygote.py serve waitpid": "the process has ended: its descriptor says so",
    "engine/reduce.py Reduction._next get": "`_stop_thread` puts the last item",
    "engine/reduce.py Reduction._stop_thread join": GENERATION,
    "log/log.py Log._run wait_for": IDLE,
    "log/log.py Log.settle wait": "for tests and benches",
    "log/spill.py SpillFile._lock flock": "LOCK_NB: it does not wait",
    "log/spill.py _remove_if_litter flock": "LOCK_NB: it does not wait",
    "sync/exchange.py Averaging._join join": GENERATION,
    "sync/peers.py TorchPeers.__init__ recv": "it posts a receive of Gloo, and waits for nothing",
    "sync/peers.py TorchPeers.start recv": "it posts a receive of Gloo, and waits for nothing",
    "sync/peers.py _see_off get": IDLE,
    "sync/ssp.py Pushes._listen get": "`close` and `abandon` put the last item",
    "sync/ssp.py Pushes._wait wait_for": GENERATION,
}


def waits_in(code: str) -> Iterator[str]:
    """Yield "function call" for each call that may block without a limit.

    >>> list(waits_in("class A:\\n    def end(self):\\n        self.thread.join()\\n        ', '.join(self.names)"))
    ['A.end join']
    """
    yield from _waits(ast.parse(code), ())


def _waits(node: ast.AST, inside: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inside = (*inside, node.name)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_unlimited(node, node.func.attr):
        yield f"{'.'.join(inside)} {node.func.attr}"
    for child in ast.iter_child_nodes(node):
        yield from _waits(child, inside)


def _is_unlimited(call: ast.Call, name: str) -> bool:
    most = LIMITED_BY_AN_ARGUMENT.get(name)
    limited = any(keyword.arg == "timeout" for keyword in call.keywords)
    return name in BLOCKING or (most is not None and len(call.args) <= most and not limited)


def test_every_wait_has_a_limit() -> None:
    root = Path(holdfast.__file__).parent
    paths = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    found = {
        f"{path.relative_to(root)} {wait}"
        for path in paths
        if not set(path.parts) & set(NOT_IN_A_RUN)
        for wait in waits_in(path.read_text())
    }
    assert len(found) > 40, "the search finds what is known"
    assert not found - KNOWN.keys(), "waits without a limit that nobody has given a reason for"


def test_the_search_tells_limits_from_none() -> None:
    """The control: the same calls with and without a limit."""
    without = ["done.wait()", "thread.join()", "orders.get()", "lock.acquire()", "changed.wait_for(ready)", "s.recv(9)"]
    limited = ["done.wait(3)", "thread.join(3)", "orders.get(timeout=3)", "lock.acquire(timeout=3)", "known.get(name)"]
    limited += ["changed.wait_for(ready, 3)", "changed.wait_for(ready, timeout=3)", "' '.join(names)"]
    assert [len(list(waits_in(line))) for line in without] == [1] * len(without)
    assert [len(list(waits_in(line))) for line in limited] == [0] * len(limited)
