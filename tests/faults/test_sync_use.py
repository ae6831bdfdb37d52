"""How a script may use a policy, and how not: traps in the body of its loop, and bad settings refused in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast import Checkpoints, Data, Numerics, Placement
from holdfast.data.partition import SelDP
from holdfast.errors import UsageError
from tests.faults import sync_train
from tests.faults.judge import covered
from tests.faults.sync_judge import STEPS, Rules, assert_good_end, assert_nothing_lost, times_apart, train
from tests.faults.sync_train import Waves, make_net, policy_of
from tests.harness import launch


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_WORKER", "HOLDFAST_FAULTS", "HOLDFAST_EVENTS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def make(**changes: Any) -> holdfast.Run:
    settings: dict[str, Any] = {
        "layers": make_net(0.1),
        "loss": nn.functional.mse_loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "data": Waves(),
        "global_batch": 16,
        "micro_batch": 2,
    }
    return holdfast.Run(**{**settings, **changes})


# --- refused in words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "SelSync()",
        "SelSync(delta=-0.1)",
        "SelSync(delta=float('nan'))",
        "SelSync(delta='0.1')",
        "SelSync(delta=0.1, target=0.1)",
        "SelSync(target=0)",
        "SelSync(target=1.5)",
        "SelSync(delta=0.1, signal='loss')",
        "SelSync(delta=0.1, aggregate='median')",
        "SelSync(delta=0.1, optimizer_state='keep')",
        "SelSync(delta=0.1, max_local_steps=0)",
        "SelSync(delta=0.1, max_local_steps=2, min_gap=3)",
        "SelSync(delta=0.1, aggregate='gradients', wait=False)",
        "SelSync(delta=0.1, warmup=-1)",
        "LocalSGD(every=0)",
        "LocalSGD(every=2.5)",
        "LocalSGD(every=3, overlap=-1)",
        "FedAvg(fraction=0, every=3)",
        "FedAvg(fraction=1.1, every=3)",
        "FedAvg(fraction=0.5)",
        "FedAvg(fraction=0.5, every=3, period=1)",
        "DiLoCo(every=0)",
        "DiLoCo(outer_lr=0)",
        "DiLoCo(outer_momentum=1.5)",
        "SSP(staleness=-1)",
    ],
)
def test_bad_settings_of_a_policy(text: str) -> None:
    missing = {"SelSync()": ["delta"], "FedAvg(fraction=0.5)": ["every"]}
    names = [*re.findall(r"(\w+)=", text), *missing.get(text, [])]
    with pytest.raises(UsageError) as refused:
        policy_of(text)
    assert any(name in str(refused.value) for name in names), f"which setting is bad: {refused.value}"


@pytest.mark.parametrize("policy", ["LocalSGD(every=3)", "SelSync(target=0.3)", "SSP(staleness=1)"])
@pytest.mark.parametrize(
    "changes",
    [
        {"placement": Placement(stages=2)},
        {"placement": Placement(stages=[3, 3])},
        {"checkpoint": Checkpoints(folder="saved", log=True)},
        {"numerics": Numerics(update="eager")},
        {"placement": Placement(memory="2GB")},
        {"placement": Placement(profile="profile.json")},
    ],
    ids=lambda changes: str(next(iter(changes.values()))),
)
@pytest.mark.usefixtures("alone")
def test_what_a_policy_cannot_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, changes: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"sync|polic|replica"):
        make(sync=policy_of(policy), **changes)


@pytest.mark.parametrize("sync", ["sometimes", None, 3, holdfast.Run])
@pytest.mark.usefixtures("alone")
def test_what_is_no_policy(sync: Any) -> None:
    with pytest.raises(UsageError, match="sync"):
        make(sync=sync)


@pytest.mark.usefixtures("alone")
def test_a_partition_needs_a_policy() -> None:
    data = Data(Waves(), partition=SelDP(size=len(Waves())))
    with pytest.raises(UsageError, match="partition"):
        make(data=data)
    make(data=data, sync=policy_of("SelSync(delta=0)"))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.usefixtures("alone")
def test_statistics_over_workers_that_do_not_meet(numerics: str) -> None:
    layers = nn.Sequential(nn.Linear(16, 8), nn.SyncBatchNorm(8), nn.Linear(8, 1)).double()
    with pytest.raises(UsageError):
        make(layers=layers, numerics=numerics, sync=policy_of("LocalSGD(every=3)"))


@pytest.mark.usefixtures("alone")
def test_every_step_goes_with_everything() -> None:
    """The control of what is refused."""
    make(placement=Placement(stages=2, memory="2GB"), numerics=Numerics(update="eager"), sync="every-step")


# --- alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["exact", covered("policies average alike in both", "fast")])
@pytest.mark.parametrize(
    "policy",
    [
        "SelSync(delta=0.1)",
        "SelSync(target=0.3, overlap=1)",
        "SelSync(delta=0.01, signal='replica-variance')",
        "SelSync(delta=0.1, aggregate='gradients')",
        "LocalSGD(every=3)",
        "LocalSGD(every=3, overlap=2)",
        "FedAvg(fraction=0.5, every=2)",
        "FedAvg(fraction=0.5, period=0.3)",
        "DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)",
        "SSP(staleness=2)",
    ],
)
@pytest.mark.usefixtures("alone")
def test_one_replica_is_its_own_average(policy: str, numerics: Any) -> None:
    runs = [make(numerics=numerics, clip_norm=1.0, **more) for more in ({}, {"sync": policy_of(policy)})]
    losses = [[step.loss for step in run.steps(12)] for run in runs]
    assert losses[0] == losses[1]
    assert runs[0].evaluate(Waves()) == runs[1].evaluate(Waves())
    assert runs[0].sha256(weights_only=True) == runs[1].sha256(weights_only=True)


@pytest.mark.usefixtures("alone")
def test_a_step_tells_what_it_did() -> None:
    reports = [step.sync for step in make(sync=policy_of("LocalSGD(every=3)")).steps(7)]
    assert [report.synchronised for report in reports] == [False, False, True, False, False, True, False]
    assert all(report.reason for report in reports if report.synchronised)
    assert all(step.sync.synchronised for step in make().steps(2))


@pytest.mark.usefixtures("alone")
def test_events_tell_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two averages in four steps; at the end the optimizers' state follows, which is no third."""
    monkeypatch.setenv("HOLDFAST_EVENTS", str(tmp_path / "events.jsonl"))
    run = make(sync=policy_of("LocalSGD(every=2)"))
    assert len(list(run.steps(4))) == 4
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [(e["step"], e["number"], e["lssr"]) for e in found if e["event"] == "sync"]
    assert told == [(2, 1, 0.5), (4, 2, 0.5), (4, 2, 0.5)]
    assert (run.sync_totals.synchronised, run.sync_totals.lssr) == (2, 0.5)


# --- scripts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", ["LocalSGD(every=5, overlap=3)", covered("with an overlap it is harder", "SelSync(target=0.3)")]
)
def test_evaluations_at_odd_steps(tmp_path: Path, policy: str) -> None:
    """Each is of the average, so all are told the same value, and it is that of the weights."""
    trial = train(tmp_path, policy, EVALUATE=3, SLOW="0.1:0.01")
    assert_good_end(trial)
    assert_nothing_lost(trial.lives, Rules(overlap=3 if "overlap" in policy else 0))
    assert times_apart(trial.lives) > 1
    for lines in trial.of("value").values():
        assert [line["number"] for line in lines] == [2, 5, 8, 11]


def test_what_was_sent_beside_the_steps_is_counted(tmp_path: Path) -> None:
    """Each of two replicas sends half of its weights, and half of the means."""
    trial = train(tmp_path, "LocalSGD(every=2, overlap=1)", workers=2, steps=4)
    late = [e for e in trial.result.of("sync") if e["step"] == 3]
    assert len(late) == 2
    assert all(sync_train.SIZE * 8 <= e["sent"] < sync_train.SIZE * 8 + 200 for e in late)


def test_updates_that_are_pushed_are_exchanges(tmp_path: Path) -> None:
    trial = train(tmp_path, "SSP(staleness=1)", workers=2, steps=4)
    assert {e["lssr"] for e in trial.result.of("sync")} == {0.0}


def test_two_loops_and_what_is_between(tmp_path: Path) -> None:
    faults = "kill worker=0.1 step=2 phase=forward"
    trial = train(tmp_path, "LocalSGD(every=4)", FIRST_LOOP=5, faults=faults, steps=60, WANTED=3, PATIENT=6)
    assert_good_end(trial, steps=60, finish=["0.0", "0.2", "0.3"])
    assert_nothing_lost(trial.lives, Rules(), steps=60)
    between = {line["value"] for lines in trial.of("between").values() for line in lines}
    assert len(between) == 1, "a joiner is told what it has missed"


def test_a_model_saved_in_the_middle_is_the_average(tmp_path: Path) -> None:
    trial = train(tmp_path, "LocalSGD(every=9)", SAVE=4)
    assert_good_end(trial)
    assert_nothing_lost(trial.lives, Rules())
    (count,) = load_file(tmp_path / "middle.safetensors").values()
    assert count.sum().item() == pytest.approx(5)
    for life in trial.lives.values():
        assert (life.before[5] == count.numpy()).all()


def test_a_hash_in_the_body_is_everybodys(tmp_path: Path) -> None:
    trial = train(tmp_path, "LocalSGD(every=9)", HASH=4, faults="kill worker=0.1 step=4 phase=vote")
    assert_good_end(trial)
    assert_nothing_lost(trial.lives, Rules())
    told = {line["value"] for lines in trial.of("hash").values() for line in lines}
    assert len(told) == 1


@pytest.mark.parametrize("at", [7])
def test_a_loop_that_is_left_early(tmp_path: Path, at: int) -> None:
    trial = train(tmp_path, "LocalSGD(every=3, overlap=2)", BREAK=at, SLOW="0.2:0.01")
    assert_good_end(trial, steps=at + 1)
    assert_nothing_lost(trial.lives, Rules(overlap=2), steps=at + 1)


def test_no_steps_at_all(tmp_path: Path) -> None:
    trial = train(tmp_path, "target", steps=0)
    assert_good_end(trial, steps=0)


def test_evaluation_before_training(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, holdfast\nfrom tests.faults.sync_train import Counter, Numbers\n"
        "run = holdfast.Run(layers=Counter(), loss=lambda y, t: -y.mean(), data=Numbers(), global_batch=16, "
        "micro_batch=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), sync=holdfast.LocalSGD(every=4))\n"
        "print('value', run.evaluate(Numbers()))\nfor step in run.steps(6): pass\n"
    )
    result = launch(tmp_path, script=script, workers=2)
    assert result.code == 0
    assert [line for line in result.said if "value" in line]


@pytest.mark.parametrize("call", ["run.sha256()", covered("a hash is refused as this is", "run.evaluate(Numbers())")])
def test_what_only_the_first_worker_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str) -> None:
    """It would average with others that are at another step: an error in words, or the right answer; never a hang."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, holdfast\nfrom tests.faults.sync_train import Counter, Numbers\n"
        "run = holdfast.Run(layers=Counter(), loss=lambda y, t: -y.mean(), data=Numbers(), global_batch=16, "
        "micro_batch=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), sync=holdfast.LocalSGD(every=4))\n"
        f"for step in run.steps(9):\n    if step.is_first_worker and step.number == 1: {call}\n"
    )
    result = launch(tmp_path, script=script, workers=2)
    assert result.code == 2
    assert "on every worker" in capsys.readouterr().err


@pytest.mark.parametrize(
    "policy",
    [
        "SelSync(delta=0.3, aggregate='gradients')",
        covered("gradients that are averaged are harder", "SelSync(delta=0.3)"),
        covered("ballots are waited for in the same way", "SSP(staleness=2)"),
    ],
)
def test_a_worker_that_asks_alone_while_the_others_wait_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    """It waits in an operation, the others in none, for its ballot. The next generation finds out."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, holdfast\nfrom tests.faults.sync_train import Counter, Numbers, policy_of\n"
        "run = holdfast.Run(layers=Counter(), loss=lambda y, t: -y.mean(), data=Numbers(), global_batch=16, "
        f'micro_batch=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), sync=policy_of("{policy}"))\n'
        "for step in run.steps(9):\n    if step.is_first_worker and step.number == 1: run.evaluate(Numbers())\n"
    )
    result = launch(tmp_path, script=script, workers=2, step_timeout="3:8")
    assert result.code == 2
    assert result.of("stalled")
    assert "on every worker" in capsys.readouterr().err


def test_fast_numerics(tmp_path: Path) -> None:
    trial = train(tmp_path, "LocalSGD(every=3)", NUMERICS="fast", faults="kill worker=0.1 step=4 phase=backward")
    assert_good_end(trial, steps=STEPS)
    assert_nothing_lost(trial.lives, Rules())


def test_a_user_s_exception_in_one_worker_is_survived(tmp_path: Path) -> None:
    trial = train(tmp_path, "target", faults="raise worker=0.1 step=4 phase=forward")
    assert_good_end(trial, finish=["0.0", "0.2"])
    assert_nothing_lost(trial.lives, Rules())
