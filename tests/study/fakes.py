"""Frameworks that misbehave as told: an executable in the interpreter's place, which answers as the inside does."""

from __future__ import annotations

import sys
from pathlib import Path

ANSWERS = """#!{python}
import json, os, signal, sys, time

{answer}

for line in sys.stdin:
    request = json.loads(line)
    try:
        found = {{"ok": answer(request.pop("op"), request)}}
    except Exception as e:
        found = {{"error": str(e)}}
    print(json.dumps(found), flush=True)
"""


def fake(path: Path, answer: str) -> Path:
    """``answer``: the source of a function of the operation and what was given."""
    path.write_text(ANSWERS.format(python=sys.executable, answer=answer))
    path.chmod(0o755)
    return path
