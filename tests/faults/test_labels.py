"""Training the same thing means the same: workers that differ are refused in words, and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.cluster.agent import Agent
from tests.faults.test_errors import script
from tests.harness import TRAIN, Hosts, count_events, hurry, launch, launch_hosts, until

STEPS = 40
SLOW = {"STEPS": str(STEPS), "WANTED": "99", "PATIENT": "2"}  # slow until there is a hurry
RATE = "optimizer=lambda params: torch.optim.SGD(params, lr=0.1 + 0.1 * rank)"
DROPOUT = "layers=nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1 + 0.1 * rank))"
KERNELS = "os.environ.update({'MKL_CBWR': 'COMPATIBLE'} if rank else {})\n"  # before MKL is first used in the process


@pytest.mark.parametrize(
    ("before", "setting", "words"),
    [
        ("", RATE, ["the optimizer's lr is 0.", " against 0."]),
        ("", DROPOUT, ["module 1", "p=0.2", "p=0.1"]),
        pytest.param(
            KERNELS,
            "seed=0",
            ["the processor's probe", "numerics='fast'"],
            marks=pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL"),
        ),
    ],
    ids=["optimizer", "model", "processor"],
)
def test_a_worker_that_differs_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, setting: str, words: list[str]
) -> None:
    text = f"import os\nrank = int(os.environ['RANK'])\n{before}"
    text += f"list(holdfast.Run(**settings | dict({setting})).steps(3))\n"
    result = launch(tmp_path, script=script(tmp_path, text), workers=2)
    shown = capsys.readouterr().err
    assert result.code == 2
    assert not result.of("commit")
    assert not [word for word in ["does not train the same", *words] if word not in shown], shown
    assert len(shown.strip().splitlines()) == 1


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_in_fast_mode_other_processors_train_together(tmp_path: Path) -> None:
    """The control of the probe, and what its refusal advises."""
    text = f"import os\nrank = int(os.environ['RANK'])\n{KERNELS}"
    text += (
        "run = holdfast.Run(**settings | dict(numerics='fast'))\nlist(run.steps(3))\nprint(run.sha256(), flush=True)\n"
    )
    result = launch(tmp_path, script=script(tmp_path, text), workers=2)
    assert result.code == 0
    assert len({line.split()[-1] for line in result.said}) == 1, "replicas are equal"


def test_an_edited_script_is_refused_while_the_run_goes_on_and_named_when_all_are_lost(
    tmp_path: Path, undisturbed
) -> None:
    """The joiner is not replaced for ever, and nobody waits for its place. (A comment changes no bits.)"""
    path = tmp_path / "train.py"
    path.write_text(TRAIN.read_text())

    async def edit(agent: Agent) -> None:
        events = agent.settings.events
        await until(lambda: events.exists() and count_events(agent, "commit", step=2))
        path.write_text(path.read_text() + "# edited\n")
        agent.workers["0.1"].kill()
        await until(lambda: count_events(agent, "exit", worker="0.3"))
        before = count_events(agent, "commit", worker="0.0")
        await until(lambda: count_events(agent, "commit", worker="0.0") > before + 2)
        for name in ("0.0", "0.2"):
            agent.workers[name].kill()
        await until(lambda: count_events(agent, "resumed"))
        hurry(agent)

    more = {**SLOW, "CHECKPOINT": str(tmp_path / "saved"), "EVERY": "1"}
    result = launch(tmp_path, script=path, environment=more, meddle=edit)
    assert result.code == 0
    assert result.sha256 == undisturbed(STEPS).sha256
    assert [event["worker"] for event in result.of("started")] == [f"0.{n}" for n in range(6)]
    refused = [line for line in result.said if "0.3 does not train the same as" in line]
    assert "the script is train.py " in refused[0]
    warned = [number for number, line in enumerate(result.said) if "resumed with a changed setting" in line]
    assert len(warned) == 1
    assert result.said[warned[0] + 2].split()[1:4] == ["the", "script", "train.py"]
    assert [[*event["changed"]] for event in result.of("resumed")] == [["the script"]]


def test_a_host_with_another_script_is_refused_and_one_with_a_copy_joins(tmp_path: Path, undisturbed) -> None:
    """The same code in another folder is the same."""
    scripts = {name: tmp_path / name / "train.py" for name in ("first", "other", "copy")}
    for name, path in scripts.items():
        path.parent.mkdir()
        path.write_text(TRAIN.read_text() + ("# edited\n" if name == "other" else ""))

    async def join(hosts: Hosts) -> None:
        await until(lambda: any(event["event"] == "commit" for event in hosts.events()))
        for name in ("other", "copy"):
            hosts._settings["command"] = [str(scripts[name])]
            hosts.start(1)
            await until(lambda: hosts.jobs[1].done())
        await until(lambda: any(e["event"] == "commit" and e["worker"].startswith("2.") for e in hosts.events()))
        (tmp_path / "hurry").touch()

    result = launch_hosts(tmp_path, script=scripts["first"], workers=[2], meddle=join, environment=SLOW)
    assert result.code == 0
    assert result.sha256 == undisturbed(STEPS).sha256
    said = [line for line in result.said if "1.0 does not train the same as" in line]
    assert "the script is train.py " in said[0]
    assert not [event for event in result.of("commit") if event["worker"].startswith("1.")]


def test_a_worker_may_import_what_others_do_not(tmp_path: Path) -> None:
    """They train, save and resume together: what only one of them knows is not compared."""
    (tmp_path / "pictures.py").write_text("BLACK = 0\n")
    text = (
        "import os\nif os.environ['RANK'] == '1': import pictures\n"
        f"run = holdfast.Run(**settings, checkpoint={str(tmp_path / 'saved')!r})\n"
        "assert ('the code of pictures.py' in run._progress.label) == (os.environ['RANK'] == '1')\n"
        "list(run.steps(int(os.environ['STEPS'])))\n"
    )
    for steps in (2, 4):
        result = launch(tmp_path, script=script(tmp_path, text), workers=2, environment={"STEPS": str(steps)})
        assert result.code == 0
    assert not result.of("checkpoint-failed")
    assert [event["step"] for event in result.of("checkpoint")] == [2, 4]
    assert len(result.of("resumed")) == 1
    assert not [line for line in result.said if "differences" in line]
