"""Trains on Ray, whose nodes come and go: python ray_trainer.py, or ray job submit -- python ray_trainer.py"""

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.integrations.ray import HoldfastTrainer, checkpoint_folder


def train(config: dict[str, Any]) -> str:
    """Runs on every worker."""
    torch.manual_seed(0)
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3].abs()
    layers = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)]
    run = holdfast.Run(
        layers=layers,
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=config["lr"]),
        data=TensorDataset(x, y),
        global_batch=64,
        micro_batch=16,
        checkpoint=holdfast.Checkpoints(folder=checkpoint_folder(), every=100),
    )
    for step in run.steps(config["steps"]):
        run.log({"deviation": step.loss**0.5})  # a row of result.metrics_dataframe, beside the step's own values
    return run.sha256()  # the first worker's becomes result.return_value


def main() -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    trainer = HoldfastTrainer(
        train,
        train_loop_config={"lr": 3e-3, "steps": int(os.environ.get("STEPS", "300"))},
        scaling_config=ScalingConfig(num_workers=(1, 4)),  # begins with one; Ray may place up to three more
        run_config=RunConfig(
            name="example",
            storage_path=os.environ.get("STORAGE", "~/ray_results"),  # a folder that all nodes share
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    loss, step = result.metrics["loss"], result.metrics["step"]
    print(f"loss {loss:.4f} after step {step + 1}, saved in {result.checkpoint.path}")
    print(f"sha256 of weights and optimizer state: {result.return_value}")


if __name__ == "__main__":
    main()
