"""The script of the tests of ``run.state``: save-best, early stopping, averages of weights, with loops and in them."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from tests.engine.pipelines import linear, numbers
from tests.faults.train import checkpoints_of, placement_of


class Counted:
    """A class of the script's own, with a state."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, torch.zeros(3)

    def __call__(self, value: float) -> None:
        self.calls += 1
        self.seen[self.calls % 3] += value

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls, self.seen = state["calls"], state["seen"]


def wait_for_joiner(run: holdfast.Run) -> None:
    """Return when somebody waits to join, at the latest after ten seconds."""
    for _ in range(500):
        if run._cohort.membership.wishes()[0]:
            return
        time.sleep(0.02)


def note_best(run: holdfast.Run, value: float) -> None:
    """Save the best model, and count how often it was not better."""
    if value < run.state["best"]:
        run.state["best"], run.state["bad"] = value, 0
        run.save_model(os.environ["MODEL"])
    else:
        run.state["bad"] += 1
    run.state["history"].append((run.step, value))
    run.state["mean"].mul_(0.9).add_(0.1 * value)
    run.state["counted"](value)


def main() -> None:
    setting = os.environ.get
    torch.manual_seed(0)
    counted = Counted()
    run = holdfast.Run(
        layers=[linear(), nn.GELU(), linear(), linear()],
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=float(setting("RATE", "0.3"))),
        data=numbers(70),
        global_batch=16,
        micro_batch=2,
        placement=placement_of(setting),
        checkpoint=checkpoints_of(setting, log=setting("LOG") == "1"),
        numerics=holdfast.Numerics(check_every=int(setting("CHECK", "3"))),
        state={"best": float("inf"), "bad": 0, "history": [], "mean": torch.zeros(()), "counted": counted},
    )
    ema = run.ema(decay=0.8)
    test = numbers(20)
    wanted, patience = int(setting("WANTED", "0")), int(setting("PATIENCE", "99"))
    steps, epochs = int(setting("STEPS", "8")), int(setting("EPOCHS", "1"))
    for epoch in range(epochs):
        for step in run.steps(steps * (epoch + 1) // epochs):
            if wanted and step.workers != wanted:
                wait_for_joiner(run)
            if not setting("BETWEEN"):
                note_best(run, run.evaluate(test, weights=ema))
            if run.state["bad"] > patience:
                break
            if step.is_first_worker and setting("DIFFER") == str(step.number):
                run.state["bad"] += 1
        if setting("BETWEEN"):
            note_best(run, run.evaluate(test, weights=ema))
    if more := int(setting("MORE", "0")):
        for step in run.steps(run.step + more):  # as many, wherever the first loop was left
            if wanted and step.workers != wanted:
                wait_for_joiner(run)
    run.save_model(os.environ["MODEL"] + ".ema", weights=ema)
    run.state["counted"](0.5)  # a joiner must not count twice what it missed
    found = {"sha256": run.sha256(), "weights": run.sha256(weights_only=True), "step": run.step}
    found |= {key: run.state[key] for key in ("best", "bad", "history")}
    found |= {"calls": counted.calls, "mean": float(run.state["mean"])}
    models = [Path(os.environ["MODEL"] + end) for end in ("", ".ema")]
    found["models"] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in models]
    with open(os.environ["RESULTS"], "a") as results:
        results.write(json.dumps({"worker": setting("HOLDFAST_WORKER"), **found}) + "\n")


if __name__ == "__main__":
    main()
