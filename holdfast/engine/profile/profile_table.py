"""Shows a profile on a terminal: a table of its layers, and its links."""

from __future__ import annotations

from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.screen import Screen
from holdfast.words import size_text

COLUMNS = ["layer~", ">forward ms", ">backward ms", ">ratio", ">boundary", ">state", ">saved"]


def show_profile(screen: Screen, profile: Profile) -> None:
    """Print a profile: layers with their totals, the links and where they are from, the memory."""
    layers = profile.layers
    rows = [_row(layer.name, layer.forward, layer.backward, [layer]) for layer in layers]
    forward, backward = (sum(getattr(layer, name) for layer in layers) for name in ("forward", "backward"))
    total = _row("all", forward, backward, layers)
    total[COLUMNS.index(">boundary")] = ""  # no sum makes sense: a plan cuts at some of the boundaries
    screen.say(profile.model, style="bold")
    screen.say(f"{profile.device}; micro-batches of {profile.micro_batch}")
    screen.say()
    screen.table(COLUMNS, [*rows, total])
    screen.say()
    update = sum(layer.update for layer in layers)
    screen.say(f"a micro-batch: {_pass(profile)}; the update: {_ms(update)} ms a step")
    screen.say(f"inside a host: {_link(profile.inside)} ({profile.notes.get('inside', 'not measured')})")
    screen.say(f"between hosts: {_link(profile.between)} ({profile.notes.get('between', 'not measured')})")
    limit = "no limit known (--memory)" if profile.memory is None else size_text(profile.memory)
    screen.say(f"memory of a device: {limit}")


def _row(name: str, forward: float, backward: float, layers: list[LayerCost] | tuple[LayerCost, ...]) -> list[str]:
    sizes = [sum(getattr(layer, f"{what}_bytes") for layer in layers) for what in ("output", "state", "saved")]
    ratio = f"{backward / forward:.2f}" if forward and backward else ""
    return [name, _ms(forward), _ms(backward), ratio, *map(size_text, sizes)]


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds, with three digits.

    >>> _ms(0.0012345), _ms(12.3), _ms(0.0)
    ('1.23', '12300', '0')
    """
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _link(link: Link) -> str:
    """Format a link in the units that networks are sold by.

    >>> _link(Link(bandwidth=1.25e9, latency=42e-6))
    '10 Gbit/s, 42 µs'
    """
    return f"{8e-9 * link.bandwidth:.3g} Gbit/s, {1e6 * link.latency:.3g} µs"


def _pass(profile: Profile) -> str:
    """Format the time of a pass, forward and backward: the median of whole passes.

    The table's total is the sum of the layers' medians, which is not quite the same.
    """
    if "pass" not in profile.notes:
        return f"{_ms(sum(layer.forward + layer.backward for layer in profile.layers))} ms"
    low, high = profile.notes["spread"]["pass"]
    return f"{_ms(profile.notes['pass'])} ms (half of the passes took {_ms(low)} to {_ms(high)})"
