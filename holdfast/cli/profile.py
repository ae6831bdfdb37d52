"""``holdfast profile``: what each layer of a script's model costs, and how fast the links are."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.run import read_token
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.checkpoint.show import Screen
    from holdfast.plan.profile import Profile
    from holdfast.run import Run


def profile(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile goes.")] = Path("profile.json"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is in the cache.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="Passes that count, after a few to warm up.")] = 20,
    memory: Annotated[float | None, typer.Option(help="Memory of one device, in GB.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Between hosts, in Gbit/s.")] = None,
    latency: Annotated[float | None, typer.Option(help="Between hosts, in ms.")] = None,
    peer: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Measure the link to a host where --serve waits.")
    ] = "",
    serve: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Wait for one --peer. Loopback unless HOST says otherwise.")
    ] = "",
    token_file: Annotated[Path | None, typer.Option(help="With --peer and --serve: else HOLDFAST_TOKEN.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The profile as a JSON object on the last line.")] = False,
) -> None:
    """Measure what each layer of a model costs, and the links.

    Runs the script until its Run would start to train, measures instead, and writes a profile for
    holdfast plan. The script's model, data and settings are used as they are; nothing is trained or saved.
    """
    if serve:
        _serve(serve, command, token_file)
        return
    if not command:
        raise UsageError("there is no script to profile", hint="holdfast profile train.py")
    _check(command, output, module=module)
    links = LinkOptions(bandwidth=bandwidth, latency=latency, peer=peer, token_file=token_file)
    if memory is not None and not 1 <= memory * 1e9 < float("inf"):
        raise UsageError(f"--memory must be more than 0, not {memory:g}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: as holdfast run has it
    from holdfast.checkpoint.show import Screen

    screen = Screen(aside=as_json, everything=True)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        found, is_cached = _measured(command, module=module, rounds=rounds, fresh=fresh, screen=screen)
    made = links.add_to(found)
    if memory is not None:
        made = replace(made, memory=int(memory * 1e9))
    _publish(made, output, is_cached=is_cached, screen=screen)
    if as_json:
        print(json.dumps(made.to_json()))


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """What the command line says about the link between hosts."""

    bandwidth: float | None  # Gbit/s
    latency: float | None  # ms
    peer: str
    token_file: Path | None

    def __post_init__(self) -> None:
        """Before the script is started: it may take minutes to come to its training."""
        if self.bandwidth is not None and not 0 < self.bandwidth < float("inf"):
            raise UsageError(f"--bandwidth must be more than 0, not {self.bandwidth:g}")
        if self.latency is not None and not 0 <= self.latency < float("inf"):
            raise UsageError(f"--latency must be 0 or more, not {self.latency:g}")
        if self.peer and (self.bandwidth is not None or self.latency is not None):
            raise UsageError("--peer measures what --bandwidth and --latency would say", hint="one or the other")
        if self.peer:
            parse_address(self.peer)
            read_token(self.token_file, alone=False)

    def add_to(self, profile: Profile) -> Profile:
        from holdfast.engine.profile.links import measure_peer
        from holdfast.engine.profile.measure import with_between

        if self.peer:
            token = read_token(self.token_file, alone=False)
            return with_between(profile, peer=self.peer, measured=measure_peer(parse_address(self.peer), token))
        bandwidth = None if self.bandwidth is None else self.bandwidth * 1e9 / 8
        return with_between(profile, bandwidth=bandwidth, latency=None if self.latency is None else self.latency / 1e3)


def _measured(command: list[str], *, module: bool, rounds: int, fresh: bool, screen: Screen) -> tuple[Profile, bool]:
    """The profile, with the links inside this host; and whether it was in the cache."""
    from holdfast.engine.profile.key import cache_folder, cached, write_profile
    from holdfast.engine.profile.links import measure_inside
    from holdfast.engine.profile.measure import Layers, measure, read_facts
    from holdfast.engine.profile.script import until_training
    from holdfast.plan.profile import Profile

    def look(run: Run) -> Profile | Layers:
        facts, *_ = read_facts(run.engine)
        known = None if fresh else cached(facts.key)
        return known or measure(run.engine, rounds=rounds, say=screen.say)

    found = until_training(command, look, module=module)
    if isinstance(found, Profile):
        return found, True
    # After the script: it may have an event loop of its own running, and its threads would be in the way.
    made = found.profile(Path(command[0]).stem, measure_inside())
    try:
        write_profile(cache_folder() / f"{made.key}.json", made)
    except OSError as e:
        screen.say(f"not kept in the cache: {e}", style="yellow")
    return made, False


def _publish(made: Profile, output: Path, *, is_cached: bool, screen: Screen) -> None:
    from holdfast.checkpoint.show import time_text
    from holdfast.engine.profile.key import write_profile
    from holdfast.engine.profile.show import show_profile

    show_profile(screen, made)
    if is_cached:
        when = time_text(made.notes.get("measured", 0.0))
        screen.say(f"from the cache, measured {when} (--fresh measures again)", style="yellow")
    try:
        write_profile(output, made)
    except OSError as e:
        raise UsageError(f"cannot write {output}: {e.strerror or e}") from e
    screen.say(f"written: {output}")


def _check(command: list[str], output: Path, *, module: bool) -> None:
    if not module and not Path(command[0]).is_file():
        raise UsageError(f"there is no script '{command[0]}'", hint="or -m for a module")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output} cannot be written", hint="a file in a folder that exists")


def _serve(where: str, command: list[str] | None, token_file: Path | None) -> None:
    if command:
        raise UsageError("--serve only waits for a peer: it takes no script")
    address = parse_address(where, host="127.0.0.1")
    token = read_token(token_file, alone=False)
    from holdfast.engine.profile.links import serve

    serve(address, token, lambda text: print(text, flush=True))


def parse_address(text: str, *, host: str = "") -> tuple[str, int]:
    """HOST:PORT, or PORT alone where ``host`` is known.

    >>> parse_address("head:29800"), parse_address("29800", host="127.0.0.1")
    (('head', 29800), ('127.0.0.1', 29800))
    """
    name, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) < 65536 or not (name or host):
        raise UsageError(f"'{text}' is not HOST:PORT", hint="as in head:29800")
    return name.strip("[]") or host, int(port)
