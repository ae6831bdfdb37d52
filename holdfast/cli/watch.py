"""``holdfast watch``: the live page of a run, or of several."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cluster.health import parse_address
from holdfast.errors import UsageError

PORT = 8642  # of the page, unless another one is given or this one is taken
NEEDED = ("starlette", "uvicorn", "prometheus_client")


def watch(
    log_dirs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[LOGDIR]...", help="The --log-dir of each run. Default: holdfast-logs"),
    ] = None,
    at: Annotated[
        str, typer.Option(help=f"HOST:PORT, or PORT on loopback. Default: 127.0.0.1:{PORT}, or a free port.")
    ] = "",
    journal: Annotated[
        Path | None, typer.Option(help="The run's metrics.jsonl. Default: where the run has said that it is.")
    ] = None,
    actions: Annotated[
        bool, typer.Option("--actions", help="Print a link that opens once, to a page that can kill workers.")
    ] = False,
    until_closed: Annotated[int | None, typer.Option(hidden=True, help="End when this descriptor is closed.")] = None,
) -> None:
    """Show a run as a live page: who trains, who holds what, what happened, what could be lost.

    For a run that goes on, or one that is over. The page reads the files in the log directory and nothing else, in a
    process of its own, and changes nothing. Prometheus finds metrics at /metrics. It listens on loopback unless told
    otherwise; who reaches it can read all that the run has logged.
    """
    need_extra()
    from holdfast.watch.doors import Doorman
    from holdfast.watch.server import listen, serve, url_of

    folders = log_dirs or [Path("holdfast-logs")]
    if until_closed is None and (missing := [folder for folder in folders if not folder.is_dir()]):
        raise UsageError(f"there is no folder {missing[0]}", hint="the --log-dir of holdfast run, as in holdfast-logs")
    if journal is not None and len(folders) > 1:
        raise UsageError("--journal is of one run", hint="one LOGDIR")
    doorman = Doorman() if actions else None
    listener = listen(*parse_address(at, "--at")) if at else _listen_somewhere()
    if doorman is None:
        print(f"holdfast: watch it at {url_of(listener)}", flush=True)
    else:
        link = f"{url_of(listener)}#code={doorman.new_code()}"
        print(f"holdfast: watch it, and kill its workers, at {link} (the link opens once)", flush=True)
    if until_closed is not None:
        _leave_terminal()
    named = dict(zip(names_of(folders), folders, strict=True))
    serve(named, listener, journal=journal, doorman=doorman, until_closed=until_closed)


def _listen_somewhere() -> socket.socket:
    from holdfast.watch.server import listen

    try:
        return listen("127.0.0.1", PORT)
    except UsageError:
        return listen("127.0.0.1", 0)


def need_extra() -> None:
    """Raise ``UsageError`` if what the page needs is not installed."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"the page needs {', '.join(missing)}", hint="pip install 'holdfast[watch]'")


def names_of(folders: Iterable[Path]) -> list[str]:
    """Return a short name for each folder: as many of its last parts as tell it from the others.

    >>> names_of([Path("a/logs"), Path("b/logs")]), names_of([Path("holdfast-logs")])
    (['a/logs', 'b/logs'], ['holdfast-logs'])
    """
    paths = [folder.absolute() for folder in folders]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise UsageError("a folder is named twice", hint="each LOGDIR once")


class Beside:
    """The page's server beside a run of this process, as a process of its own. It ends a little after this process.

    ``words``: for ``holdfast watch``. A server that ends or hangs disturbs nobody: this process only holds the other
    end of a pipe. Raises ``UsageError`` if what the page needs is not installed.
    """

    def __init__(self, *words: str, tells: bool = False) -> None:
        need_extra()
        command = [sys.executable, "-m", "holdfast.cli", "watch", *words, "--until-closed", "0"]
        stdout = subprocess.PIPE if tells else None
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=stdout, text=True, start_new_session=True
        )

    def line(self) -> str:
        """Return what it says where it is, once it listens; "" if it has failed. For one that ``tells``."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """Let the server end. It is not waited for: the page shows the end for some seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def beside_run(log_dir: Path, at: str) -> Beside:
    """Start the page of ``holdfast run --watch``. Raises ``UsageError``."""
    if at:
        parse_address(at, "--watch-at")
    return Beside(str(log_dir.absolute()), *(["--at", at] if at else []))


def _leave_terminal() -> None:
    """Let go of the terminal, or of a pipe: whoever reads the output of ``holdfast run`` must not wait for the page."""
    sys.stdout.flush()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
