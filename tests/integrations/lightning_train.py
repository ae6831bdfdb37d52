"""The script of the tests of Lightning: a module, and what a ``Trainer`` does with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.integrations import programs
from tests.integrations.programs import CLIP, EPOCHS, GLOBAL_BATCH, MICRO_BATCH, RATE

FOLDER = os.environ.get("FOLDER", "files")


class Module(pl.LightningModule):
    """Logs in all ways, and counts how often its hooks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = programs.made()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", x.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log_dict({"index": float(batch_idx), "tokens": 2.0})  # the second is a name of the journal's own
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=RATE)
        return [optimizer], [{"scheduler": programs.falling(optimizer), "interval": "step"}]


class Log(pl.Callback):
    """Keeps what the trainer shows after each step, and waits for joiners if the test wants them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())}
        self.seen.append([trainer.current_epoch, batch_idx, trainer.global_step, float(outputs["loss"]), shown])
        programs.wait_if_wanted(trainer.strategy.loop, trainer.strategy.last.number)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append({name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())})


def as_fit() -> None:
    from holdfast.integrations.lightning import HoldfastStrategy

    strategy = HoldfastStrategy(global_batch=GLOBAL_BATCH, checkpoint=programs.kept())
    best = ModelCheckpoint(monitor="val", save_top_k=2, save_last=True, every_n_train_steps=2)
    log = Log()
    patience = int(os.environ.get("PATIENCE", "100"))
    trainer = pl.Trainer(
        strategy=strategy, max_epochs=EPOCHS, max_steps=int(os.environ.get("STEPS", "-1")), gradient_clip_val=CLIP,
        logger=[strategy.logger(), pl.loggers.TensorBoardLogger(FOLDER)], log_every_n_steps=1,
        callbacks=[best, log, EarlyStopping("val", mode="max", patience=patience)], enable_progress_bar=False,
        default_root_dir=FOLDER, val_check_interval=2, accelerator="cpu",
    )  # fmt: skip
    loader = DataLoader(programs.samples(), batch_size=MICRO_BATCH, shuffle=True)
    trainer.fit(Module(), loader, DataLoader(programs.samples(10), batch_size=4))
    programs.report(
        strategy.loop,
        seen=log.seen,
        steps=trainer.global_step,
        best=float(best.best_model_score).hex(),
        files=sorted(str(path.relative_to(FOLDER)) for path in Path(best.dirpath).iterdir()),
    )


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clips(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class ReturnsNothing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class LogsTexts(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("several", torch.ones(3))


class Gathers(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(batch[0])


class Backward(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.backward()
        return loss


class StepsByHand(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.optimizers[0].step()


class Skips(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def refusals() -> dict[str, str]:
    """What is said of each thing that cannot be honoured, and of each bad use, in runs without an agent."""
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        del os.environ[name]
    trainers: dict[str, dict[str, Any]] = {
        "accumulate_grad_batches": {"accumulate_grad_batches": 2},
        "gradient_clip_algorithm": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        "precision": {"precision": "64-true"},
        "limit_train_batches": {"limit_train_batches": 2},
        "devices": {"devices": 2},
        "Timer": {"max_time": "00:00:00:10"},
        "StochasticWeightAveraging": {"callbacks": [pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1)]},
        "max_epochs": {"max_epochs": -1},
    }
    found = {name: said(Module(), **given) for name, given in trainers.items()}
    found["no argument 'chekpoint' (checkpoint=…)"] = said(Module(), strategy={"chekpoint": "kept"})
    modules = [ByHand, Clips, ReturnsNothing, LogsTexts, Gathers, Backward, StepsByHand, Skips]
    return found | {kind.__name__: said(kind()) for kind in modules}


def said(module: Module, *, strategy: dict[str, Any] | None = None, **given: Any) -> str:
    from holdfast.errors import UsageError
    from holdfast.integrations.lightning import HoldfastStrategy

    settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, **given}
    try:
        ours = HoldfastStrategy(global_batch=GLOBAL_BATCH, **strategy or {})
        trainer = pl.Trainer(strategy=ours, enable_progress_bar=False, **settings)
        trainer.fit(module, DataLoader(programs.samples(), batch_size=MICRO_BATCH))
    except UsageError as e:
        return str(e)
    return ""


def as_documented() -> None:
    loader = DataLoader(programs.samples(128), batch_size=MICRO_BATCH)
    known: dict[str, Any] = {"module": Module(), "train_loader": loader, "val_loader": loader}
    exec(programs.documented("lightning.md"), known)
    programs.report(known["strategy"].loop)


def main() -> None:
    form = os.environ.get("FORM", "fit")
    if form == "loop":
        programs.report(programs.as_loop(within=True))
    elif form == "documented":
        as_documented()
    elif form == "refusals":
        with open(os.environ["RESULTS"], "a") as results:
            results.write(json.dumps(refusals()) + "\n")
    else:
        as_fit()


if __name__ == "__main__":
    main()
