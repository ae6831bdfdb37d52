"""The script of the sweeps of policies: a model that counts or one that learns; every worker keeps a journal.

The counter's gradients add up to one whatever the samples are. So the sum of its weights is the number of steps that
are in them, on every replica and through every average: a step that is lost, or done twice, is seen at once.
"""

import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from tests.as_loop import AsLoop
from tests.faults.train import checkpoints_of, wait_for_checkpoint

SIZE, GLOBAL_BATCH, MICRO_BATCH = 150, 16, 2  # the last batch of an epoch, the tenth, has three micro-batches
NAMES = ("SelSync", "LocalSGD", "FedAvg", "DiLoCo", "SSP")


def policy_of(text: str) -> Any:
    """What a user would write, as text: SelSync(delta=0.1), LocalSGD(every=4), every-step."""
    if text == "every-step":
        return text
    return eval(text, {"inf": math.inf, **{name: getattr(holdfast, name) for name in NAMES if name in text}})


class Journal:
    """One line at a time, so that a kill loses nothing of it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"journal-{os.environ.get('HOLDFAST_WORKER', 'alone')}.jsonl"

    def write(self, kind: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


class Numbers:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(i), torch.tensor(0.0)


class Counter(nn.Module):
    """Sample i moves weights i and i+1, by more or less, and by one in all."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        more = 1 + (i * 7 % 5) / 2
        return self.count[i] * more + self.count[(i + 1) % SIZE] * (1 - more)


class Counting(torch.optim.SGD):
    """Writes down the weights before and after each update of this replica."""

    journal: Journal

    def step(self, closure: Any = None) -> Any:
        (p,) = self.param_groups[0]["params"]
        before = p.tolist()
        result = super().step(closure)
        self.journal.write("update", before=before, after=p.tolist())
        return result


class Waves:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        return x, (x[:1] * 2 + x[1:2]).tanh()


def make_net(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
    ).double()


def rate(step: int) -> float:
    return 1e-2 / (1 + 0.1 * step)


def make_parts(model: str, journal: Journal, setting: Any) -> dict[str, Any]:
    if model == "count":
        Counting.journal = journal
        return {
            "layers": Counter(),
            "loss": lambda output, target: -output.mean(),
            "optimizer": lambda params: Counting(params, lr=1.0),
            "data": Numbers(),
        }
    return {
        "layers": make_net(float(setting("DROPOUT", "0.2"))),
        "loss": nn.functional.mse_loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "data": Waves(),
        "schedule": rate,
        "clip_norm": float(setting("CLIP")) if setting("CLIP") else None,
    }


def main() -> None:
    setting = os.environ.get
    results = Path(os.environ["RESULTS"])
    journal = Journal(results.parent)
    if setting("SABOTAGE"):
        from tests.faults.sync_sabotage import sabotage

        sabotage(setting("SABOTAGE", ""))
    parts = make_parts(setting("MODEL", "count"), journal, setting)
    more = {"sync": policy_of(setting("POLICY", "every-step"))} if setting("POLICY") != "none" else {}
    make: Any = AsLoop if setting("FORM") == "loop" else holdfast.Run
    run = make(
        **parts | {"data": holdfast.Data(parts["data"], num_workers=int(setting("LOADERS", "0")))},
        **more,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        numerics=setting("NUMERICS", "exact"),
        placement=holdfast.Placement(stages=1),
        checkpoint=checkpoints_of(setting),
    )
    model = run.engine.model.module

    def own() -> str:
        """Of this replica's weights as they are, without asking anybody."""
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]

    def train(total: int) -> None:
        wanted, patient = int(setting("WANTED", "0")), int(setting("PATIENT", "0"))
        slow = dict(pair.split(":") for pair in setting("SLOW", "").split())  # "0.1:0.02": that worker is slower
        evaluate, save, hashed = (int(setting(name, "0")) for name in ("EVALUATE", "SAVE", "HASH"))
        for step in run.steps(total):
            report = getattr(step, "sync", None)
            journal.write(
                "step",
                number=step.number,
                synchronised=getattr(report, "synchronised", None),
                reason=getattr(report, "reason", ""),
                workers=step.workers,
                weights=own(),
            )
            time.sleep(float(slow.get(os.environ.get("HOLDFAST_WORKER", ""), "0")))
            if step.number >= patient and step.workers != wanted and wanted:
                time.sleep(0.02)
            wait_for_checkpoint(step.number, setting)
            if evaluate and step.number % evaluate == evaluate - 1:
                journal.write("value", number=step.number, value=run.evaluate(parts["data"]))
            if save and step.number == save:
                run.save_model(results.parent / "middle.safetensors")
                journal.write("saved", number=step.number, weights=own())
            if hashed and step.number == hashed:
                journal.write("hash", number=step.number, value=run.sha256())
            if step.number == int(setting("BREAK", "-1")):
                break

    if setting("FIRST_LOOP"):
        train(int(setting("FIRST_LOOP", "0")))
        journal.write("between", value=run.evaluate(parts["data"]))
    train(int(setting("STEPS", "12")))
    value = run.evaluate(parts["data"])
    if setting("MODEL_FILE"):
        run.save_model(setting("MODEL_FILE", ""))
    line = {"worker": setting("HOLDFAST_WORKER"), "sha256": run.sha256(), "value": value, "steps": run.step}
    line |= {"weights": own(), "count": model.count.tolist() if isinstance(model, Counter) else None}
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
