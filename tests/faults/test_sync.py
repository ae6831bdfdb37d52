"""Policies in a run whose results are known: every step together, never, twice the same, or cut in two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import mse_loss

from holdfast.data.order import Order
from tests.faults import sync_train
from tests.faults.judge import covered, is_thorough
from tests.faults.sync_judge import (
    POLICIES,
    Rules,
    Trial,
    assert_good_end,
    assert_nothing_lost,
    times_apart,
    train,
)

STEPS = 12

# Weights need not be averages here, so outer steps are the paper's. With a staleness, bits depend on the time.
RESUMED = [
    *(text for name, text in POLICIES.items() if name not in ("diloco", "ssp")),
    "SSP(staleness=0)",
    "DiLoCo(every=3)",
    "DiLoCo(every=3, overlap=1)",  # a checkpoint right after what was found is added
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "resumed" in metafunc.fixturenames:
        metafunc.parametrize("resumed", RESUMED if is_thorough(metafunc.config) else [RESUMED[-1]])


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Every step together, on one worker, as without a policy."""
    return train(tmp_path_factory.mktemp("together"), "none", model="waves", workers=1, CLIP=1.0, EVALUATE=5)


@pytest.mark.parametrize("workers", [3, *(covered("three do the same", number) for number in (1, 4))])
def test_no_threshold_is_every_step(tmp_path: Path, together: Trial, workers: int) -> None:
    trial = train(tmp_path, "SelSync(delta=0)", model="waves", workers=workers, CLIP=1.0, EVALUATE=5)
    assert_good_end(trial)
    assert trial.result.sha256 == together.result.sha256
    assert trial.result.losses == together.result.losses
    assert all(line["synchronised"] for lines in trial.of("step").values() for line in lines)


@pytest.mark.parametrize(
    "policy", ["LocalSGD(every=99, warmup=99)", covered("a warm-up is every step, too", "SelSync(delta=0)")]
)
def test_together_steps_are_exact_through_kills(tmp_path: Path, together: Trial, policy: str) -> None:
    faults = "kill worker=0.1 step=3 phase=backward; kill worker=0.0 step=7 phase=vote"
    trial = train(tmp_path, policy, model="waves", faults=faults, CLIP=1.0, EVALUATE=5)
    assert_good_end(trial, finish=["0.2"])
    assert trial.result.sha256 == together.result.sha256
    assert {e["worker"] for e in trial.result.of("failure")} == {"0.0", "0.1"}


def test_apart_is_not_together(tmp_path: Path, together: Trial) -> None:
    """The control of the two above."""
    trial = train(tmp_path, "LocalSGD(every=3)", model="waves", workers=3, CLIP=1.0, EVALUATE=5)
    assert_good_end(trial)
    assert trial.result.sha256 != together.result.sha256


# --- never: each replica for itself, averaged at the end ------------------------------------------------


def local_run(rank: int, workers: int, steps: int) -> list[torch.Tensor]:
    """What one replica's user would write by hand: its part of each global batch, and no others."""
    size, batch, micro = sync_train.SIZE, sync_train.GLOBAL_BATCH, sync_train.MICRO_BATCH
    order = Order(size=size, global_batch=batch, micro_batch=micro, seed=0)
    net, data = sync_train.make_net(0.0), sync_train.Waves()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        count = order.micro_batches(step)
        cuts = [count * r // workers for r in range(workers + 1)]
        mine = list(range(cuts[rank], cuts[rank + 1])) or [rank % count]
        samples = [data[i] for index in mine for i in order.samples(step, index)]
        inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        for group in optimizer.param_groups:
            group["lr"] = sync_train.rate(step)
        optimizer.zero_grad()
        mse_loss(net(inputs), targets).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("policy", ["SelSync(delta=inf)"])
def test_no_synchronisation_is_local_runs_and_their_average(tmp_path: Path, policy: str) -> None:
    """Four workers for the three micro-batches of a ragged step: one of them computes one again."""
    path = tmp_path / "model.safetensors"
    trial = train(tmp_path, policy, model="waves", workers=4, steps=11, DROPOUT=0, MODEL_FILE=path)
    assert_good_end(trial, steps=11)
    runs = [local_run(rank, 4, 11) for rank in range(4)]
    means = [torch.stack(versions).mean(0) for versions in zip(*runs, strict=True)]
    found = list(load_file(path).values())
    assert sorted(p.shape for p in means) == sorted(p.shape for p in found)
    for mean in means:
        distances = [(mean - p).abs().max().item() for p in found if p.shape == mean.shape]
        assert min(distances) < 1e-10
    assert (means[0] - runs[0][0]).abs().max() > 1e-4, "replicas were apart"
    assert not any(line["synchronised"] for lines in trial.of("step").values() for line in lines)


# --- equal after a synchronisation, and the same every time ----------------------------------------------


def assert_equal_where_synchronised(trial: Trial, *, delayed: bool = False) -> int:
    """Weights in the body of the loop: equal on all workers if the step synchronised; returns how many did."""
    steps: dict[int, list[tuple[bool, str]]] = {}
    for lines in trial.of("step").values():
        for line in lines:
            steps.setdefault(line["number"], []).append((line["synchronised"], line["weights"]))
    count = 0
    for number, found in steps.items():
        flags = {flag for flag, _ in found}
        assert len(flags) == 1, f"step {number}: some say that they synchronised, some that they did not"
        hashes = {weights for _, weights in found}
        if flags == {True} and not delayed:
            assert len(hashes) == 1, f"step {number}: synchronised, and not equal"
        elif flags == {False}:
            assert len(hashes) == len(found), f"step {number}: apart, and yet equal"
        count += flags == {True}
    return count


@pytest.mark.parametrize(
    "policy",
    [
        covered("with a target they are equal, too", "SelSync(delta=0.2, optimizer_state='average')"),
        "SelSync(target=0.4, max_local_steps=4, min_gap=2)",
        covered("after outer steps they are equal, too", "LocalSGD(every=3, warmup=2, optimizer_state='reset')"),
        "DiLoCo(every=4)",
    ],
)
def test_replicas_are_equal_after_a_synchronisation(tmp_path: Path, policy: str) -> None:
    trial = train(tmp_path, policy, model="waves", workers=3)
    assert_good_end(trial)
    assert 1 <= assert_equal_where_synchronised(trial) < STEPS


def test_resumed_as_if_nothing_had_happened(tmp_path: Path, resumed: str) -> None:
    """All workers killed between two checkpoints, the second when it has missed the first, wherever it is then; the
    same number goes on from the last checkpoint."""
    saved = {"EVERY": 4, "EVALUATE": 5}
    whole = train(tmp_path / "a", resumed, model="waves", workers=2, CHECKPOINT=tmp_path / "whole", **saved)
    second = "; ".join(f"kill worker=0.1 step={step} phase=regroup" for step in range(4, 8))
    faults = f"kill worker=0.0 step=6 phase=forward; {second}"
    saved |= {"CHECKPOINT": tmp_path / "cut", "DURABLE": 4}
    cut = train(tmp_path / "b", resumed, model="waves", workers=2, faults=faults, **saved)
    assert_good_end(whole)
    assert_good_end(cut)
    assert len(cut.result.of("resumed")) == 1
    assert cut.result.sha256 == whole.result.sha256
    assert cut.result.results[0]["value"] == whole.result.results[0]["value"]


def test_a_run_that_was_continued_counts_on(tmp_path: Path) -> None:
    """It ends where a checkpoint would have been anyway, and another job goes on."""
    first = train(tmp_path / "a", "local", steps=8, workers=3, CHECKPOINT=tmp_path / "saved", EVERY=4)
    assert_good_end(first, steps=8)
    second = train(tmp_path / "b", "local", steps=STEPS, workers=3, CHECKPOINT=tmp_path / "saved", EVERY=4)
    whole = train(tmp_path / "c", "local", steps=STEPS, workers=3, CHECKPOINT=tmp_path / "other", EVERY=4)
    for trial in (second, whole):
        assert_good_end(trial)
        assert_nothing_lost(trial.lives, Rules())
    assert second.result.sha256 == whole.result.sha256
    assert min(min(life.before) for life in second.lives.values()) == 8
    assert times_apart(whole.lives) > 3
