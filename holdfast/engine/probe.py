"""The probe: a small fixed computation, whose bits tell kinds of processors apart.

``torch.backends.cpu.get_cpu_capability()`` names the kernels of torch itself. MKL and oneDNN, which compute matrix
products and convolutions, choose theirs by the micro-architecture, so equal capabilities do not mean equal bits. The
probe asks for the bits instead. It draws no random number, and changes no setting of torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

DIGITS = 8  # hexadecimal digits of a result: 32 bits, enough for differences that nobody contrives
KNOWN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes that operators on a CPU compute in

# Operators with the shapes of their inputs. Sizes that are no multiple of a vector's are among them: kernels treat the
# rest of a row differently. Several sizes of products are, because libraries choose a kernel by the size.
Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]
CASES: tuple[Case, ...] = (
    (torch.matmul, ((1, 64), (64, 64))),
    (torch.matmul, ((8, 32), (32, 16))),
    (torch.matmul, ((33, 65), (65, 17))),
    (torch.matmul, ((64, 256), (256, 64))),
    (torch.matmul, ((4, 16, 32), (4, 32, 16))),
    (functional.linear, ((4, 8, 64), (32, 64), (32,))),
    (functional.conv2d, ((2, 4, 9, 9), (8, 4, 3, 3), (8,))),
    (functional.scaled_dot_product_attention, ((1, 2, 16, 16), (1, 2, 16, 16), (1, 2, 16, 16))),
    (lambda x, w, b: functional.layer_norm(x, (96,), w, b), ((8, 96), (96,), (96,))),
    (lambda x: functional.group_norm(x, 2), ((3, 8, 7),)),
    (lambda x: x.softmax(-1), ((5, 101),)),
    (lambda x: x.log_softmax(-1), ((5, 101),)),
    (functional.gelu, ((777,),)),
    (lambda x: functional.gelu(x, approximate="tanh"), ((777,),)),
    (functional.silu, ((777,),)),
    (torch.exp, ((777,),)),
    (torch.tanh, ((777,),)),
    (torch.sigmoid, ((777,),)),
    (torch.sin, ((777,),)),
    (lambda x: (x.abs() + 0.1).log(), ((777,),)),
    (lambda x: (x.abs() + 0.1).rsqrt(), ((777,),)),
    (lambda x: (x.abs() + 0.1) ** 0.7, ((777,),)),
    (torch.sum, ((1234,),)),
    (lambda x: x.mean(0), ((33, 96),)),
    (lambda x: x.var(-1), ((33, 96),)),
    (torch.linalg.vector_norm, ((1234,),)),
)


def probe_passes(device: torch.device, dtypes: Iterable[torch.dtype]) -> str:
    """Return a digest of forward and backward passes of usual operators on a device, in these dtypes.

    Two workers with different digests compute different gradients. Equal digests make equal ones likely, and no more:
    a model may use an operator or a size that is not tried.
    """
    return _digest("passes", device, dtypes)


def probe_update(device: torch.device, dtypes: Iterable[torch.dtype], *, clipped: bool) -> str:
    """Return a digest of the arithmetic of SGD and AdamW on a device, in these dtypes; ``clipped``: of norms too.

    Two workers with different digests make different weights of the same gradients, so their replicas drift apart.
    """
    return _digest("clipped update" if clipped else "update", device, dtypes)


def _digest(kind: str, device: torch.device, dtypes: Iterable[torch.dtype]) -> str:
    known = sorted({dtype for dtype in dtypes if dtype in KNOWN} or {torch.float32}, key=str)
    return _computed(kind, device, tuple(known), torch.get_num_threads(), torch.get_float32_matmul_precision())


@lru_cache(maxsize=64)
def _computed(kind: str, device: torch.device, dtypes: tuple[torch.dtype, ...], *_settings: object) -> str:
    """Compute a probe once for each process and settings: a process may have many runs."""
    digest = hashlib.sha256()
    with torch.autocast(device.type, enabled=False):
        for dtype in dtypes:
            for tensor in _passes(device, dtype) if kind == "passes" else _update(device, dtype, kind != "update"):
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


def _passes(device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield outputs and gradients of all cases. An operator that the device lacks in a dtype gives nothing."""
    for number, (operator, shapes) in enumerate(CASES):
        inputs = [_numbers(f"{number} {n}", shape, device, dtype) for n, shape in enumerate(shapes)]
        try:
            with torch.enable_grad():
                output = operator(*[x.requires_grad_() for x in inputs])
                gradient = _numbers(f"{number} gradient", tuple(output.shape), device, dtype)
                results = [output, *torch.autograd.grad(output, inputs, gradient)]
        except RuntimeError:
            continue
        yield from results


@torch.no_grad()
def _update(device: torch.device, dtype: torch.dtype, clipped: bool) -> Iterator[Tensor]:
    """Yield what two steps of SGD with momentum and of AdamW make of a parameter, as torch.optim computes them."""
    sgd, adam, momentum, mean, square = (_numbers(f"slot {n}", (333,), device, dtype) for n in range(5))
    square.abs_()
    for step in range(1, 3):
        gradient = _numbers(f"step {step}", (333,), device, dtype)
        if clipped:
            norm = torch.linalg.vector_norm(gradient)
            yield norm
            gradient.mul_((1.0 / (norm.double() + 1e-6)).clamp(max=1.0).to(dtype))
        momentum.mul_(0.9).add_(gradient.add(sgd, alpha=0.01), alpha=0.9)
        sgd.add_(momentum, alpha=-0.1)
        adam.mul_(1 - 1e-3 * 0.01)
        mean.lerp_(gradient, 1 - 0.9)
        square.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        denominator = (square.sqrt() / math.sqrt(1 - 0.999**step)).add_(1e-8)
        adam.addcdiv_(mean, denominator, value=-1e-3 / (1 - 0.9**step))
    yield from (sgd, adam, momentum, mean, square)


def _numbers(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return fixed numbers, between 0.125 and 2 or negative, from a hash of their name: no generator is touched.

    All their bits are random. Rounder numbers have exact sums, in which the order of adding does not show.
    """
    raw = hashlib.shake_256(f"holdfast probe {name}".encode()).digest(8 * math.prod(shape))
    words = np.frombuffer(raw, dtype="<u8")
    exponents = (words >> np.uint64(52) & np.uint64(3)) + np.uint64(1020)
    bits = words & np.uint64(0x800F_FFFF_FFFF_FFFF) | exponents << np.uint64(52)  # sign and fraction are the hash's
    return torch.from_numpy(bits.view(np.float64).reshape(shape)).to(device=device, dtype=dtype, copy=True)
