"""The command line as a user meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.cluster.events import read_events
from tests.harness import TRAIN


def holdfast(*arguments: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    settings = {"OMP_NUM_THREADS": "1", "RESULTS": str(folder / "results.jsonl"), **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", *arguments],
        cwd=folder,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "missing.py"], "there is no script 'missing.py'"),
        (["run", "--nnodes", "3:2", str(TRAIN)], "--nnodes 3:2 is not N or MIN:MAX"),
        (["run", "--nnodes", "two", str(TRAIN)], "is not N or MIN:MAX"),
        (["run", "--rdzv-endpoint", "localhost", str(TRAIN)], "several machines need the job's token"),
        (["run", "--token-file", "missing", str(TRAIN)], "cannot read the token file"),
        (["run", "-n", "0", str(TRAIN)], "Invalid value for '-n'"),
        (["demo", "--workers", "1"], "with one worker a kill leaves nobody"),
    ],
)
def test_bad_use_is_a_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    process = holdfast(*arguments, folder=tmp_path)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 2
    assert said in error
    assert "Traceback" not in error


def test_a_misspelt_fault_is_refused(tmp_path: Path) -> None:
    process = holdfast("run", str(TRAIN), folder=tmp_path, HOLDFAST_FAULTS="kil worker=0.0 step=1")
    _, error = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "is not a fault" in error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_cleanly(tmp_path: Path, number: int, code: int) -> None:
    """To the whole process group, as a terminal sends Ctrl-C."""
    process = holdfast("run", "-n", "2", str(TRAIN), folder=tmp_path, STEPS="100000", WANTED="99")
    events = tmp_path / "holdfast-logs" / "events.jsonl"
    for _ in range(3000):
        if events.exists() and any(e["event"] == "commit" for e in read_events(events)):
            break
        time.sleep(0.01)
    os.killpg(process.pid, number)
    output, error = process.communicate(timeout=20)
    assert process.returncode == code
    assert "leaving at the next step boundary" in output
    assert error == ""
    found = list(read_events(events))
    assert not [e for e in found if e["event"] == "failure"]
    last = {e["worker"]: e["step"] for e in found if e["event"] == "commit"}
    assert len(set(last.values())) == 1
    workers = [w for e in found if e["event"] == "generation" for w in e["workers"]]
    for name in workers:
        assert (tmp_path / "holdfast-logs" / f"worker-{name}.log").exists()


def test_scripts_find_what_they_expect_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID"
    script.write_text(
        "import os, sys, time\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"print(*(os.environ[n] for n in {names.split()}), dist.get_world_size(), *sys.argv[1:], flush=True)\n"
        "dist.barrier()\nif dist.get_rank() == 0: time.sleep(0.5)  # it holds the store that the other still needs\n"
    )
    process = holdfast("run", "-n", "2", "--rdzv-id", "job7", str(script), "--flag", "x", folder=tmp_path)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert sorted(output.splitlines()) == ["[0.0] 0 2 0 2 0 job7 2 --flag x", "[0.1] 1 2 1 2 0 job7 2 --flag x"]
