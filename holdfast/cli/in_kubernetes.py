"""What ``holdfast run`` takes from Kubernetes: where the first pod of several is, whose name is like its own."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping

PORT = 29700  # of the first pod: nothing else listens in a pod of its own
PAUSE = 0.5  # seconds between two questions to the cluster's DNS


def endpoint_of(environment: Mapping[str, str], name: str) -> str:
    """Return where the first pod of a StatefulSet or an Indexed Job listens; "" outside of one.

    ``name``: this pod's full name, as ``socket.getfqdn`` tells it. It has dots if the pods have a headless Service.

    >>> endpoint_of({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "train-3.train.ml.svc.cluster.local")
    'train-0.train.ml.svc.cluster.local:29700'
    >>> endpoint_of({}, "node-3.example.org")
    ''
    """
    found = re.fullmatch(r"([^.]+)-\d+\.(.+)", name) if "KUBERNETES_SERVICE_HOST" in environment else None
    return "" if found is None else f"{found[1]}-0.{found[2]}:{PORT}"


def wait_for_name(environment: Mapping[str, str], endpoint: str, patience: float) -> None:
    """Wait until the endpoint's name is known, for ``patience`` seconds: pods start before the DNS has their names.

    Outside of Kubernetes a name that is not known is a mistake, and said at once.
    """
    host = endpoint.rpartition(":")[0]
    end = time.monotonic() + (patience if host and "KUBERNETES_SERVICE_HOST" in environment else 0.0)
    while time.monotonic() < end:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError:
            time.sleep(PAUSE)
