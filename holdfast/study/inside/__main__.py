"""Started by path in a framework's interpreter, ``python -I .../inside/__main__.py FRAMEWORK``; answers requests.

Holdfast is not installed there, and its other requirements must not be seen there (another numpy!). So only its
folders are made known, as packages without code; what this side imports of them needs nothing else.
"""

import importlib.util
import sys
import types
from pathlib import Path


def know_holdfast() -> None:
    """Makes ``holdfast.study`` importable where holdfast is not installed."""
    if importlib.util.find_spec("holdfast") is not None:
        return
    study = Path(__file__).resolve().parent.parent
    for name, folder in (("holdfast", study.parent), ("holdfast.study", study)):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


if __name__ == "__main__":
    know_holdfast()
    from holdfast.study.inside.serve import serve

    serve(sys.argv[1])
