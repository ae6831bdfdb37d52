"""``holdfast profile``: what each layer of a script's model costs, and how fast the links are."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from holdfast.cli.plan import the_model, with_memory
from holdfast.cli.run import made_up_token, read_token
from holdfast.errors import UsageError
from holdfast.plan.profile import uniform

if TYPE_CHECKING:
    from holdfast.plan.profile import Profile
    from holdfast.run.training import Training
    from holdfast.screen import Screen

T = TypeVar("T")

# Limits of what --bandwidth and --latency accept: a value outside is a mistake in the unit.
SLOWEST, FASTEST = 1e-6, 1e6  # Gbit/s
LATEST = 60_000.0  # ms


def profile(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments: options go before it."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile goes.")] = Path("profile.json"),
    check: Annotated[
        Path | None, typer.Option(metavar="PROFILE", help="Only say whether this is a profile of the script's run.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is in the cache.")] = False,
    rounds: Annotated[
        int, typer.Option(min=3, help="Passes that count, after a few to warm up; the cache's has as many or more.")
    ] = 20,
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
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object on the last line: the profile.")] = False,
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
    if not module and not Path(command[0]).is_file():
        raise UsageError(f"there is no script '{command[0]}'", hint="or -m for a module")
    script = ProfiledScript(command=command, module=module, as_json=as_json)
    if check is not None:
        if fresh or peer or (memory, bandwidth, latency) != (None, None, None):
            raise UsageError("--check only compares: it measures nothing, and asks for no links and no memory")
        _compare(check, script)
        return
    _check_output(output)
    links = LinkOptions.read(bandwidth=bandwidth, latency=latency, peer=peer, token_file=token_file)
    with_memory(uniform(1), memory)  # refused before the script is started, which may take minutes
    target = output.absolute()  # the script may go elsewhere
    found, is_cached = _measured(script, rounds=rounds, fresh=fresh)
    made = with_memory(links.add_to(found), memory)
    _publish(made, target, shown=output, is_cached=is_cached, screen=script.screen)
    script.last_line(made.to_json())


class ProfiledScript:
    """The user's script, and where its output and ours go: with ``--json``, stdout is for the last line only."""

    def __init__(self, *, command: list[str], module: bool, as_json: bool) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: as holdfast run has it
        from holdfast.screen import Screen

        self.screen = Screen(aside=as_json, everything=True)
        self.name = command[0] if module else Path(command[0]).stem
        self._command, self._module = command, module
        self._as_json = as_json
        self._lines: list[str] = []
        if as_json:  # registered before what the script registers, so it is called after that: the last line is ours
            atexit.register(self._print)

    def until_training(self, look: Callable[[Training], T]) -> T:
        """Run the script until its ``Run`` would train, and return ``look(run)``."""
        from holdfast.engine.profile.run_script import until_training

        with redirect_stdout(sys.stderr) if self._as_json else nullcontext():
            return until_training(self._command, look, module=self._module)

    def last_line(self, document: dict[str, Any]) -> None:
        """With ``--json``, print this at the exit, after whatever the script prints there."""
        if self._as_json:
            self._lines.append(json.dumps(document))

    def _print(self) -> None:
        for line in self._lines:  # none if something went wrong
            print(line)


def _compare(path: Path, script: ProfiledScript) -> None:
    """Say whether a profile is one of this script's run. Raises ``UsageError`` (exit code 2) if it is not."""
    from holdfast.engine.profile.measure import fits

    known = the_model(path, None, equal=False)
    reason = script.until_training(lambda run: fits(known, run))
    script.last_line({"fits": reason is None, "reason": reason or ""})
    if reason is not None:
        raise UsageError(f"{path}: {reason}", hint="holdfast profile makes a new one")
    script.screen.say(f"{path} is a profile of this model, micro-batch and device: {known.model}")


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The command line's options about the link between hosts."""

    bandwidth: float | None  # bytes/s
    latency: float | None  # s
    peer: str
    token: str

    @classmethod
    def read(cls, *, bandwidth: float | None, latency: float | None, peer: str, token_file: Path | None) -> LinkOptions:
        """Read the options, in Gbit/s and ms.

        Raises ``UsageError`` now, not when they are used: the script may take minutes to come to its training.
        """
        if bandwidth is not None and not SLOWEST <= bandwidth <= FASTEST:
            raise UsageError(f"--bandwidth {bandwidth:g} is no network", hint=f"{SLOWEST:g} to {FASTEST:,.0f} Gbit/s")
        if latency is not None and not 0 <= latency <= LATEST:
            raise UsageError(f"--latency {latency:g} is no network", hint=f"0 to {LATEST:,.0f} ms")
        if peer and (bandwidth is not None or latency is not None):
            raise UsageError("--peer measures what --bandwidth and --latency would say", hint="one or the other")
        if peer:
            parse_address(peer)
        return cls(
            bandwidth=None if bandwidth is None else bandwidth * 1e9 / 8,
            latency=None if latency is None else latency / 1e3,
            peer=peer,
            token=(read_token(token_file) or made_up_token(alone=False)) if peer else "",
        )

    def add_to(self, profile: Profile) -> Profile:
        """Return the profile with the link between hosts as the options say; ``--peer`` is measured here."""
        from holdfast.engine.profile.links import measure_peer
        from holdfast.engine.profile.measure import with_between

        if self.peer:
            return with_between(profile, peer=self.peer, measured=measure_peer(parse_address(self.peer), self.token))
        return with_between(profile, bandwidth=self.bandwidth, latency=self.latency)


def _measured(script: ProfiledScript, *, rounds: int, fresh: bool) -> tuple[Profile, bool]:
    """Return the script's profile, with the link inside this host, and whether it was in the cache."""
    from holdfast.engine.profile.key import cache_folder, cached, write_profile
    from holdfast.engine.profile.links import measure_inside
    from holdfast.engine.profile.measure import MeasuredLayers, measure, model_text, read_facts
    from holdfast.plan.profile import Profile

    folder = cache_folder().absolute()

    def look(run: Training) -> Profile | MeasuredLayers:
        facts, *_ = read_facts(run.engine)
        known = None if fresh else cached(folder, facts.key, rounds=rounds)
        return known or measure(run.engine, rounds=rounds, say=script.screen.say)

    found = script.until_training(look)
    if isinstance(found, Profile):  # made from a script that may have had another name
        return replace(found, model=model_text(script.name, found.layers, found.key)), True
    # Links are measured after the script: it may have an event loop of its own, and its threads would disturb.
    made = found.profile(script.name, measure_inside())
    try:
        write_profile(folder / f"{made.key}.json", made)
    except OSError as e:
        script.screen.say(f"not kept in the cache: {e}", style="yellow")
    return made, False


def _publish(made: Profile, target: Path, *, shown: Path, is_cached: bool, screen: Screen) -> None:
    from holdfast.engine.profile.key import write_profile
    from holdfast.engine.profile.profile_table import show_profile
    from holdfast.words import time_text

    show_profile(screen, made)
    if is_cached:
        when = time_text(made.notes.get("measured", 0.0))
        screen.say(f"from the cache, measured {when} (--fresh measures again)", style="yellow")
    try:
        write_profile(target, made)
    except OSError as e:
        raise UsageError(f"cannot write {shown}: {e.strerror or e}") from e
    screen.say(f"written: {shown}")


def _check_output(output: Path) -> None:
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output} cannot be written", hint="a file in a folder that exists")


def _serve(where: str, command: list[str] | None, token_file: Path | None) -> None:
    if command:
        raise UsageError("--serve only waits for a peer: it takes no script")
    address = parse_address(where, host="127.0.0.1")
    token = read_token(token_file) or made_up_token(alone=False)
    from holdfast.engine.profile.links import serve

    serve(address, token, lambda text: print(text, flush=True))


def parse_address(text: str, *, host: str = "") -> tuple[str, int]:
    """Read HOST:PORT, or PORT alone if there is a ``host`` for it. An IPv6 address is in brackets.

    Raises ``UsageError`` for anything else.

    >>> parse_address("head:29800"), parse_address("29800", host="127.0.0.1"), parse_address("[::1]:29800")
    (('head', 29800), ('127.0.0.1', 29800), ('::1', 29800))
    """
    name, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) < 65536 or not (name or host):
        raise UsageError(f"'{text}' is not HOST:PORT", hint="as in head:29800")
    return name.strip("[]") or host, int(port)
