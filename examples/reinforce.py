"""REINFORCE: a policy learns to balance a pole, from rollouts that it plays itself inside the loss.

A sample is the number of an episode. The loss plays a micro-batch of episodes with the policy as it is now, and returns
the policy gradient's loss. Random numbers belong to (step, micro-batch), so a step that is done again plays the same
episodes, whoever plays them. In one process: ``python examples/reinforce.py``. On workers that may be killed:
``holdfast run -n 3 examples/reinforce.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import holdfast

TURNS, DISCOUNT = 60, 0.98  # turns of an episode, and what a reward one turn later is worth


class Poles:
    """Cart-poles of a whole micro-batch at once: position, speed, angle, and the angle's speed of each."""

    def __init__(self, count: int) -> None:
        self.state = 0.1 * torch.rand(count, 4) - 0.05

    def push(self, right: Tensor) -> Tensor:
        """Push each cart to the left (0) or right (1) for one turn; return which poles still stand."""
        _, speed, angle, turning = self.state.unbind(1)
        force = 20.0 * right - 10.0
        common = (force + 0.05 * turning**2 * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * common) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        move = common - 0.05 * bend * angle.cos() / 1.1
        steps = torch.stack([speed, move, turning, bend], 1)
        self.state = self.state + 0.02 * steps
        return (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < 0.21)


def play(policy: nn.Module, episodes: Tensor) -> tuple[Tensor, Tensor]:
    """Play episodes; return the log-probabilities of all actions, and the rewards: 1 for each turn a pole stands."""
    poles, standing = Poles(len(episodes)), torch.ones(len(episodes))
    logs, rewards = [], []
    for _ in range(TURNS):
        actions = torch.distributions.Categorical(logits=policy(poles.state.detach()))
        chosen = actions.sample()
        logs.append(actions.log_prob(chosen) * standing)
        standing = standing * poles.push(chosen.float())
        rewards.append(standing)
    return torch.stack(logs), torch.stack(rewards)


def loss(policy: nn.Module, episodes: Tensor) -> Tensor:
    logs, rewards = play(policy, episodes)
    returns, total = [], torch.zeros(len(episodes))
    for reward in rewards.flip(0):
        total = reward + DISCOUNT * total
        returns.append(total)
    advantage = torch.stack(returns).flip(0)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    return -(logs * advantage).sum(0).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    run = holdfast.Run(
        model=nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)),
        loss=loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        data=range(10_000),  # numbers of episodes
        global_batch=32,
        micro_batch=8,
        clip_norm=1.0,
        checkpoint=arguments.checkpoint,
        state={"average": 0.0},
    )
    test = range(64)
    for step in run.steps(arguments.steps):
        if step.number % 10 == 9:
            turns = run.evaluate(test, lambda policy, episodes: play(policy, episodes)[1].sum(0).mean())
            run.state["average"] = 0.5 * run.state["average"] + 0.5 * turns
            if step.is_first_worker:
                print(f"step {step.number:3}  the pole stands for {turns:.1f} of {TURNS} turns")
    sha256 = run.sha256()
    if run.is_first_worker:
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
