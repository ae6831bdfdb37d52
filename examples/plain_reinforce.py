"""The training of reinforce.py as people write it without holdfast: ``python examples/plain_reinforce.py``."""

from __future__ import annotations

import torch
from reinforce import TURNS, loss, play
from torch import nn


def main(steps: int = 60) -> None:
    torch.manual_seed(0)

    # --- before
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    average = 0.0
    for step in range(steps):
        loss(policy, torch.arange(32)).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            with torch.no_grad():
                turns = float(play(policy, torch.arange(64))[1].sum(0).mean())
            average = 0.5 * average + 0.5 * turns
            print(f"step {step:3}  the pole stands for {turns:.1f} of {TURNS} turns")
    # --- end


if __name__ == "__main__":
    main()
