"""The training of nanogpt.py as people write it without holdfast: ``python examples/plain_nanogpt.py``."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from nanogpt import PATIENCE, TOTAL, Crops, cosine, decayed, prepare
from torch import nn
from torch.utils.data import DataLoader

from holdfast.demo.gpt import GPTConfig, gpt_layers, next_byte_loss


def main(steps: int = TOTAL, folder: Path = Path("nanogpt")) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    config = GPTConfig(depth=2)
    training, held_out = prepare(folder)

    # --- before
    model = nn.Sequential(*gpt_layers(config))
    optimizer = decayed(list(model.named_parameters()))
    loader = DataLoader(Crops(training, window=config.window, length=4096), batch_size=16)
    test = DataLoader(Crops(held_out, window=config.window, length=32), batch_size=16)
    best, bad = math.inf, 0
    for step, (x, y) in zip(range(steps), loader, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_byte_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20:
            continue
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            value = float(torch.stack([next_byte_loss(model(x), y) for x, y in test]).mean())
        model.train()
        print(f"step {step:3}  loss {loss.item():.4f}, held out {value:.4f}")
        if value < best:
            best, bad = value, 0
            torch.save(model.state_dict(), folder / "best.pt")
        else:
            bad += 1
            if bad >= PATIENCE:
                break
    # --- end


if __name__ == "__main__":
    main()
