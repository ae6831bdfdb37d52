"""Sizes that a pipeline can have, from the fewest nodes whose memory suffices."""

from __future__ import annotations

from holdfast.errors import UsageError
from holdfast.plan.stage_costs import Chain, StageCosts
from holdfast.words import count, size_text

PER_DEVICE = 4  # micro-batches per device that templates are made for: Oobleck's choice


def chains(costs: StageCosts, nodes: int, devices: int) -> list[Chain]:
    """Return the ways to use a pipeline's devices that fit into their memory: one chain, or several lanes.

    ``devices`` is the number per node. Lanes are equal chains side by side, each with its own micro-batches.

    >>> from holdfast.plan.profile import uniform
    >>> [(chain.lanes, chain.stages) for chain in chains(StageCosts(uniform(6)), 2, 4)]
    [(2, 4), (4, 2)]
    """
    shapes = [
        Chain(
            stages=nodes * devices // lanes,
            per_node=devices // lanes,
            lanes=lanes,
            micro_batches=PER_DEVICE * nodes * devices // lanes,
        )
        for lanes in range(1, devices + 1)
        if devices % lanes == 0
    ]
    return [chain for chain in shapes if costs.fits(chain)]


def fewest_nodes(costs: StageCosts, devices: int, minimum: int | None) -> int:
    """Return n0, the nodes of the smallest pipeline whose stages fit into memory, or ``minimum`` if given.

    Raises UsageError if no pipeline fits, or not with so few nodes.
    """
    if minimum is not None and minimum > costs.count:
        raise UsageError(
            f"a pipeline of {minimum} nodes has more nodes than the model has layers", hint=f"at most {costs.count}"
        )
    _check_layers(costs)
    possible = (size for size in range(minimum or 1, costs.count + 1) if chains(costs, size, devices))
    fewest = next(possible, None)
    if fewest is None:
        of = f" of {minimum} or more nodes" if minimum is not None else ""
        raise UsageError(
            f"no pipeline{of} fits into devices of {size_text(costs.profile.memory or 0)}: short ones have too many "
            "layers on a device, in long ones the first device has too many micro-batches under way",
            hint="more memory, or a smaller micro-batch",
        )
    if minimum is not None and fewest > minimum:
        raise UsageError(
            f"a pipeline of {count(minimum, 'node')} does not fit into the memory",
            hint=f"the next larger that does has {fewest}",
        )
    return fewest


def _check_layers(costs: StageCosts) -> None:
    """Raise UsageError if a single layer does not fit into a device: then no pipeline does."""
    memory = costs.profile.memory
    layer = max(costs.profile.layers, key=lambda layer: layer.resident_bytes + layer.saved_bytes)
    needs = layer.resident_bytes + layer.saved_bytes
    if memory is not None and needs > memory:
        raise UsageError(
            f"no pipeline fits into the memory: {layer.name} alone takes {size_text(needs)}, "
            f"a device has {size_text(memory)}",
            hint="more memory, a smaller micro-batch, or cut the model into smaller layers",
        )


def what_it_takes(tolerate: int, fewest: int) -> str:
    """Return a sentence with the nodes that planning needs at least.

    >>> what_it_takes(0, 2), what_it_takes(1, 1)
    ('training takes a pipeline of at least 2 nodes', 'surviving the loss of 1 takes 2 pipelines of at least 1 node')
    """
    if tolerate == 0:
        return f"training takes a pipeline of at least {count(fewest, 'node')}"
    return f"surviving the loss of {tolerate} takes {tolerate + 1} pipelines of at least {count(fewest, 'node')}"


def what_would_help(nodes: int, fewest: int) -> str:
    """Return a hint about what to do with too few nodes.

    >>> what_would_help(3, 1)
    'tolerate 2, or more nodes'
    """
    if nodes < fewest:
        return f"{fewest} nodes train without tolerating a loss; more memory or a smaller micro-batch may need fewer"
    fewer = ", or more memory so that a pipeline needs fewer" if fewest > 1 else ""
    return f"tolerate {nodes // fewest - 1}, or more nodes{fewer}"
