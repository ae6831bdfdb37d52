"""A real Ray on this machine, for tests: a head and raylets, each at a loopback address of its own."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.processes import parent_of

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'holdfast[ray]'")
HEAD = 2  # 127.0.0.2: Ray takes 127.0.0.1 for the address of the network


class RayCluster:
    """A head without processors and nodes with one each. The head has the driver, and is never lost.

    ``end`` ends every process: Ray's own of each node, and with them actors, agents and workers.
    """

    def __init__(self, nodes: int, **head: Any) -> None:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # 15 else: others would starve it
        import ray
        from ray.cluster_utils import Cluster

        self._last = HEAD
        self._cluster = Cluster()
        self.add(cpus=0)
        for _ in range(nodes):
            self.add()
        ray.init(address=self._cluster.address, log_to_driver=False)

    @property
    def address(self) -> str:
        """The address of the head, for RAY_ADDRESS."""
        return str(self._cluster.address)

    def add(self, *, cpus: int = 1) -> Any:
        """Start one more node, and return it."""
        address, self._last = f"127.0.0.{self._last}", self._last + 1
        return self._cluster.add_node(num_cpus=cpus, node_ip_address=address, include_dashboard=False)

    def lose(self, node: Any) -> None:
        """Kill a node's raylet, as if its machine had lost its power. The processes on it end with it."""
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: str, *, seconds: int) -> bool:
        """Announce that a node, known by its id, will be preempted; return whether its raylet has agreed."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        end = int(1000 * (time.time() + seconds))
        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        agreed, _ = GcsClient(address=self._cluster.address).drain_node(node, reason, "a test", end)
        return bool(agreed)

    def node_of(self, pid: int) -> str:
        """Return the id of the node that a process of Ray is on: its parent is the node's raylet."""
        words = Path(f"/proc/{parent_of(pid)}/cmdline").read_bytes().decode().split("\0")
        (found,) = [word.partition("=")[2] for word in words if word.startswith("--node_id=")]
        return found

    def end(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()
