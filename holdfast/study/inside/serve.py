"""Answers the study's requests, one JSON object a line: ``{"op": "save", …}`` is answered by ``{"ok": …}``.

What a framework prints goes to stderr, so that it cannot be taken for an answer.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from holdfast.study import adapters
from holdfast.study.inside import crash, lesson, ranks, save
from holdfast.study.inside.session import Session

Operation = Callable[..., dict[str, Any]]


def hello(session: Session) -> dict[str, Any]:
    """Which framework this is, and what it can do."""
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


OPERATIONS: dict[str, Operation] = {
    "hello": hello,
    "make": save.make,
    "drop": save.drop,
    "save": save.save,
    "load": save.load,
    "beside": save.beside,
    "join": ranks.join,
    "save_ranked": ranks.save_ranked,
    "train": lesson.train,
    "doom": crash.doom,
    "overwrite": crash.overwrite,
    "versions_of": crash.versions_of,
    "look": crash.look,
}


def serve(framework: str) -> None:
    """Until the study closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    session = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            session = session or Session(adapters.find(framework))
            answer = {"ok": OPERATIONS[request.pop("op")](session, **request)}
        except Exception as e:  # whatever a framework raises is a row of the study, not its end
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}".strip()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
