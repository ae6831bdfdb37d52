"""The zygote: a process that has imported torch and forks workers.

A fresh interpreter needs more than a second to import torch; a fork of the zygote is ready in milliseconds. The zygote
stays single-threaded, because forking a process with threads is not safe. ``--preload`` names further modules that it
imports (``preload.py``).
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from holdfast import logs, titles
from holdfast.cluster import descriptors, preload, signals, stacks
from holdfast.cluster import lifeline as to_agent
from holdfast.cluster.pulse import PULSE
from holdfast.cluster.user_script import length_of_output, run_script, text_of
from holdfast.errors import HoldfastError, wants_traceback

Order = dict[str, Any]


def serve(agent: socket.socket, further: Sequence[str] = (), folder: str = "") -> None:
    """Fork a worker for each order of the agent, and report each worker's end. Return when the agent is gone.

    ``further``: modules to import first; ``folder``: the script's, where some of them may be.
    """
    warm_up()
    if further and not _preload(agent, further, folder):
        return
    children: dict[int, int] = {}  # pidfd → pid
    _report(agent, {"ready": os.getpid()})
    while True:
        watching: list[Any] = [agent, *children]
        readable, _, _ = select.select(watching, [], [])
        for watched in readable:
            if isinstance(watched, int):
                pid = children.pop(watched)
                os.close(watched)
                _, status = os.waitpid(pid, 0)
                _report(agent, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})
                continue
            data, descriptors, _, _ = socket.recv_fds(agent, 2**20, 1)
            if not data:
                return
            pid = _fork(json.loads(data), descriptors[0], agent, children)
            os.close(descriptors[0])
            children[os.pidfd_open(pid)] = pid


def _preload(agent: socket.socket, names: Sequence[str], folder: str) -> bool:
    """Import further modules; return False if one of them cannot be, which the agent is told.

    One that leaves threads behind is told too. Then this process begins anew without it: orders that wait in the socket
    stay there.
    """
    try:
        preload.load_all(names, folder)
    except preload.Unfit as e:
        _report(agent, e.report)
        return False
    except preload.Threaded as e:
        _report(agent, e.report)
        rest = [name for name in names if name != e.name]
        os.set_inheritable(agent.fileno(), True)
        os.execv(sys.executable, command_line(agent.fileno(), rest, folder))
    return True


def command_line(agent: int, further: Sequence[str], folder: str) -> list[str]:
    """Return the command that starts a zygote. ``agent``: the descriptor of the socket to its agent."""
    words = [sys.executable, "-m", "holdfast.cluster.zygote", str(agent), json.dumps([*further]), folder]
    return words + titles.filler(words)


def warm_up() -> None:
    """Import all that workers need: torch, the modules it imports with the first optimizer, and scipy for planning."""
    import scipy.optimize  # type: ignore[import-untyped]  # noqa: F401
    import torch

    import holdfast.run.run  # noqa: F401

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def _report(agent: socket.socket, message: dict[str, Any]) -> None:
    agent.send(json.dumps(message).encode())


def _fork(order: Order, lifeline: int, agent: socket.socket, children: dict[int, int]) -> int:
    """Fork a worker; return its pid. The child never returns from here."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            agent.close()
            for descriptor in children:
                os.close(descriptor)
            code = run_worker(order, lifeline)
        except BaseException:
            traceback.print_exc()
        finally:
            # sys.exit would unwind the zygote's stack, and run its cleanup, in the child.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _report(agent, {"started": order["worker"], "pid": pid})
    return pid


def run_worker(order: Order, lifeline: int) -> int:
    """Turn the forked process into a worker, run the user's script, and return its exit code."""
    _become_worker(order, lifeline)
    from holdfast.cluster.client import Stopped
    from holdfast.cluster.membership import GIVEN_UP
    from holdfast.run.process import farewell, leave, release

    try:
        run_script(order["module"])
        farewell()
        to_agent.report("finished")  # so that an agent that was asked to leave knows that all is done
        return 0
    except Stopped as e:
        leave(dismissed=not e.code)
        if e.code not in (0, GIVEN_UP):  # the run ends
            release()
        return int(e.code or 0)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
        to_agent.fail(text=f"the script exited with {e.code!r}", code=code, final=False)
        leave()
        release()  # the run may end with it; if the others go on, they take the lease again
        return code
    except HoldfastError as e:
        said = length_of_output()
        if wants_traceback():
            traceback.print_exc()
        logging.getLogger(__name__).error(e)
        to_agent.fail(text=f"holdfast: {e}", code=e.exit_code, final=True, shown_from=said, refused=e.refused)
        if not e.refused:  # the run ends
            release()
        return e.exit_code
    except BaseException as e:
        said, text = length_of_output(), text_of(e)
        sys.stderr.write(text + "\n")  # the script's own error, as Python shows it
        to_agent.fail(text=text[-8000:], code=1, final=False, shown_from=said)
        leave()
        release()
        return 1


def _become_worker(order: Order, lifeline: int) -> None:
    """Set session, signals, output, environment, folder and arguments as the order says."""
    os.setsid()  # a session of its own: Ctrl-C on the terminal reaches only the agent, which asks workers to leave
    signals.pass_on(lambda name: to_agent.report("signal", name=name))
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks.listen(log)  # a descriptor of its own: a script may close or redirect the others
    PULSE.begin()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(order["environment"], HOLDFAST_LIFELINE=str(lifeline))
    titles.set_title(f"worker {order['worker']}", order["arguments"][0])
    os.chdir(order["folder"])
    descriptors.raise_limit()
    logs.show()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = list(order["arguments"])


if __name__ == "__main__":
    # The zygote ends when the agent's socket closes.
    signals.leave_to_agent()
    titles.set_title("zygote")
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]), sys.argv[3])
    except ConnectionError:
        pass  # the agent has ended
