"""A small GPT whose replicas are teams: inside a team FSDP2 splits weights, gradients and optimizer state.

Between teams holdfast sums each shard's gradients with the same shard of the others. ``holdfast run -n 4 --team 2
examples/fsdp_teams.py`` trains two teams of two ranks; kill any of the four processes: its team is replaced, and the
hash in the last line is that of one team alone, ``-n 2 --team 2``.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import holdfast

WORDS, LENGTH, WIDTH, LAYERS = 64, 16, 64, 4


class Model(nn.Module):
    """A decoder: embeddings, causal layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(LAYERS)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.place(torch.arange(words.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def counting(samples: int = 512) -> TensorDataset:
    """Sequences that count in steps of their own."""
    draw = torch.Generator().manual_seed(0)
    start, by = (torch.randint(WORDS, (samples, 1), generator=draw) for _ in range(2))
    return TensorDataset((start + by * torch.arange(LENGTH + 1)) % WORDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", help="a folder to resume from")
    options = parser.parse_args()

    dist.init_process_group("gloo")  # of the team: RANK, WORLD_SIZE and MASTER_PORT are its own
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    loop = holdfast.Loop(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        data=counting(),
        global_batch=32,
        micro_batch=8,
        checkpoint=options.checkpoint,
    )
    for step in loop.steps(options.steps):
        for batch in step.micro_batches():  # every rank of the team gets the same batch
            (words,) = loop.team.part(batch)  # and computes its part of it
            step.backward(cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()))
        made = step.commit(clip_norm=1.0)
        if made and made.is_first_worker and made.number % 20 == 0:
            print(f"step {made.number:4}  loss {made.loss:.3f}  {made.workers} teams of {loop.team.size}")
    sha256 = loop.sha256()
    if loop.is_first_worker:
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
