"""The zygote: a process that has imported torch and forks workers.

A fresh interpreter needs more than a second to import torch; a fork of the zygote is ready in milliseconds. The zygote
stays single-threaded, because forking a process with threads is not safe.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import select
import socket
import sys
import traceback
from typing import Any

from holdfast import logs
from holdfast.cluster import lifeline as to_agent
from holdfast.cluster import signals, stacks
from holdfast.cluster.pulse import PULSE
from holdfast.errors import HoldfastError

Order = dict[str, Any]


def serve(agent: socket.socket) -> None:
    """Fork a worker for each order of the agent, and report each worker's end. Return when the agent is gone."""
    warm_up()
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
    from holdfast.run.run import farewell, leave

    try:
        _run_script(order["module"])
        farewell()
        to_agent.report("finished")  # so that an agent that was asked to leave knows that all is done
        return 0
    except Stopped as e:
        leave()
        return int(e.code or 0)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
        _tell_agent(lifeline, {"text": f"the script exited with {e.code!r}", "code": code, "final": False})
        leave()
        return code
    except HoldfastError as e:
        logging.getLogger(__name__).error(e)
        error = {"text": f"holdfast: {e}", "code": e.exit_code, "final": True, "shown": True}
        _tell_agent(lifeline, error)
        return e.exit_code
    except BaseException:
        text = traceback.format_exc()
        sys.stderr.write(text + "\n")  # the script's own error, as Python shows it
        _tell_agent(lifeline, {"text": text[-8000:], "code": 1, "final": False, "shown": True})
        leave()
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
    os.chdir(order["folder"])
    logs.show()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = list(order["arguments"])


def _run_script(module: bool) -> None:
    """Run the script or module in ``sys.argv``. ``sys.exit(0)`` in it is a normal end."""
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        if e.code not in (None, 0):
            raise


def _tell_agent(lifeline: int, error: dict[str, Any]) -> None:
    """Report the error that ends this worker to its agent."""
    with socket.socket(fileno=os.dup(lifeline)) as line:
        line.sendall(json.dumps(error).encode())


if __name__ == "__main__":
    # The zygote ends when the agent's socket closes.
    signals.leave_to_agent()
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    except ConnectionError:
        pass  # the agent has ended
