"""Server of the study's requests, one JSON object a line: ``{"op": "save", …}`` is answered by ``{"ok": …}``.

Output of the framework goes to stderr, so that it cannot be taken for an answer.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any, NoReturn

from holdfast.study.inside import killed_saves, operations
from holdfast.study.inside.session import Session

Operation = Callable[..., dict[str, Any]]


def serve(framework: str) -> None:
    """Answer requests on stdin until the study closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _answer_all(Session(framework), sys.stdin, answers)


def _answer_all(session: Session, requests: IO[str], answers: IO[str]) -> None:
    session.pipes = requests, answers
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            session.begin()
            answer = {"ok": OPERATIONS[request.pop("op")](session, **request)}
        except Exception as e:  # whatever a framework raises is a row of the study, not its end
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}".strip()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def hello(session: Session) -> dict[str, Any]:
    """Return the framework's versions, formats, strategies and parts."""
    adapter = session.adapter
    return {
        "versions": adapter.versions(),
        "formats": [vars(form) for form in adapter.formats],
        "strategies": list(adapter.strategies),
        "parts": [vars(part) for part in adapter.parts],
        "usual": sorted(adapter.usual),
        "usual_means": adapter.usual_means,
        "variants": list(adapter.variants),
    }


def fork(session: Session, *, address: str, log: str) -> dict[str, Any]:
    """Fork this process, which saves the seconds of an import; the fork answers at the socket ``address``.

    This process must not have made a model itself: frameworks survive a fork only before their threads run.
    """
    pid = os.fork()
    if pid == 0:
        _go_on_as_fork(session, address, log)
    return {"pid": pid}


def _go_on_as_fork(session: Session, address: str, log: str) -> NoReturn:
    code = 1
    try:
        os.setsid()
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(errors, number)
        for pipe in session.pipes:
            pipe.close()  # whoever waits for the other process' end must not wait for this one's
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(address)
            _answer_all(session, line.makefile("r"), line.makefile("w"))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # nothing of the other process is this one's to end


def ended(session: Session, *, pid: int, wait: bool) -> dict[str, Any]:
    """Return how a fork has ended: its exit code, a signal's number below zero, or None if it still runs."""
    found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    return {"code": os.waitstatus_to_exitcode(status) if found else None}


OPERATIONS: dict[str, Operation] = {
    "hello": hello,
    "make": operations.make,
    "drop": operations.drop,
    "save": operations.save,
    "load": operations.load,
    "beside": operations.beside,
    "join": operations.join,
    "save_ranked": operations.save_ranked,
    "train": operations.train,
    "doom": killed_saves.doom,
    "overwrite": killed_saves.overwrite,
    "versions_of": killed_saves.versions_of,
    "look": killed_saves.look,
    "fork": fork,
    "ended": ended,
}
