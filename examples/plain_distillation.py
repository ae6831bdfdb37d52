"""The training of distillation.py as people write it without holdfast: ``python examples/plain_distillation.py``."""

from __future__ import annotations

import torch
from distillation import CLASSES, FEATURES, HEAT, Points, mlp
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader


def main(steps: int = 60) -> None:
    torch.manual_seed(0)

    # --- before
    teacher = mlp(FEATURES, 256, 256, CLASSES).requires_grad_(False).eval()
    student = mlp(FEATURES, 32, CLASSES)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    loader = DataLoader(Points(range(4000)), batch_size=64, shuffle=True)
    for step, batch in zip(range(steps), loader, strict=False):
        mine = student(batch["x"])
        soft = kl_div(
            log_softmax(mine / HEAT, -1),
            log_softmax(teacher(batch["x"]) / HEAT, -1),
            log_target=True,
            reduction="batchmean",
        )
        loss = 0.5 * cross_entropy(mine, batch["label"]) + 0.5 * HEAT**2 * soft
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    # --- end


if __name__ == "__main__":
    main()
