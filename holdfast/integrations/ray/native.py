"""All that is asked of Ray itself.

Three things here are internal to Ray 2.60: whether Train is v2, draining nodes, and the run context of callbacks.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.train import RunConfig, ScalingConfig

VERSION = (2, 60)  # whose internals these are
CALLS = 8  # of an actor at once: its whole life is one call, and others have to get through


class Lost(HoldfastError):
    """An actor has died, or cannot be made."""


class OutOfSight(Lost):
    """Ray does not reach an actor at the moment. It may be alive, and what it was asked for may go on."""


def need() -> None:
    """Make sure that Ray Train v2 is here, in the version that is known. Raises ``UsageError`` if it is not."""
    hint = "pip install 'holdfast[ray]'"
    try:
        import ray

        if tuple(int(part) for part in ray.__version__.split(".")[:2]) != VERSION:
            known = ".".join(map(str, VERSION))
            raise UsageError(f"HoldfastTrainer needs Ray {known}, and this is {ray.__version__}", hint=hint)
        import cloudpickle  # noqa: F401
        from ray.train.v2._internal.constants import is_v2_enabled
    except ImportError as e:
        raise UsageError(f"HoldfastTrainer needs Ray Train: {e}", hint=hint) from e
    if not is_v2_enabled():
        raise UsageError("HoldfastTrainer takes the settings of Ray Train v2", hint="RAY_TRAIN_V2_ENABLED=1")


def connect() -> None:
    """Connect this process to a cluster, or start one on this machine, as Ray Train does. Refuses Ray Client."""
    import ray
    import ray.util.client

    if not ray.is_initialized():
        ray.init()
    if ray.util.client.ray.is_connected():
        text = "a driver outside of the cluster (ray://) cannot be reached by its workers"
        raise UsageError(text, hint="ray job submit -- python train.py")


def own_address() -> str:
    """Return the address of this node, as the others reach it."""
    import ray

    return str(ray.util.get_node_ip_address())


def start(kind: type, *arguments: Any, scaling: ScalingConfig, run: RunConfig) -> ActorHandle:
    """Return an actor that Ray will place as soon as it can, with a worker's resources."""
    import ray

    strategy = "SPREAD" if scaling.placement_strategy == "SPREAD" else "DEFAULT"
    options: dict[str, Any] = {"scheduling_strategy": strategy, "runtime_env": run.worker_runtime_env or None}
    options |= {"num_cpus": scaling.num_cpus_per_worker, "num_gpus": scaling.num_gpus_per_worker}
    more = dict(scaling.additional_resources_per_worker)
    memory = more.pop("memory", None)
    options |= {"resources": more, "memory": memory, "label_selector": scaling.label_selector}
    given = {name: value for name, value in options.items() if value is not None}
    return ray.remote(kind).options(max_concurrency=CALLS, max_restarts=0, **given).remote(*arguments)


async def ask(reference: Any) -> Any:
    """Return what an actor answers. Raises ``Lost`` if it has died or has failed, ``OutOfSight`` if it may live."""
    import ray

    try:
        return await asyncio.wrap_future(reference.future())
    except ray.exceptions.RayError as e:
        cause = getattr(e, "cause", None) or e
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        kind = OutOfSight if isinstance(e, ray.exceptions.ActorUnavailableError) else Lost
        raise kind(lines[0] if lines else type(cause).__name__) from e


def kill(actor: ActorHandle) -> None:
    """End an actor's process, or its wait for a place."""
    import ray

    ray.kill(actor, no_restart=True)


def needs(scaling: ScalingConfig) -> str:
    """Return in words what a worker needs."""
    parts = {"CPU": scaling.num_cpus_per_worker, "GPU": scaling.num_gpus_per_worker}
    return in_words({**parts, **scaling.additional_resources_per_worker})


def cluster_has() -> str:
    """Return in words what all nodes of the cluster have together."""
    import ray

    try:
        found = ray.cluster_resources()
    except (ray.exceptions.RayError, RuntimeError, OSError):
        return ""
    return in_words({name: amount for name, amount in found.items() if not name.startswith(("node:", "object_store"))})


def in_words(resources: dict[str, float]) -> str:
    """Return resources as text.

    >>> in_words({"CPU": 4.0, "GPU": 0, "memory": 16e9})
    '4 CPU, 16 GB memory'
    """
    from holdfast.words import size_text

    amounts = {n: size_text(a) if n == "memory" else f"{a:g}" for n, a in sorted(resources.items()) if a}
    return ", ".join(f"{amount} {name}" for name, amount in amounts.items())


def draining_nodes() -> dict[str, float]:
    """Return the nodes that Ray will take away, by their ids, and in how many seconds; 0 if it does not know."""
    import ray

    try:
        found = ray._private.state.state.get_draining_nodes() or {}
    except (ray.exceptions.RayError, RuntimeError, OSError):
        return {}  # the head does not answer at the moment; it is asked again soon
    return {node: max(1.0, end / 1000 - time.time()) if end else 0.0 for node, end in found.items()}


def run_context(run: RunConfig, config: dict[str, Any] | None, scaling: ScalingConfig) -> Any:
    """Return what Ray's callbacks get to know of a run."""
    from ray.train import BackendConfig, DataConfig
    from ray.train.v2._internal.execution.context import TrainRunContext

    return TrainRunContext(
        run_config=run,
        train_loop_config=config,
        scaling_config=scaling,
        backend_config=BackendConfig(),
        dataset_config=DataConfig(),
    )
