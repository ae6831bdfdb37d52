"""The command line as a user meets it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.cluster.agent_workers import REPEAT_SECONDS
from holdfast.cluster.events import read_events
from tests.harness import TRAIN, wait_until
from tests.warm import Command


def fresh(*arguments: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """``holdfast`` in an interpreter of its own, as a shell starts it: nothing is imported yet."""
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
        (["run", "missing.py"], "missing.py"),
        (["run", "--nnodes", "3:2", str(TRAIN)], "--nnodes 3:2"),
        (["run", "--nnodes", "two", str(TRAIN)], "--nnodes two"),
        (["run", "--rdzv-endpoint", "localhost", str(TRAIN)], "HOLDFAST_TOKEN"),
        (["run", "--token-file", "missing", str(TRAIN)], "missing"),
        (["run", "--tls-cert", "a.pem", str(TRAIN)], "--tls-key and --tls-ca missing"),
        (
            ["run", "--tls-cert", "a.pem", "--tls-key", "b", "--tls-ca", "c", str(TRAIN)],
            "c cannot be used: No such file",
        ),
        (["run", "--tls-tensors", str(TRAIN)], "--tls-tensors needs certificates"),
        (["run", "-n", "0", str(TRAIN)], "-n 0"),
        (["run", "--grace", "0", str(TRAIN)], "'--grace'"),
        (["run", "--step-timeout", "soon", str(TRAIN)], "--step-timeout soon is not a number of seconds"),
        (["run", "--step-timeout", "9:3", str(TRAIN)], "--step-timeout 9:3"),
        (["demo", "--workers", "1"], "--workers"),
    ],
)
def test_bad_use_is_a_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    process = Command(*arguments, folder=tmp_path)
    assert process.wait(60) == 2
    assert said in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("source", ["environment", "file"])
@pytest.mark.parametrize("token", ["secret", "x" * 15])
def test_a_short_token_is_refused(tmp_path: Path, token: str, source: str) -> None:
    (tmp_path / "token").write_text(token + "\n")
    words = ["--token-file", "token"] if source == "file" else []
    process = Command("run", *words, str(TRAIN), folder=tmp_path, HOLDFAST_TOKEN=token)
    assert process.wait(60) == 2
    assert f"the job's token has {len(token)} characters, and needs at least 16" in process.stderr
    assert process.stderr.count("\n") == 1


def test_a_misspelt_fault_is_refused(tmp_path: Path) -> None:
    process = Command("run", str(TRAIN), folder=tmp_path, HOLDFAST_FAULTS="kil worker=0.0 step=1")
    assert process.wait(60) == 2
    assert "kil" in process.stderr


def wait_for_a_commit(folder: Path) -> None:
    events = folder / "holdfast-logs" / "events.jsonl"
    wait_until("a commit", lambda: events.exists() and any(e["event"] == "commit" for e in read_events(events)))


def test_ctrl_c_stops_cleanly(tmp_path: Path) -> None:
    """In interpreters of their own, as a shell starts them."""
    process = fresh("run", "-n", "2", str(TRAIN), folder=tmp_path, STEPS="100000", WANTED="99")
    wait_for_a_commit(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == ""
    assert_stopped_cleanly(tmp_path, signal.SIGINT)


def test_sigterm_stops_cleanly(tmp_path: Path) -> None:
    settings = {"STEPS": "100000", "WANTED": "99", "RESULTS": str(tmp_path / "results.jsonl")}
    process = Command("run", "-n", "2", str(TRAIN), folder=tmp_path, **settings)
    wait_for_a_commit(tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 143
    assert process.stderr == ""
    assert_stopped_cleanly(tmp_path, signal.SIGTERM)


def assert_stopped_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    """By a signal to the whole process group, as a terminal sends Ctrl-C."""
    found = list(read_events(tmp_path / "holdfast-logs" / "events.jsonl"))
    assert [e["signal"] for e in found if e["event"] == "preempted"] == [number.name]
    assert not [e for e in found if e["event"] == "failure"]
    last = {e["worker"]: e["step"] for e in found if e["event"] == "commit"}
    assert len(set(last.values())) == 1
    workers = [w for e in found if e["event"] == "generation" for w in e["workers"]]
    for name in workers:
        assert (tmp_path / "holdfast-logs" / f"worker-{name}.log").exists()


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """The first one is a notice, which these workers do not heed."""
    script = tmp_path / "script.py"
    heedless = "signal.signal(signal.SIGTERM, lambda *_: None)\nprint('here', flush=True)\n"
    script.write_text(f"import signal\n{heedless}while True: signal.pause()\n")
    process = Command("run", "-n", "2", str(script), folder=tmp_path)
    wait_until("both are there", lambda: process.stdout.count("here") == 2)
    process.send_signal(signal.SIGTERM)
    events = tmp_path / "holdfast-logs" / "events.jsonl"
    wait_until("it has understood", lambda: any(e["event"] == "preempted" for e in read_events(events)))
    time.sleep(2 * REPEAT_SECONDS)  # else it is the same notice once more
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM


def two_free_ports() -> int:
    """The first of two: the coordinator's, and the next one, which is the script's own.

    They lie below those that the system gives away, so that nobody takes the second one meanwhile.
    """
    for port in range(20_000 + os.getpid() % 10_000, 32_000, 2):
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue
    raise OSError("no two free ports")


def test_scripts_find_what_they_expect_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID"
    script.write_text(
        "import os, sys\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"print(*(os.environ[n] for n in {names.split()}), dist.get_world_size(), *sys.argv[1:], flush=True)\n"
        "store = dist.distributed_c10d._get_default_store()\ndist.barrier()\n"
        "if dist.get_rank(): store.set('done', '')\nelse: store.wait(['done'])  # it holds the store of both\n"
    )
    words = ("--rdzv-endpoint", f"127.0.0.1:{two_free_ports()}", "--rdzv-id", "job7", str(script), "--flag", "x")
    process = Command("run", "-n", "2", *words, folder=tmp_path, HOLDFAST_TOKEN="a secret of the tests")
    assert process.wait(60) == 0, process.stderr
    assert sorted(process.stdout.splitlines()) == ["[0.0] 0 2 0 2 0 job7 2 --flag x", "[0.1] 1 2 1 2 0 job7 2 --flag x"]
