"""A LightningModule whose Trainer survives: digits, logs, validation, the best checkpoint, early stopping.

In one process: ``python examples/lightning_module.py``. On workers that may be killed: ``holdfast run -n 3 --preload
lightning.pytorch examples/lightning_module.py``. The last line, a hash, is the same for both.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from digits import Digits, accuracy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
except ImportError as e:
    raise SystemExit("this example needs Lightning: pip install lightning") from e

from holdfast.integrations.lightning import HoldfastStrategy


class Reader(pl.LightningModule):
    """Reads digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(80, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, digits = batch
        output = self.net(images)
        loss = cross_entropy(output, digits)
        self.log_dict({"loss": loss, "accuracy": accuracy(output, digits).mean()})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, digits = batch
        self.log("right", accuracy(self.net(images), digits).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7), "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--checkpoint", help="folder to resume from and to save to")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    strategy = HoldfastStrategy(global_batch=64, checkpoint=arguments.checkpoint)
    best = ModelCheckpoint("lightning_best", monitor="right", mode="max")
    trainer = pl.Trainer(
        strategy=strategy, max_epochs=3, max_steps=arguments.steps, gradient_clip_val=1.0, logger=strategy.logger(),
        callbacks=[best, EarlyStopping("right", mode="max", patience=5)], log_every_n_steps=1, accelerator="cpu",
        val_check_interval=4,
    )  # fmt: skip
    train = DataLoader(Digits(range(1000)), batch_size=16, shuffle=True)
    trainer.fit(Reader(), train, DataLoader(Digits(range(4000, 4200)), batch_size=100))

    sha256 = strategy.loop.sha256(weights_only=True)  # the rest has names of files, which may be there already
    if trainer.is_global_zero:
        print(f"best: {float(best.best_model_score or 0):.1%} of the test digits right, {best.best_model_path}")
        print(f"sha256 {sha256}")


if __name__ == "__main__":
    main()
