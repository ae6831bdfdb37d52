"""TLS for tensors: Gloo has it in some builds of torch, and it must never be missing where it was asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from holdfast.cluster.tls import OPTIONS, TlsSettings
from holdfast.errors import UsageError

TRANSPORT = "GLOO_DEVICE_TRANSPORT"  # torch's own variable
_FILES = {"PKEY": "key", "CERT": "cert", "CA_FILE": "ca"}


def encrypted_tensors(
    tls: TlsSettings | None, *, asked: bool, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that make the workers' Gloo encrypt; none if nobody has asked for it.

    It is asked for by ``--tls-tensors``, or by torch's own variable in the environment. Raises ``UsageError`` if it
    cannot be had. (That it can be had is untested: no torch here has it.)
    """
    own = environment.get(TRANSPORT) == "TCP_TLS"
    if not asked and not own:
        return {}
    if asked and tls is None:
        raise UsageError("--tls-tensors needs certificates", hint=f"give {OPTIONS}")
    files = (
        {} if tls is None else {f"{TRANSPORT}_TCP_TLS_{word}": getattr(tls, field) for word, field in _FILES.items()}
    )
    wanted = {TRANSPORT: "TCP_TLS", **(files if asked else {})}
    _try(wanted)
    return wanted


def _try(wanted: dict[str, str]) -> None:
    """Make a Gloo device with these variables, which this process keeps. Raises ``UsageError`` if that fails."""
    import torch.distributed as dist  # takes a second, which only those pay who ask

    os.environ.update(wanted)
    try:
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    except RuntimeError as e:
        raise UsageError(
            f"this torch cannot encrypt tensors: {str(e).splitlines()[0]}",
            hint="leave --tls-tensors and GLOO_DEVICE_TRANSPORT away and use a VPN, as docs/security.md shows",
        ) from e
