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
    *("all_to_all_single", "reduce_scatter_tensor"),
}

GENERATION = "it ends with the generation: docs/recovery.md says what ends that"
HANDSHAKE = "wire.HANDSHAKE_SECONDS: around it, or as the socket's timeout"
IDLE = "a thread, or a process, that waits for work: nobody waits for it"
LIFE = "as long as the process has to live"
READABLE = "called when there is something to read, or without blocking"
ETCD = "until etcd answers, or another coordinator is elected"
WRITER = "in the thread that writes a checkpoint: the Saver waits for it with limits"
USERS = "a script's own wait for its disk, or its own process group, which has a timeout"

KNOWN = {
    "checkpoint/background.py Work.wait join": USERS,
    "checkpoint/disk.py _reserve join": WRITER,
    "checkpoint/disk.py in_parallel result": WRITER,
    "checkpoint/object_store.py ObjectStore.write_blocks.parts result": WRITER,
    "checkpoint/ranks.py Gloo._gather allgather": USERS,
    "checkpoint/ranks.py Gloo._gather wait": USERS,
    "checkpoint/saving.py join_saves join": USERS,
    "checkpoint/saving.py wait_for_saves join": USERS,
    "checkpoint/saving.py wait_for_saves wait": USERS,
    "cluster/agent_line.py AgentLine._line_of readline": "three heartbeat timeouts around it",
    "cluster/agent.py Agent.run wait": LIFE,
    "cluster/client.py Client._listen poll": "it makes the object that waits",
    "cluster/coordinator.py Coordinator._hear readline": "the roster closes the connection of a silent peer",
    "cluster/coordinator.py Coordinator.serve wait": LIFE,
    "cluster/faults.py point acquire": "a fault that was asked for",
    "cluster/gate.py Gate._explain sock_recv": "one second around it",
    "cluster/gate.py Gate._explain sock_sendall": "one second around it",
    "cluster/door.py Door.hear recv": READABLE,
    "cluster/gate.py Gate._hello readline": HANDSHAKE,
    "cluster/group.py Group.drain wait": "after an abort, which ends all receives",
    "cluster/group.py Group.finish wait": GENERATION,
    "cluster/group.py Group.start recv": "it posts a receive, and waits for nothing",
    "cluster/links/call.py Call._answered recv": READABLE,
    "cluster/links/call.py Call._say sendall": "a few bytes into an empty buffer, without blocking",
    "cluster/lines.py Lines.flush acquire": "`blocking=False`: it does not wait",
    "cluster/lines.py Lines.receive recv": READABLE,
    "cluster/links/carrier.py PlainCarrier.recv_into recv_into": READABLE,
    "cluster/links/carrier.py TlsCarrier.recv_into recv_into": READABLE,
    "cluster/links/end.py End._read recv_into": READABLE,
    "cluster/links/frames.py Receive.__init__ acquire": "a new lock, which nobody else has",
    "cluster/links/hub.py Hub._let_in.ready recv": READABLE,
    "cluster/health.py HealthServer._answer readuntil": "five seconds around it",
    "cluster/keeper.py CoordinatorKeeper._is_over wait": "a timeout around it, or the end of the run",
    "cluster/keeper.py CoordinatorKeeper.keep wait": LIFE,
    "cluster/keeper.py CoordinatorKeeper.let_end wait": "a timeout around it, the end of the run, or after SIGKILL",
    "cluster/talk.py add_up result": "no future: it returns the sums",
    "cluster/quorum/fence.py FencedOutbox.emptied wait": ETCD,
    "cluster/quorum/fence.py FencedOutbox.send_all wait": IDLE,
    "cluster/quorum/keeper.py ElectedKeeper._act get": IDLE,
    "cluster/quorum/keeper.py ElectedKeeper._do wait": "after SIGKILL",
    "cluster/quorum/keeper.py ElectedKeeper._serve wait": LIFE,
    "cluster/quorum/keeper.py ElectedKeeper.let_end wait": "a timeout around it, or after SIGKILL",
    "cluster/quorum/keeper.py _address_towards getaddrinfo": "the resolver has timeouts of its own",
    "cluster/slurm.py _is_outward getaddrinfo": "the resolver has timeouts of its own",
    "cluster/slurm.py _toward getaddrinfo": "the resolver has timeouts of its own",
    "cluster/meeting_file.py _try_lock flock": "LOCK_NB: it does not wait",
    "cluster/zygote_keeper.py ZygoteKeeper.hear sock_recv": IDLE,
    "cluster/wire.py _prove readexactly": HANDSHAKE,
    "cluster/wire.py connect open_connection": HANDSHAKE,
    "cluster/wire.py connect readexactly": HANDSHAKE,
    "cluster/zygote.py serve recv_fds": READABLE,
    "cluster/zygote.py serve select": IDLE,
    "cluster/zygote.py serve waitpid": "the process has ended: its descriptor says so",
    "data/loader_process.py _Nursery._ended waitpid": "the process has ended: its descriptor says so",
    "data/loader_process.py _Nursery._kill_all waitpid": "after SIGKILL; the worker waits for it with a limit",
    "data/loader_process.py _Nursery.serve poll": IDLE,
    "data/loader_process.py load poll": IDLE,
    "data/loader_process.py receive recv_fds": READABLE,
    "data/pool.py Pool._cause poll": "it makes the object that waits",
    "data/pool.py Pool._end_nursery poll": "it makes the object that waits",
    "data/pool.py Pool._end_nursery waitpid": "after SIGKILL, or its descriptor says that it has ended",
    "data/pool.py Pool._hear poll": "it makes the object that waits",
    "engine/reduce.py Reduction._next get": "`_stop_thread` puts the last item",
    "engine/reduce.py Reduction._stop_thread join": GENERATION,
    "log/log.py Log._run wait_for": IDLE,
    "log/log.py Log.settle wait": "for tests and benches",
    "log/spill.py SpillFile._lock flock": "LOCK_NB: it does not wait",
    "log/spill.py _remove_if_litter flock": "LOCK_NB: it does not wait",
    "sync/exchange.py Averaging._join join": GENERATION,
    "engine/scatter.py PartsToTheirRanks.__call__ all_to_all_single": "a collective of the team's backward pass: the "
    "agent ends the mates of a lost rank, and a team that hangs",
    "engine/scatter.py PartsToTheirRanks.__call__ reduce_scatter_tensor": "as the one above",
    "sync/peers.py TorchPeers.__init__ recv": "it posts a receive of Gloo, and waits for nothing",
    "sync/peers.py TorchPeers.start recv": "it posts a receive of Gloo, and waits for nothing",
    "sync/peers.py _see_off get": IDLE,
    "sync/waiter.py _Waiter._serve get": IDLE,
    "sync/waiter.py wait_for acquire": "a new lock, which nobody else has",
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
    assert not KNOWN.keys() - found, "calls that are not there any more"
    assert not found - KNOWN.keys(), "waits without a limit that nobody has given a reason for"


def test_the_search_tells_limits_from_none() -> None:
    """The control: the same calls with and without a limit."""
    without = ["done.wait()", "thread.join()", "orders.get()", "lock.acquire()", "changed.wait_for(ready)", "s.recv(9)"]
    limited = ["done.wait(3)", "thread.join(3)", "orders.get(timeout=3)", "lock.acquire(timeout=3)", "known.get(name)"]
    limited += ["changed.wait_for(ready, 3)", "changed.wait_for(ready, timeout=3)", "' '.join(names)"]
    assert [len(list(waits_in(line))) for line in without] == [1] * len(without)
    assert [len(list(waits_in(line))) for line in limited] == [0] * len(limited)
