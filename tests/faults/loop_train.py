"""The script of the tests of ``Loop``: one program written as a Run and as a Loop, and one of two models in turns."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, softplus

import holdfast
from tests.engine.pipelines import numbers
from tests.faults.stream_train import SHARDS, packed
from tests.faults.train import Waves, checkpoints_of, wait_for_checkpoint

GLOBAL_BATCH, MICRO_BATCH, CLIP = 16, 2, 0.5


class Net(nn.Module):
    """A model with running statistics, dropout, and a parameter that some batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)
        self.sometimes = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        seen = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training).tanh()
        return self.last(self.sometimes(seen) if float(x[0, 0]) > 0 else seen)


class Words(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(50, 16), nn.Dropout(0.1), nn.Linear(16, 50))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    output = model(x)
    return cross_entropy(output.flatten(0, 1), y.flatten()) if y.dtype == torch.int64 else mse_loss(output, y)


def weight_of(batch: Any) -> Tensor:
    return 1 + (batch[0][:, 0] > 0).sum()


def rate(step: int) -> float:
    return 1e-2 / (1 + 0.1 * step)


def parts_of(setting: Callable[..., Any]) -> dict[str, Any]:
    """The settings that a Run and a Loop share."""
    torch.manual_seed(0)
    stream = setting("DATA") == "stream"
    names = [str(number) for number in range(len(SHARDS))]
    data: Any = holdfast.Stream(packed, shards=names[:4], shuffle=True) if stream else Waves()
    numerics = holdfast.Numerics(
        mode=setting("NUMERICS", "exact"), autocast=torch.bfloat16 if setting("AUTOCAST") else None
    )
    return {
        "model": Words() if stream else Net(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "data": data if stream else holdfast.Data(data, num_workers=int(setting("LOADERS", "0"))),
        "weight": weight_of if setting("WEIGHT") else None,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "schedule": rate,
        "numerics": numerics,
        "checkpoint": checkpoints_of(setting),
        "state": {"seen": [], "mean": torch.zeros(()), "drawn": 0.0},
        **({"sync": eval(setting("POLICY"), vars(holdfast).copy())} if setting("POLICY") else {}),
    }


def after(run: Any, step: holdfast.Step, test: Any) -> None:
    """What the program does when a step is committed, however it is written."""
    setting = os.environ.get
    run.state["seen"].append(step.loss)
    run.state["mean"].mul_(0.9).add_(step.loss)
    run.state["drawn"] += float(torch.rand(()))
    if step.number % 3 == 2:
        run.state["seen"].append(run.evaluate(test, loss_of))
    wanted = int(setting("WANTED", "0"))
    if wanted and step.workers < wanted and step.number >= int(setting("PATIENT", "0")):
        wait_for_joiner(run)
    wait_for_checkpoint(step.number, setting)


def wait_for_joiner(run: Any) -> None:
    """Return when somebody waits to join, at the latest after ten seconds."""
    for _ in range(500):
        if any(run._cohort.membership.wishes()) or os.path.exists(os.environ.get("HURRY", "")):
            return
        time.sleep(0.02)


def as_run(total: int, setting: Callable[..., Any]) -> Any:
    run = holdfast.Run(loss=loss_of, clip_norm=CLIP, **parts_of(setting))
    ema = None if setting("POLICY") else run.ema(0.9)
    for step in run.steps(total):
        after(run, step, numbers_like(run))
    if ema is not None:
        run.state["seen"].append(run.evaluate(numbers_like(run), loss_of, weights=ema))
    return run


def as_loop(total: int, setting: Callable[..., Any]) -> Any:
    parts = parts_of(setting)
    model = parts["model"]
    if setting("INSTANCE"):
        parts["optimizer"] = parts["optimizer"](model.parameters())
    loop = holdfast.Loop(**parts)
    ema = None if setting("POLICY") else loop.ema(0.9)
    for step in loop.steps(total):
        for batch in step.micro_batches():
            step.backward(loss_of(model, batch))
        if made := step.commit(clip_norm=CLIP):
            after(loop, made, numbers_like(loop))
    if ema is not None:
        loop.state["seen"].append(loop.evaluate(numbers_like(loop), loss_of, weights=ema))
    return loop


def numbers_like(run: Any) -> Any:
    """Samples to evaluate on."""
    if isinstance(run.engine.model.module, Words):
        return [(torch.arange(8) + n, torch.arange(8)) for n in range(5)]
    return [Waves()[i] for i in range(11)]


# --- two models in turns ----------------------------------------------------------------------------


def make_pair() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(8, 1))
    adam = {"g": torch.optim.Adam(g.parameters(), lr=1e-2), "d": torch.optim.AdamW(d.parameters(), lr=3e-2)}
    return {"g": g, "d": d}, adam  # type: ignore[return-value]


def in_turns(total: int, setting: Callable[..., Any]) -> Any:
    """A GAN: two steps of the discriminator to one of the generator, each with a schedule and a count of its own."""
    models, optimizers = make_pair()
    g, d = models["g"], models["d"]
    schedules = {name: torch.optim.lr_scheduler.StepLR(optimizers[name], 2, 0.7) for name in ("g", "d")}
    loop = holdfast.Loop(
        model=models, optimizer=optimizers, data=numbers(70), global_batch=8, micro_batch=2,
        checkpoint=checkpoints_of(setting),
        state={"losses": [], "bodies": 0, "drawn": 0.0, **schedules},
    )  # fmt: skip
    for step in loop.steps(total):
        loop.state["bodies"] += 1  # once for each step, however often the body runs
        loop.state["drawn"] += float(torch.rand(()))
        for _ in range(2):
            for real, _target in step.micro_batches():
                fake = g(torch.randn(len(real), 3)).detach()
                step.backward(softplus(-d(real)).mean() + softplus(d(fake)).mean())
            if made := step.commit("d", clip_norm=1.0):
                loop.state["losses"].append(made.loss)
                schedules["d"].step()
            if setting("BETWEEN") and made:
                loop.state["losses"].append(loop.evaluate(numbers(5), lambda both, b: d(b[0]).mean()))
        for real, _target in step.micro_batches():
            step.backward(softplus(-d(g(torch.randn(len(real), 3)))).mean())
        made = step.commit("g")
        schedules["g"].step()  # in a broken step, too: that is taken back
        loop.state["losses"].append(made.loss if made else 0.0)
        if made:
            if (wanted := int(setting("WANTED", "0"))) and made.workers < wanted:
                wait_for_joiner(loop)
            wait_for_checkpoint(made.number, setting)
    return loop


def astray(total: int, setting: Callable[..., Any]) -> Any:
    """Two models in turns, where worker 0.1 does something else in step 2: ``ASTRAY`` says what."""
    models, optimizers = make_pair()
    loop = holdfast.Loop(model=models, optimizer=optimizers, data=numbers(70), global_batch=8, micro_batch=2)
    for step in loop.steps(total):
        here = step.number == 2 and setting("HOLDFAST_WORKER") == "0.1"
        does = setting("ASTRAY") if here else ""
        if does == "nothing":
            continue
        for _ in range(2 if does == "once more" else 1):
            for real, _target in step.micro_batches():
                both = models["d"](models["g"](real[:, :3])).mean()
                step.backward(both)
                if does == "leaves":
                    break
            step.commit("d" if does == "other" else "g", clip_norm=0.5 if does == "clips" else None)
        if does == "evaluates":
            loop.evaluate(numbers(5), lambda both, b: both["d"](b[0]).mean())
    return loop


FORMS: dict[str, Callable[..., Any]] = {"run": as_run, "loop": as_loop, "turns": in_turns, "astray": astray}


def main() -> None:
    setting = os.environ.get
    run = FORMS[setting("FORM", "loop")](int(setting("STEPS", "8")), setting)
    found = {"worker": setting("HOLDFAST_WORKER"), "sha256": run.sha256(), "step": run.step, "pid": os.getpid()}
    found["updates"] = run._progress.update
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
