"""SelSync in a loop of your own, without a Run: torchrun --nproc-per-node 4 own_loop.py"""

import torch
import torch.distributed as dist
from digits import Digits, accuracy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import holdfast
from holdfast.data.partition import SelDP, batches

STEPS, BATCH = 300, 16


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    seen = [nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.GELU()]
    model = nn.Sequential(*seen, nn.Flatten(), nn.Linear(32 * 5 * 4, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = Digits(range(4000)), Digits(range(4000, 5000))
    order = batches(SelDP(size=len(train)), worker=rank, workers=size, batch=BATCH)
    loader = iter(DataLoader(train, batch_sampler=order))
    with holdfast.SelSync(target=0.1, warmup=10).around(model, optimizer) as replicas:
        for step in range(STEPS):
            images, digits = next(loader)
            cross_entropy(model(images), digits).backward()
            optimizer.step()
            optimizer.zero_grad()
            if replicas.last.synchronised and rank == 0 and step >= 10:
                print(f"step {step}: {replicas.last.reason}; replicas were {replicas.last.distance:.2f} apart")
    # At the end of the block all replicas are equal.
    images, digits = next(iter(DataLoader(test, batch_size=len(test))))
    if rank == 0:
        total = replicas.totals
        right = float(accuracy(model(images), digits))
        quiet = f"{total.lssr:.0%} of the steps without a word, {total.sent} bytes sent"
        print(f"{right:.1%} of the test digits right; {quiet}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
