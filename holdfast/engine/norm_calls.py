"""The calls of torch's normalisations that would change running statistics, and what they measure instead.

``nn.BatchNorm2d`` and its like all end in ``F.batch_norm`` or ``F.instance_norm``, which write into the running
statistics that they are given. Here these calls get empty statistics and a momentum of one. After the call they hold
exactly the mean and the unbiased variance of the batch, and the running ones are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from holdfast.engine.measured import Measurement

# Both functions take these, in this order. The sixth says whether the batch's own statistics are used.
_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_SAME = {"use_input_stats": "training"}  # names of ``instance_norm`` that differ
NARROW = (torch.bfloat16, torch.float16)  # inputs whose variances torch adds up in 32 bits


class NormCalls(TorchFunctionMode):
    """While it is entered, spares the running statistics whose means are ``known`` (ids), and tells ``taken``.

    >>> mean, var = torch.zeros(1), torch.ones(1)
    >>> with NormCalls({id(mean)}, lambda measured: print(measured.values, measured.momentum)):
    ...     _ = functional.batch_norm(torch.tensor([[1.0], [3.0]]), mean, var, training=True, momentum=0.1)
    [tensor([2.]), tensor([2.])] 0.1
    >>> mean, var
    (tensor([0.]), tensor([1.]))
    """

    def __init__(self, known: Collection[int], taken: Callable[[Measurement], None]) -> None:
        super().__init__()
        self._known = known
        self._taken = taken

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in (functional.batch_norm, functional.instance_norm):
            return func(*args, **(kwargs or {}))
        call = dict(zip(_NAMES, args, strict=False))
        call |= {_SAME.get(name, name): value for name, value in (kwargs or {}).items()}
        mean, var = call.get("running_mean"), call.get("running_var")
        by_default = func is functional.instance_norm  # it uses the batch's statistics unless told not to
        if mean is None or var is None or id(mean) not in self._known or not call.get("training", by_default):
            return func(*args, **(kwargs or {}))
        own, momentum = [torch.zeros_like(mean), torch.zeros_like(var)], call.get("momentum", 0.1)
        rest = [call.get("weight"), call.get("bias"), True, 1.0, call.get("eps", 1e-5)]
        output = func(call["input"], *own, *rest)
        narrow = call["input"].dtype in NARROW
        self._taken(Measurement(own, float(momentum), 0, narrow))
        return output
