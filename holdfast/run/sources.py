"""Digests of the user's code: the script, and the modules beside it or in the working folder that it has imported."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from functools import cache

import holdfast
from holdfast.run.describe import DIGITS

FILES = 5000  # that are named at most: a label has to fit into a message of 1 MiB
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")  # a package manager looks after these
# Folders of Python's own modules and of holdfast's, as they are named in ``__file__``.
FOLDERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(holdfast.__file__))
NOT_USERS = tuple({folder + os.sep for folder in FOLDERS})


def code_of_the_script() -> str | None:
    """Return the name of the running script's file and a digest of it; None where there is no file to read.

    It is the same whether the script was started by its path or with ``-m``.
    """
    file = _script()
    content = None if file is None else _digest(file)
    return None if file is None or content is None else f"{os.path.basename(file)} {content}"


def code_of_modules() -> dict[str, str]:
    """Return digests of the user's modules that are imported by now, by their paths below the script's folder.

    Modules of Python, of installed packages and of holdfast are not among them: their versions are compared. Neither
    are modules elsewhere. A module of the working folder that is not below the script's has the path of its name.
    """
    script, folder = _script(), os.path.realpath(os.getcwd()) + os.sep
    beside = None if script is None else os.path.dirname(script) + os.sep
    found = {}
    for name, module in list(sys.modules.items()):
        given = getattr(module, "__dict__", {}).get("__file__")  # asking the module itself may make it import more
        if not isinstance(given, str) or not _is_users(given):
            continue
        file = _real(given)
        if beside is not None and file.startswith(beside):
            place = os.path.relpath(file, beside)
        elif file.startswith(folder):
            place = name.replace(".", os.sep) + ("/__init__.py" if file.endswith("__init__.py") else ".py")
        else:
            continue
        if file != script and (content := _digest(file)) is not None:
            found[place] = content
    return dict(sorted(found.items())[:FILES])


def _script() -> str | None:
    """Return the path of the running script or module."""
    given = getattr(sys.modules.get("__main__"), "__file__", None)
    if not given:
        return None
    # A relative path is one from the folder where the script began, which it may have left since then.
    places = [given, os.path.join(sys.path[0], os.path.basename(given)) if sys.path else given]
    return next((os.path.realpath(place) for place in places if os.path.isfile(place)), None)


@cache
def _is_users(file: str) -> bool:
    """Return whether a module's file is one of the user's own, as far as its path tells."""
    return file.endswith(".py") and not file.startswith(NOT_USERS) and not any(each in file for each in INSTALLED)


@cache
def _real(file: str) -> str:
    return os.path.realpath(file)


def _digest(file: str) -> str | None:
    try:
        facts = os.stat(file)
        return _digest_of(file, facts.st_mtime_ns, facts.st_size)
    except OSError:  # it was removed since it was imported
        return None


@cache
def _digest_of(file: str, *_version: int) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:DIGITS]
