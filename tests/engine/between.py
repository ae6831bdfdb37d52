"""Jobs whose layers give each other all that layers may give each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.engine.pipelines import WIDTH, Job, Layer, fill, linear, mlp

W = WIDTH


def between(*functions: Callable[..., Any], **job: Any) -> Job:
    """Layers that each have a Linear, and do with it what the functions say."""
    return Job(layers=lambda: [Layer(function, linear()) for function in functions], **job)


def image(x: Tensor) -> Tensor:
    return x.view(-1, 1, 2, 3)


def images(first: Callable[[Tensor], Tensor]) -> list[nn.Module]:
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    last = Layer(lambda x, m: m(x.flatten(1)), linear(8 * 6, W))
    return [Layer(lambda x, m: first(m(image(x))), conv(1, 8)), conv(8, 8), nn.GroupNorm(2, 8), conv(8, 8), last]


def changing(x: Tensor, m: nn.Module) -> Any:
    """Another number of tensors, and other shapes, for other samples."""
    y = m(x)
    kind = int(x.sum().abs() * 10) % 4
    return [(y,), (y, y[:, :2].contiguous(), 7), {"a": y, "b": [y * 2, y[:0]]}, (y.unsqueeze(0), "wide")][kind]


def together(x: Any) -> Tensor:
    """What ``changing`` has made, as one tensor again."""
    if isinstance(x, dict):
        return x["a"] + x["b"][0] + x["b"][1].sum()
    return x[0].view(-1, W) + (x[1].sum() if len(x) == 3 else 0)


def uses_some(x: tuple[Tensor, ...], m: nn.Module) -> Tensor:
    used, _, _, detached = x
    return m(used + detached.detach())


def write(x: Tensor, m: nn.Module) -> Tensor:
    x.mul_(1.25)
    x[:, 0] = 0.5
    x.view(-1)[1::3].add_(1.0)
    return m(x)


BETWEEN: dict[str, Callable[[], Job]] = {
    "tuples": lambda: between(lambda x, m: (m(x), x), lambda x, m: (x[1] + m(x[0]), x[0]), lambda x, m: m(x[0] * x[1])),
    "dicts": lambda: between(
        lambda x, m: {"z": m(x), "a": {"deep": [x, (x * 2,)]}, 3: 0.1},
        lambda x, m: {3: x["a"]["deep"][1][0] * x[3], "h": m(x["z"])},
        lambda x, m: m(x["h"]) + x[3],
    ),
    "masks and integers": lambda: between(
        lambda x, m: (m(x), x > 0, torch.arange(W), torch.tensor(3, dtype=torch.uint8), None, True, "word", 2.5),
        lambda x, m: (m(x[0]).masked_fill(x[1], 0.5)[:, x[2].flip(0)] * x[3], *x[1:]),
        lambda x, m: m(x[0]) * x[7] if x[5] is True and x[6] == "word" and x[4] is None else None,
    ),
    "numbers as they are": lambda: between(
        lambda x, m: (m(x), [float("inf"), -0.0, 1e-310, 2**70], b"\x00\xff", torch.bfloat16, x.shape),
        lambda x, m: m(x[0].view(x[4])) + (1.0 if x[1] == [float("inf"), -0.0, 1e-310, 2**70] else 0.0),
        lambda x, m: m(x),
    ),
    "the same tensor twice": lambda: between(
        lambda x, m: (m(x),) * 2,
        lambda x, m: m((x[0] * 1.3).tanh() + (x[1] * 0.7).sin() + x[0].exp() * 0.01 + x[1].cos()),
        lambda x, m: m(x),
    ),
    "the same tensor twice, not dense": lambda: between(
        lambda x, m: (torch.cat([m(x), m(x)], 1)[:, :W],) * 2,
        lambda x, m: m((x[0] * 1.3).tanh() + (x[1] * 0.7).sin() + x[0].exp() * 0.01 + x[1].cos()),
        lambda x, m: m(x),
    ),
    "the same tensor twice, written into": lambda: between(
        lambda x, m: (m(x),) * 2, lambda x, m: m(x[0].add_(1.0) * x[1]), lambda x, m: m(x)
    ),
    "a tensor and a view of it, written into": lambda: between(
        lambda x, m: (lambda h: (h, h.view(-1)))(m(x)),
        lambda x, m: m(x[0].add_(1.0) * x[1].view_as(x[0])),
        lambda x, m: m(x),
    ),
    "a tensor and the same detached, written into": lambda: between(
        lambda x, m: (lambda h: (h.detach(), h))(m(x)),
        lambda x, m: m(x[0].add_(1.0) * x[1].tanh()),
        lambda x, m: m(x),
    ),
    "a view before the whole": lambda: between(
        lambda x, m: (lambda h: (h[:1], h, h.t()))(m(x)),
        lambda x, m: m(x[0].mul_(2.0) + x[1] * x[2].t()),
        lambda x, m: m(x),
    ),
    "changing shapes and numbers of tensors": lambda: between(
        changing,
        lambda x, m: changing(together(x), m),
        lambda x, m: m(together(x)),
        global_batch=12,
        steps=3,
        clip_norm=0.5,
    ),
    "numbers that change each time": lambda: between(
        lambda x, m: (m(x), float(x.sum()), str(x.shape)), lambda x, m: (m(x[0]), x[1]), lambda x, m: m(x[0]) * x[1]
    ),
    "empty tensors and single numbers": lambda: between(
        lambda x, m: (m(x), x[:0], m(x).sum(), torch.zeros(0, 3, 0), m(x)[:, :0]),
        lambda x, m: (m(x[0]) * x[2].tanh() + x[1].sum() + x[4].sum(), x[3]),
        lambda x, m: m(x[0]) + x[1].sum(),
    ),
    "transposed": lambda: between(
        lambda x, m: m(x).t(), lambda x, m: m(x.t()).unsqueeze(0).permute(2, 0, 1), lambda x, m: m(x[:, 0].t())
    ),
    "expanded": lambda: between(
        lambda x, m: m(x).mean(0, keepdim=True).expand(len(x), W),
        lambda x, m: m(x).sum(1, keepdim=True).expand(-1, W),
        lambda x, m: m(x),
    ),
    "not aligned, with gaps": lambda: between(
        lambda x, m: torch.cat([m(x), m(x)], 1)[:, 1 : W + 1],
        lambda x, m: torch.cat([m(x).view(-1), x.reshape(-1)])[1 : 1 + x.numel()].view(-1, W),
        lambda x, m: m(x),
    ),
    "with gaps, and summed": lambda: Job(
        layers=lambda: [
            Layer(lambda x, m: m(x)[:, ::2], linear(W, 128)),
            Layer(lambda x, m: m(x * x.sum(1, keepdim=True)), linear(64, W)),
            linear(),
        ],
        clip_norm=0.3,
    ),
    "channels last": lambda: Job(layers=lambda: images(lambda x: x.contiguous(memory_format=torch.channels_last))),
    "weights that lie in another order": lambda: Job(
        layers=lambda: [
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for layer in images(lambda x: x.contiguous(memory_format=torch.channels_last))
        ],
        clip_norm=0.1,
    ),
    "written into": lambda: between(lambda x, m: m(x), write, write, lambda x, m: m(x.clamp_(-2, 2))),
    "written into by layers without parameters": lambda: Job(
        layers=lambda: [linear(), nn.ReLU(inplace=True), linear(), Layer(lambda x: x.add_(1.0)), nn.SiLU(inplace=True)]
    ),
    "returned as it came": lambda: Job(
        layers=lambda: [
            nn.Identity(),
            linear(),
            nn.Identity(),
            Layer(lambda x: (x, x)),
            Layer(lambda x: x[1]),
            linear(),
        ]
    ),
    "carried past two layers": lambda: between(
        lambda x, m: (m(x), m(x).tanh()),
        lambda x, m: (m(x[0]), x[1]),
        lambda x, m: (m(x[0]) + x[1].sin(), x[1]),
        lambda x, m: m(x[0]) * x[1].cos() + x[1],
    ),
    "only some get a gradient": lambda: between(
        lambda x, m: (m(x), m(x) * 2, m(x).detach(), m(x).exp()), uses_some, lambda x, m: m(x), clip_norm=0.3
    ),
    "its gradient comes from its own stage": lambda: between(
        lambda x, m: (lambda h: (h, h.t().contiguous()))(m(x)),
        lambda x, m: (m(x[1].t()), x[0].detach()),
        lambda x, m: m(x[0] + x[1]),
        data=TensorDataset(fill(torch.empty(50, W), 1), fill(torch.empty(50, W), 2)),
        global_batch=50,
        micro_batch=25,
        steps=1,
    ),
    "some micro-batches give no gradient": lambda: between(
        lambda x, m: m(x) if x.sum() > 0 else m(x).detach(), lambda x, m: m(x), lambda x, m: m(x)
    ),
    "parameters as values": lambda: between(
        lambda x, m: (m(x), m.weight), lambda x, m: (m(x[0] @ x[1]), x[1]), lambda x, m: m(x[0]) @ x[1].t()
    ),
    "frozen in front": lambda: Job(
        layers=lambda: [linear().requires_grad_(False), nn.Tanh(), linear().requires_grad_(False), linear(), linear()]
    ),
    "frozen behind": lambda: Job(layers=lambda: [linear(), nn.Tanh(), linear().requires_grad_(False), nn.Tanh()]),
    "float64 and bfloat16": lambda: Job(
        layers=lambda: [
            linear(dtype=torch.float64),
            Layer(lambda x, m: m(x.bfloat16()), linear(dtype=torch.bfloat16)),
            Layer(lambda x, m: (m(x.half()), x), linear(dtype=torch.float16)),
            Layer(lambda x, m: m(x[0].float() + x[1]), linear()),
        ],
        data=TensorDataset(fill(torch.empty(13, W, dtype=torch.float64), 1), fill(torch.empty(13, W), 2)),
        clip_norm=0.5,
    ),
    "autocast": lambda: Job(layers=mlp, autocast=torch.bfloat16, global_batch=12),
    "autocast, carried past layers": lambda: between(  # (threads share its cache: a weight may be used once only)
        lambda x, m: (lambda h: (h, h.float(), h.float() * 3))(m(x)),
        lambda x, m: (m(x[0]), *x[1:]),
        lambda x, m: m(x[0]) + x[1] @ x[2].t() @ x[1] + x[1] @ x[1].t() @ x[2],
        autocast=torch.bfloat16,
        clip_norm=0.3,
    ),
    "complex and conjugated": lambda: between(
        lambda x, m: torch.fft.fft(m(x)).conj(),
        lambda x, m: (x.imag, m(torch.view_as_real(x.resolve_conj()).sum(-1))),
        lambda x, m: m(x[0] + x[1]),
    ),
    "a gradient checkpoint": lambda: between(
        lambda x, m: checkpoint(m, x, use_reentrant=False),
        lambda x, m: checkpoint(lambda y: m(y).tanh(), x, use_reentrant=False),
        lambda x, m: m(x),
    ),
    "text in, embedded": lambda: Job(
        layers=lambda: [
            nn.Embedding(11, W),
            nn.LayerNorm(W),
            nn.LSTM(W, 5, batch_first=True),
            Layer(lambda x, m: m(x[0][:, -1] + x[1][1][-1]), linear(5, 11)),
        ],
        data=TensorDataset(torch.arange(78).view(13, 6) % 11, torch.arange(13) % 11),
        loss=nn.functional.cross_entropy,
    ),
}
